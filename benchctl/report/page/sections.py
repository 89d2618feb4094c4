"""The sections of the page as plain values for the templates of the same names; none holds markup.

Runs with their warnings and the ends of failed logs; provenance; the top of the page with what must be known before
its verdict is believed; the metrics of a comparison, its answers and its results by node; times.
"""

import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from benchctl.analysis.bonus import context_in_words, modes_in_words, verdict_sentences
from benchctl.analysis.compare.metric import MetricComparison
from benchctl.analysis.compare.result import CellComparison, Comparison
from benchctl.analysis.compare.words import (
    change_text,
    floors_text,
    looks_lines,
    reasons_of,
    threshold_text,
    unrecorded_lines,
)
from benchctl.analysis.quality.accuracy import divergence_sentence, quality_lines
from benchctl.analysis.summary.analyzed import (
    CONFIDENCE,
    LATENCY_NAMES,
    AnalyzedExperiment,
    floor_peaks,
    percentile_levels,
)
from benchctl.analysis.validity.machines import Machine, gpu_names, machines_of
from benchctl.errors import RecordError
from benchctl.formats import capitalized, count_of, first_of, gib, minus_in_numbers, percentage, range_of
from benchctl.records.directory import arm_label
from benchctl.report.charts.figure import arms_of
from benchctl.report.page.verdict import PageVerdict
from benchctl.report.page.words import change_term, metric_term, p_term, value_term, verdict_term
from benchctl.report.table import Table
from benchctl.report.tables.compare import correction_text, is_shown, metric_row
from benchctl.report.tables.experiment import (
    blocks_text,
    device_of_passes,
    footnotes,
    node_lines,
    nodes_table,
    passes_text,
    prompt_lengths_text,
    runs_table,
)
from benchctl.report.tables.times import bonus_table, launch_table, passes_table, percentile_table
from benchctl.untrusted.files import is_file, open_file
from benchctl.untrusted.secrets import redacted

LOG_LINES: Final = 40
_MOST_LOG_BYTES: Final = 64 * 1024


def runs_values(analysis: AnalyzedExperiment, *, is_inside: bool) -> dict[str, Any]:
    """Every planned run, the warnings that the table numbers, and the ends of the logs of failed servers.

    ``is_inside``: the page is in the result directory, so that links to the files of its runs work. Where runs
    differ in the numbers of one warning, its text is that of the first.
    """
    begun = {run.record.run_id: run for run in analysis.runs}
    table, root = runs_table(analysis), analysis.results.path
    rows = []
    for planned, values, texts in zip(analysis.results.plan.runs, table.rows, table.texts(), strict=True):
        run = begun.get(planned.run_id)
        rows.append(
            {
                "texts": texts,
                "marks": values["notes"],
                "arm": arm_label(planned.variant, planned.cell),
                "block": planned.block,
                "record_state": None if run is None else run.record.state,
                "path": f"runs/{quote(planned.run_id)}" if is_inside and run is not None else None,
                "has_log": is_file(root / "runs" / planned.run_id / "server.log", within=root),
            }
        )
    states = Counter(row["state"] for row in table.rows)
    return {
        "columns": table.columns,
        "rows": rows,
        "arms": list(dict.fromkeys(row["arm"] for row in rows)),
        "all_states": list(states),
        "states": ", ".join(f"{number} {state}" for state, number in states.items()),
        "notes": [(warning.code, warning.message) for warning in footnotes(analysis)],
        "logs": list(_logs(analysis)),
    }


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


def directory_values(analysis: AnalyzedExperiment) -> dict[str, Any]:
    """One result directory: the contents of ``manifest.json`` and ``profile.yaml``, and the servers' commands."""
    servers: dict[str, str] = {}
    for run in analysis.runs:
        if run.record.argv:
            servers.setdefault(run.label, shlex.join(run.record.argv))
    return {
        "name": analysis.results.path.resolve().name,
        "facts": [(name, text) for name, text in _facts(analysis).items() if text],
        "profile_sha256": analysis.results.manifest.profile_sha256,
        "servers": list(servers.items()),
        "profile_yaml": analysis.results.profile_yaml,
    }


