"""The table of runs: what was planned, what came of it, what is to be doubted, and the ends of failed logs."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import quote

from benchctl.analysis.analyzed import AnalyzedExperiment
from benchctl.analysis.compare.warnings import WarningKind, warning_kind
from benchctl.analysis.metrics.bounds import MARK
from benchctl.analysis.summary.runs import RunSummary
from benchctl.formats import NOT_AVAILABLE, page_number
from benchctl.records.manifest import PlannedRun
from benchctl.records.record import ResultWarning
from benchctl.report.page.html import Html, el, join
from benchctl.report.text.tables import footnotes

LOG_LINES: Final = 40
_MOST_LOG_BYTES: Final = 64 * 1024
_COLUMNS: Final = {"wall s": "wall_s", "tok/s": "output_throughput", "step ms": "step_ms", "TTFT ms": "ttft_ms"}


def runs_section(analysis: AnalyzedExperiment, *, is_inside: bool) -> Html:
    """Every planned run, the notes to them, and the last words of failed servers.

    ``is_inside`` says that the page lies in the result directory, so that links to its files lead somewhere.
    """
    begun = {run.record.run_id: run for run in analysis.runs}
    found = footnotes(analysis)
    notes = {warning_kind(note): i for i, note in enumerate(found, start=1)}
    heads = ("run", "block", "state", *_COLUMNS, "failed", "notes", "files")
    numeric = {"block", *_COLUMNS, "failed"}
    head = el("tr", *(el("th", h, scope="col", class_="num" if h in numeric else None) for h in heads))
    rows = [
        _row(planned, begun.get(planned.run_id), notes, is_inside=is_inside)
        for planned in analysis.results.plan.runs
    ]
    table = el("table", el("thead", head), el("tbody", *rows), class_="runs")
    return join(el("div", table, class_="wide"), _notes(found), *_logs(analysis))


def _row(planned: PlannedRun, run: RunSummary | None, notes: dict[WarningKind, int], *, is_inside: bool) -> Html:
    if run is None:
        blanks = [el("td", NOT_AVAILABLE, class_="num") for _ in (*_COLUMNS, "failed")]
        return el(
            "tr", el("td", planned.run_id), _num(planned.block), el("td", "not begun"), *blanks, el("td"), el("td")
        )
    marks = sorted({notes[key] for w in run.warnings if (key := warning_kind(w)) in notes})
    failed = run.number("num_failed")
    return el(
        "tr",
        el("td", run.record.run_id),
        _num(run.record.block),
        el("td", run.state, class_=f"state is-{run.record.state}"),
        *(
            el("td", page_number(run.number(column)), f" {MARK}" if column in run.bounds else None, class_="num")
            for column in _COLUMNS.values()
        ),
        el("td", NOT_AVAILABLE if failed is None else f"{failed:.0f}", class_="num"),
        el("td", *(el("a", f"{mark} ", href=f"#note-{mark}") for mark in marks)),
        el("td", *_links(run, is_inside=is_inside)),
        id=f"run-{run.record.run_id}",
    )


def _num(value: int) -> Html:
    return el("td", str(value), class_="num")


def _links(run: RunSummary, *, is_inside: bool) -> Iterator[Html]:
    if is_inside:
        place = f"runs/{quote(run.record.run_id)}"
        yield el("a", "log", href=f"{place}/server.log")
        yield Html(" ")
        yield el("a", "run.json", href=f"{place}/run.json")


def _notes(notes: Sequence[ResultWarning]) -> Html | None:
    """The notes that the table numbers; where runs differ in the numbers of one, it is that of the first."""
    if not notes:
        return None
    items = [
        el("li", el("code", note.code), f" {note.message}", id=f"note-{i}") for i, note in enumerate(notes, start=1)
    ]
    return el("ol", *items, class_="notes")


def _logs(analysis: AnalyzedExperiment) -> Iterator[Html]:
    for run in analysis.runs:
        failure = run.record.failure
        if failure is None and run.record.state != "failed":
            continue
        said = f"{failure.cause}: {failure.message}" if failure is not None else "failed"
        tail = log_tail(analysis.results.path / "runs" / run.record.run_id / "server.log")
        tail = tail or (failure.log_tail if failure is not None else "")
        summary = el("summary", el("b", run.record.run_id), f" {said}")
        yield el("details", summary, el("pre", tail or "(the server's log is empty or absent)"), class_="log")


def log_tail(path: Path) -> str:
    """The last lines of a log, whatever bytes are in it; empty where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _MOST_LOG_BYTES))
            content = file.read()
    except OSError:
        return ""
    return "\n".join(content.decode(errors="replace").splitlines()[-LOG_LINES:])
