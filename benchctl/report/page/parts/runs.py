"""The table of runs: plan, state and main numbers of each, its warnings, and the ends of failed logs."""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from benchctl.analysis.analyzed import AnalyzedExperiment
from benchctl.analysis.compare.warnings import WarningKind, warning_kind
from benchctl.analysis.metrics.bounds import marked
from benchctl.analysis.summary.runs import RunSummary
from benchctl.errors import RecordError
from benchctl.formats import NOT_AVAILABLE, page_number
from benchctl.records.directory import arm_label
from benchctl.records.manifest import PlannedRun
from benchctl.report.text.tables import footnotes, run_columns
from benchctl.untrusted.files import is_file, open_file
from benchctl.untrusted.known_secrets import redacted

LOG_LINES: Final = 40
_MOST_LOG_BYTES: Final = 64 * 1024
_COLUMNS: Final = {"wall s": "wall_s", "tok/s": "output_throughput", "step ms": "step_ms", "TTFT ms": "ttft_ms"}
_REQUESTS: Final = {"failed": "num_failed"}
_COUNTS: Final = frozenset(_REQUESTS.values())


def runs_values(analysis: AnalyzedExperiment, *, is_inside: bool) -> dict[str, Any]:
    """Every planned run, the warnings that the table numbers, and the ends of the logs of failed servers.

    ``is_inside``: the page is in the result directory, so that links to the files of its runs work. Where runs
    differ in the numbers of one warning, its text is that of the first.
    """
    begun = {run.record.run_id: run for run in analysis.runs}
    warnings = footnotes(analysis)
    columns = {**_COLUMNS, **_REQUESTS} if analysis.passes is None else run_columns(analysis)
    root = analysis.results.path
    numbers = {warning_kind(warning): i for i, warning in enumerate(warnings, start=1)}
    rows = []
    for planned in analysis.results.plan.runs:
        run = begun.get(planned.run_id)
        if run is None:
            rows.append(_planned_row(planned, columns))
            continue
        row = _row(run, columns, numbers)
        path = f"runs/{quote(planned.run_id)}" if is_inside else None
        has_log = is_file(root / "runs" / planned.run_id / "server.log", within=root)
        rows.append({**row, "path": path, "has_log": has_log})
    states = Counter(row["state"] for row in rows)
    return {
        "headings": list(columns),
        "rows": rows,
        "arms": list(dict.fromkeys(row["arm"] for row in rows)),
        "all_states": list(states),
        "states": ", ".join(f"{number} {state}" for state, number in states.items()),
        "notes": [(warning.code, warning.message) for warning in warnings],
        "logs": list(_logs(analysis)),
    }


def _planned_row(planned: PlannedRun, columns: Mapping[str, str]) -> dict[str, Any]:
    return {
        "id": planned.run_id,
        "arm": arm_label(planned.variant, planned.cell),
        "is_begun": False,
        "block": planned.block,
        "state": "not begun",
        "numbers": [NOT_AVAILABLE] * len(columns),
        "marks": [],
        "path": None,
    }


def _row(run: RunSummary, columns: Mapping[str, str], numbers: Mapping[WarningKind, int]) -> dict[str, Any]:
    return {
        "id": run.record.run_id,
        "arm": run.label,
        "is_begun": True,
        "block": run.record.block,
        "state": run.state,
        "record_state": run.record.state,
        "numbers": [_number(run, column) for column in columns.values()],
        "marks": sorted({numbers[kind] for w in run.warnings if (kind := warning_kind(w)) in numbers}),
    }


def _number(run: RunSummary, column: str) -> str:
    value = run.number(column)
    if column in _COUNTS:
        return NOT_AVAILABLE if value is None else f"{value:.0f}"
    return marked(page_number(value), column in run.bounds)


def _logs(analysis: AnalyzedExperiment) -> Iterator[dict[str, str]]:
    for run in analysis.runs:
        failure = run.record.failure
        if failure is None and run.record.state != "failed":
            continue
        root = analysis.results.path
        tail = log_tail(root / "runs" / run.record.run_id / "server.log", within=root)
        tail = tail or (failure.log_tail if failure is not None else "")
        yield {
            "run_id": run.record.run_id,
            "cause": f"{failure.cause}: {failure.message}" if failure is not None else "failed",
            "tail": tail or "(the server's log is empty or absent)",
        }


def log_tail(path: Path, *, within: Path) -> str:
    """The last lines of a log, without secrets and bytes that are not text; empty without a log, and
    the reason where its entry is not a file.
    """
    try:
        with open_file(path, within=within) as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _MOST_LOG_BYTES))
            content = file.read()
    except OSError:
        return ""
    except RecordError as error:
        return f"({error})"
    return "\n".join(redacted(content.decode(errors="replace")).splitlines()[-LOG_LINES:])