def _facts(analysis: AnalyzedExperiment) -> dict[str, str | list[str] | None]:
    manifest = analysis.results.manifest
    git = manifest.git
    commit = "unknown" if git is None else f"{git.sha}{' with uncommitted changes' if git.is_dirty else ''}"
    versions = sorted({run.record.engine_version for run in analysis.runs if run.record.engine_version is not None})
    return {
        "directory": analysis.results.path.resolve().name,
        "label": manifest.label,
        "state": manifest.state,
        "measured": manifest.created_at,
        "command": shlex.join(manifest.argv),
        "engine": f"{manifest.engine} {', '.join(versions)}",
        **_work(analysis),
        "profile": manifest.profile,
        "seed, blocks": f"{manifest.seed}, {blocks_text(manifest)}",
        **_machine_facts(analysis),
        "benchctl": f"{manifest.benchctl_version}, commit {commit}",
        "versions": ", ".join(f"{name} {version}" for name, version in manifest.versions.items()),
    }


def _machine_facts(analysis: AnalyzedExperiment) -> dict[str, str | list[str] | None]:
    """The machines that measured, and the one on which the experiment was created, where that is another."""
    machines, host = machines_of(analysis.results), analysis.results.manifest.host
    is_here = any(machine.hostname == host.hostname for machine in machines)
    if len(machines) == 1:
        python = f", Python {host.python}" if is_here else ""
        facts: dict[str, str | list[str] | None] = {"host": f"{_machine_text(machines[0])}{python}"}
    else:
        facts = {
            f"{len(machines)} nodes": [
                f"{_machine_text(machine)}; {count_of(len(machine.blocks), 'block')}" for machine in machines
            ]
        }
    facts["GPUs"] = [
        text for machine in machines for text in _gpu_texts(machine, has_node=len(machines) > 1)
    ] or "none"
    return facts if is_here else {**facts, "created on": f"{host.hostname}, Python {host.python}"}


def _machine_text(machine: Machine) -> str:
    cores = machine.num_cores or "unknown"
    return (
        f"{machine.node}: {machine.cpu_model or 'unknown CPU'}, {cores} cores, {gib(machine.memory_bytes)}, "
        f"{machine.platform or 'unknown system'}"
    )


def _gpu_texts(machine: Machine, *, has_node: bool) -> list[str]:
    node = f"{machine.node}: " if has_node else ""
    return [
        f"{node}{gpu.name}, {gib(gpu.memory_bytes)}, driver {gpu.driver or 'unknown'}, {gpu.uuid or 'no UUID'}"
        for gpu in machine.gpus
    ]


def _work(analysis: AnalyzedExperiment) -> dict[str, str]:
    """The work that was computed: requests, or forward passes."""
    if analysis.passes is not None:
        return {"passes": passes_text(analysis)}
    manifest = analysis.results.manifest
    requests = f"{len(analysis.results.requests)} of {manifest.dataset}, stop {manifest.stop}"
    lengths = prompt_lengths_text(analysis.results.requests, manifest.engine)
    prompts = {} if lengths is None else {"prompts": lengths}
    return {"requests": requests, **prompts, "request set": manifest.request_set_sha256}


def comparison_values(verdict: PageVerdict) -> dict[str, Any]:
    """Settings in which the sides differ, the noise floors, and every warning of the comparisons once."""
    warnings: dict[tuple[str, str], None] = {}
    for comparison in verdict.comparisons:
        for warning in comparison.warnings:
            where = f" [{warning.where}]" if warning.where else ""
            warnings.setdefault((warning.code, warning.message + where))
    return {
        "differences": _differences(verdict),
        "noise": {name: noise for comparison in verdict.comparisons for name, noise in comparison.noise.items()},
        "warnings": list(warnings),
    }


def _differences(verdict: PageVerdict) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for each in verdict.all:
        allowed = each.comparison.allowed if each.comparison is not None else ()
        rows += [{"variant": each.b_name, "key": d.key, "a": d.a, "b": d.b, "is_allowed": True} for d in allowed]
        for line in each.differences:
            key, _, values = line.partition(": ")
            left, _, right = values.partition(" against ")
            rows.append({"variant": each.b_name, "key": key, "a": left, "b": right, "is_allowed": False})
    return rows


_PAIRING: Final = {
    "interleaved": "interleaved blocks",
    "same-plan": "blocks of two experiments with the same plan",
    "unpaired": "blocks per side, unpaired",
}
_MAX_SHARING: Final = 2


def top_values(analyses: Sequence[AnalyzedExperiment], verdict: PageVerdict, subject: str = "") -> dict[str, Any]:
    """The values of ``top.html`` besides the verdict itself; ``subject`` is that of results without a directory."""
    return {
        "subject": subject or _subject(analyses),
        "rules": _rules(verdict),
        "problem": _problem(verdict),
        "reasons": _reasons(verdict),
        "findings": _findings(analyses),
    }


def _reasons(verdict: PageVerdict) -> list[str]:
    """The reasons of every comparison that is open or invalid; one that several metrics share stands once."""
    comparisons = [each.comparison for each in verdict.deciding if each.comparison is not None]
    undecided = [comparison for comparison in comparisons if comparison.verdict in {"invalid", "inconclusive"}]
    reasons: list[str] = []
    sharing: dict[str, list[str]] = {}
    for comparison in undecided:
        metrics = [] if comparison.verdict == "invalid" else _undecided_metrics(comparison)
        whose = f"{comparison.b_name}, " if len(comparisons) > 1 else ""
        for cell, metric in metrics:
            where = f"{whose}{cell.label}: {metric.metric.name} {change_text(metric)}"
            sharing.setdefault(metric.reason or metric.verdict, []).append(where)
        reasons += reasons_of(comparison)[len(metrics) :]  # those of no metric: errors, and the quality of answers
    shared = [f"{first_of(wheres, _MAX_SHARING)}: {reason}" for reason, wheres in sharing.items()]
    return [*shared, *dict.fromkeys(reasons)]


def _undecided_metrics(comparison: Comparison) -> list[tuple[CellComparison, MetricComparison]]:
    return [
        (cell, metric)
        for cell in comparison.cells
        for metric in cell.deciding
        if metric.verdict in {"inconclusive", "unknown"}
    ]


def _findings(analyses: Sequence[AnalyzedExperiment]) -> list[dict[str, str]]:
    """The findings of each directory, with its name where there are several."""
    return [
        {
            "code": finding.code,
            "sentence": finding.sentence,
            "directory": analysis.results.path.resolve().name if len(analyses) > 1 else "",
        }
        for analysis in analyses
        for finding in analysis.findings
    ]


def _subject(analyses: Sequence[AnalyzedExperiment]) -> str:
    parts = []
    for analysis in analyses:
        manifest = analysis.results.manifest
        label = f" ({manifest.label})" if manifest.label else ""
        machines = machines_of(analysis.results)
        device = ", ".join(dict.fromkeys(gpu_names(machines))) or "no GPU"
        device = device if len(machines) == 1 else f"{len(machines)} nodes, {device}"
        device = device_of_passes(analysis) or device
        parts.append(f"{manifest.profile}{label} · {manifest.engine} · {device} · {manifest.created_at[:10]}")
    return "  |  ".join(dict.fromkeys(parts))


def _rules(verdict: PageVerdict) -> list[str]:
    """Exit code, deciding metrics, margins and intervals."""
    rules = [f"exit code {verdict.exit_code}"]
    comparisons = [each.comparison for each in verdict.deciding if each.comparison is not None]
    if not comparisons:
        return rules
    first = comparisons[0]
    names = dict.fromkeys(m.metric.name for c in comparisons for cell in c.cells for m in cell.deciding)
    blocks = range_of([cell.num_blocks for comparison in comparisons for cell in comparison.cells])
    return [
        *rules,
        f"decided by {', '.join(names) or 'nothing'}",
        *dict.fromkeys(line for comparison in comparisons for line in unrecorded_lines(comparison)),
        minus_in_numbers(threshold_text(first)),
        *([f"noise floor {floors_text(first)}"] if first.noise else []),
        f"{percentage(first.confidence)} intervals over {blocks} {_PAIRING[first.pairing]}",
        correction_text(first),
        *looks_lines(first),
    ]


def _problem(verdict: PageVerdict) -> str | None:
    """The message of a comparison that cannot be made, from its second line on."""
    problems = [each.problem for each in verdict.deciding]
    return problems[0].partition("\n")[2] if len(problems) == 1 and problems[0] is not None else None


_MAX_ERRORS: Final = 5
_MAX_CELLS: Final = 3
"""With more cells, the first table has the deciding metrics only."""


def table_values(comparison: Comparison, num_cells: int) -> dict[str, Any]:
    """The table of the metrics that decide or are usually asked for, and the one of all metrics.

    ``num_cells`` are those of the whole page.
    """
    return {
        "a_name": comparison.a_name,
        "b_name": comparison.b_name,
        "interval": f"change [{percentage(comparison.confidence)} interval]",
        "num_all": max((len(cell.metrics) for cell in comparison.cells), default=0),
        "main": [_main_body(comparison, cell, is_short=num_cells > _MAX_CELLS) for cell in comparison.cells],
        "all": [_body(comparison, cell, show_all=True) for cell in comparison.cells],
    }


def _main_body(comparison: Comparison, cell: CellComparison, *, is_short: bool) -> dict[str, Any]:
    """The rows that most readers want, or with ``is_short`` those of deciding metrics and of counts that differ.

    A reason that several deciding rows share stands once, below the last.
    """
    body = _body(comparison, cell, show_all=False)
    rows = [row for row in body["rows"] if not is_short or row["role"] != "exploratory"]
    reasons = [row["verdict_meaning"] if row["role"] == "deciding" else None for row in rows]
    for row, reason, following in zip(rows, reasons, [*reasons[1:], None], strict=True):
        row["reason"] = reason if reason != following else None
    return {**body, "rows": rows}


def _body(comparison: Comparison, cell: CellComparison, *, show_all: bool) -> dict[str, Any]:
    return {
        "label": cell.label,
        "blocks": count_of(cell.num_blocks, "block"),
        "verdict": cell.verdict,
        "errors": [str(error) for error in cell.errors[:_MAX_ERRORS]],
        "rows": [_with_terms(comparison, metric) for metric in cell.metrics if is_shown(metric, show_all=show_all)],
    }


def _with_terms(comparison: Comparison, metric: MetricComparison) -> dict[str, Any]:
    """The row of every table of metrics, with what is told of each of its fields."""
    texts = metric_row(metric)
    has_p = metric.role != "exact" and metric.estimate is not None and metric.estimate.p_value is not None
    sides = (("a", comparison.a_name, metric.a_blocks), ("b", comparison.b_name, metric.b_blocks))
    return texts | {
        "role": metric.role,
        "meaning": metric_term(metric.metric),
        "unit": f" {metric.metric.unit}" if metric.metric.unit != "1" else "",
        "sides": [
            (name, texts[side], value_term(metric, name, sum(value is not None for value in blocks)))
            for side, name, blocks in sides
        ],
        "change_meaning": change_term(metric),
        "p_meaning": p_term(metric) if has_p else None,
        "verdict": metric.verdict,
        "verdict_meaning": verdict_term(metric),
    }


def answer_values(comparison: Comparison) -> dict[str, Any] | None:
    """Quality and divergence of every cell; None where neither is known and there is no reason to report."""
    cells = [values for cell in comparison.cells if (values := _answers(cell)) is not None]
    notes = list(dict.fromkeys(cell.quality_note for cell in comparison.cells if cell.quality_note))
    return {"cells": cells, "notes": notes} if cells or notes else None


def _answers(cell: CellComparison) -> dict[str, Any] | None:
    lines = []
    if cell.quality is not None:
        lines += [minus_in_numbers(line) for line in quality_lines(cell.quality)]
    if cell.divergence is not None:
        lines.append(divergence_sentence(cell.divergence))
    if not lines:
        return None
    return {
        "label": cell.label,
        "verdict": None if cell.quality is None else cell.quality.verdict,
        "is_deciding": cell.is_quality_deciding,
        "lines": lines,
    }


def node_values(comparison: Comparison) -> dict[str, Any] | None:
    """The table of one comparison by node; None where the blocks ran on one."""
    if comparison.nodes is None:
        return None
    lines = [f"{capitalized(line)}." for line in node_lines([comparison.nodes])]
    return {"lines": lines, "table": nodes_table([comparison.nodes], show_all=True)}


def percentile_values(analysis: AnalyzedExperiment) -> Table | None:
    """The table of a directory; None where no percentile is known."""
    cells = arms_of(analysis)
    rows = (
        (name, cell.label, percentile_levels(cell, name, CONFIDENCE)) for name in LATENCY_NAMES for cell in cells
    )
    return percentile_table(rows, CONFIDENCE, "block")


def passes_values(analysis: AnalyzedExperiment) -> dict[str, Any] | None:
    """The times of forward passes and the cost of their launches; None without a pass that counts."""
    if analysis.passes is None or not analysis.passes.times:
        return None
    return {
        "name": analysis.results.path.resolve().name,
        "baseline": analysis.results.manifest.baseline,
        "peaks": floor_peaks(analysis.passes, analysis.results, analysis.experiment.hardware),
        "times": passes_table(analysis),
        "launches": launch_table(analysis),
    }


def bonus_values(analysis: AnalyzedExperiment) -> dict[str, Any] | None:
    """Every verdict on backfill with its tables; None where no ways of backfill are compared."""
    if analysis.bonus is None:
        return None
    return {
        "name": analysis.results.path.resolve().name,
        "where": analysis.bonus.where,
        "verdicts": [
            {
                "context": context_in_words(verdict),
                "sentences": verdict_sentences(verdict),
                "tables": [(modes_in_words(*modes), bonus_table(verdict, modes)) for modes in verdict.mode_pairs],
            }
            for verdict in analysis.bonus.verdicts
        ],
        "missing": analysis.bonus.missing,
    }
