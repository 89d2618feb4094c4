"""The sections of the page as plain values for the templates of the same names; none holds markup.

The top of the page with what must be known before its verdict is believed; the metrics of a comparison and its
answers; runs with their warnings and the ends of failed logs; provenance; times.
"""

import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from benchctl.analysis.analyzed import (
    CONFIDENCE,
    LATENCY_NAMES,
    AnalyzedExperiment,
    percentile_levels,
)
from benchctl.analysis.bonus import context_in_words, modes_in_words, verdict_sentences
from benchctl.analysis.compare.accuracy import divergence_sentence, quality_lines
from benchctl.analysis.compare.answer import answer_lines, open_reasons
from benchctl.analysis.compare.result import CellComparison, Comparison
from benchctl.analysis.compare.words import looks_lines, unrecorded_lines
from benchctl.analysis.validity.machines import gpu_names, machines_of
from benchctl.errors import RecordError
from benchctl.records.directory import ResultDirectory, arm_label
from benchctl.report.charts.figure import Subject
from benchctl.report.comparison_tables import is_shown, metric_row
from benchctl.report.experiment_tables import (
    blocks_text,
    device_of_passes,
    footnotes,
    hits_text,
    nodes_table,
    number_text,
    passes_text,
    prompt_lengths_text,
    runs_table,
)
from benchctl.report.page.plots import cell_waterfalls, draw_forest, ladder_waterfalls, waterfall_values
from benchctl.report.table import Table, table_of
from benchctl.report.time_tables import bonus_table, percentile_table
from benchctl.report.verdicts import PageVerdict, change_term, metric_term, p_term, value_term, verdict_term
from benchctl.units import count_of, gib, minus_in_numbers, percentage
from benchctl.untrusted.files import is_file, open_file
from benchctl.untrusted.secrets import redacted


def directory_name(analysis: AnalyzedExperiment) -> str:
    """The name of the result directory, however it was given."""
    return analysis.results.path.resolve().name


def top_values(analyses: Sequence[AnalyzedExperiment], verdict: PageVerdict) -> dict[str, Any]:
    """The values of ``top.html`` besides the verdict itself."""
    subjects = dict.fromkeys(_subject(analysis) for analysis in analyses)
    problems = [each.problem for each in verdict.deciding]
    return {
        "subject": "  |  ".join(subjects),
        "rules": [f"exit code {verdict.exit_code}", *_rules(verdict)],
        # from its second line on: the first is the sentence of the verdict
        "problem": problems[0].partition("\n")[2] if len(problems) == 1 and problems[0] is not None else None,
        "answers": {
            one.sides: list(answer_lines(one.comparison)) for one in verdict.deciding if one.comparison is not None
        },
        "reasons": _reasons(verdict),
        "findings": [
            {
                "code": finding.code,
                "sentence": finding.sentence,
                "directory": directory_name(analysis) if len(analyses) > 1 else "",
            }
            for analysis in analyses
            for finding in analysis.findings
        ],
    }


def _subject(analysis: AnalyzedExperiment) -> str:
    manifest, machines = analysis.results.manifest, machines_of(analysis.results)
    label = f" ({manifest.label})" if manifest.label else ""
    device = ", ".join(dict.fromkeys(gpu_names(machines))) or "no GPU"
    device = device if len(machines) == 1 else f"{len(machines)} nodes, {device}"
    device = device_of_passes(analysis) or device
    return f"{manifest.profile}{label} · {manifest.engine} · {device} · {manifest.created_at[:10]}"


def _rules(verdict: PageVerdict) -> list[str]:
    """Deciding metrics, and the looks at the results."""
    comparisons = [each.comparison for each in verdict.deciding if each.comparison is not None]
    if not comparisons:
        return []
    first, cells = comparisons[0], [cell for comparison in comparisons for cell in comparison.cells]
    names = dict.fromkeys(metric.metric.name for cell in cells for metric in cell.deciding)
    return [
        f"decided by {', '.join(names) or 'nothing'}",
        *dict.fromkeys(line for comparison in comparisons for line in unrecorded_lines(comparison)),
        *looks_lines(first),
    ]


def _reasons(verdict: PageVerdict) -> list[str]:
    """The reasons of every comparison that is open or invalid, each once."""
    comparisons = [each.comparison for each in verdict.deciding if each.comparison is not None]
    reasons = [
        f"{f'{comparison.b_name}, ' if len(comparisons) > 1 else ''}{reason}"
        for comparison in comparisons
        for reason in open_reasons(comparison)
    ]
    return list(dict.fromkeys(reasons))


def comparison_values(verdict: PageVerdict) -> list[dict[str, Any]]:
    """The plot, the numbers, the results by node and the answers of each comparison."""
    has_names = len(verdict.comparisons) > 1
    num_cells = sum(len(comparison.cells) for comparison in verdict.comparisons)
    return [
        {
            "name": f"{comparison.b_name} against {comparison.a_name}" if has_names else None,
            "forest": draw_forest(comparison, chart_id=f"forest-{i}")
            if any(c.deciding for c in comparison.cells)
            else None,
            "table": table_values(comparison, num_cells),
            "nodes": nodes_table(() if comparison.nodes is None else (comparison.nodes,), show_all=True),
            "answers": answer_values(comparison),
        }
        for i, comparison in enumerate(verdict.comparisons, start=1)
    ]


def waterfalls_of(analyses: Sequence[AnalyzedExperiment], verdict: PageVerdict) -> dict[str, list[dict[str, Any]]]:
    """Those of the ladders of controls, then of the wall time and of the step in every cell.

    ``open`` are those of the ladders and of the cell with the largest change of a deciding metric, up or down,
    ``folded`` all others. All of the difference of forward passes is in the one pass that every step is.
    """
    opened = [fall for analysis in analyses for fall in ladder_waterfalls(analysis)]
    has_passes = any(analysis.passes is not None for analysis in analyses)
    cells = [] if has_passes else [cell for comparison in verdict.comparisons for cell in comparison.cells]
    groups = [(cell, falls) for cell in cells if (falls := list(cell_waterfalls(cell)))]
    changes = [
        max((abs(m.estimate.log_ratio) for m in cell.deciding if m.estimate is not None), default=0.0)
        for cell, _ in groups
    ]
    foremost = changes.index(max(changes)) if changes else 0
    opened += [fall for _, falls in groups[foremost : foremost + 1] for fall in falls]
    others = groups[:foremost] + groups[foremost + 1 :]
    return {
        "open": [waterfall_values(fall) for fall in opened],
        "folded": [waterfall_values(fall) for _, falls in others for fall in falls],
    }


def table_values(comparison: Comparison, num_cells: int) -> dict[str, Any]:
    """The table of the metrics that decide or are usually asked for, and the one of all metrics.

    ``num_cells`` are those of the whole page: with more than three, the first has only deciding metrics and counts
    that differ.
    """
    return {
        "a_name": comparison.a_name,
        "b_name": comparison.b_name,
        "interval": f"change [{percentage(comparison.rules.confidence)} interval]",
        "num_all": max((len(cell.metrics) for cell in comparison.cells), default=0),
        "main": [_body(comparison, cell, show_all=False, is_short=num_cells > 3) for cell in comparison.cells],
        "all": [_body(comparison, cell, show_all=True, is_short=False) for cell in comparison.cells],
    }


def _body(comparison: Comparison, cell: CellComparison, *, show_all: bool, is_short: bool) -> dict[str, Any]:
    """The rows of a cell, with what is told of each field; a reason that deciding rows share is in their last."""
    rows: list[dict[str, Any]] = []
    for metric in cell.metrics:
        if not is_shown(metric, show_all=show_all) or (is_short and metric.role == "exploratory"):
            continue
        texts, estimate = metric_row(metric), metric.estimate
        has_p = metric.role != "exact" and estimate is not None and estimate.p_value is not None
        sides = (("a", comparison.a_name, metric.a_blocks), ("b", comparison.b_name, metric.b_blocks))
        reason = verdict_term(metric)
        if rows and metric.role == "deciding" and rows[-1]["reason"] == reason:
            rows[-1]["reason"] = None
        rows.append(
            texts
            | {
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
                "verdict_meaning": reason,
                "reason": reason if metric.role == "deciding" and not show_all else None,
            }
        )
    return {
        "label": cell.label,
        "blocks": count_of(cell.num_blocks, "block"),
        "verdict": cell.verdict,
        "errors": [str(error) for error in cell.errors[:5]],
        "rows": rows,
    }


def answer_values(comparison: Comparison) -> dict[str, Any] | None:
    """Quality and divergence of every cell; None where neither is known and there is no reason to report."""
    cells = []
    for cell in comparison.cells:
        quality = () if cell.quality is None else quality_lines(cell.quality)
        divergence = [] if cell.divergence is None else [divergence_sentence(cell.divergence)]
        if lines := [*map(minus_in_numbers, quality), *divergence]:
            cells.append(
                {
                    "label": cell.label,
                    "verdict": None if cell.quality is None else cell.quality.verdict,
                    "is_deciding": cell.is_quality_deciding,
                    "lines": lines,
                }
            )
    notes = list(dict.fromkeys(cell.quality_note for cell in comparison.cells if cell.quality_note))
    return {"cells": cells, "notes": notes} if cells or notes else None


def percentile_values(analysis: AnalyzedExperiment) -> Table | None:
    """The table of a directory; None where no percentile is known."""
    rows = (
        (name, arm.label, percentile_levels(arm, name, CONFIDENCE))
        for name in LATENCY_NAMES
        for arm in Subject(analysis).arms
    )
    return percentile_table(rows, CONFIDENCE, "block")


def bonus_values(analysis: AnalyzedExperiment) -> dict[str, Any] | None:
    """Every verdict on backfill with its tables; None where no ways of backfill are compared."""
    if analysis.bonus is None:
        return None
    return {
        "name": directory_name(analysis),
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


def runs_values(analysis: AnalyzedExperiment, *, is_inside: bool) -> dict[str, Any]:
    """Every planned run, the warnings that the table numbers, and the ends of the logs of failed servers.

    ``is_inside``: the page is in the result directory, so that links to the files of its runs work. Where runs
    differ in the numbers of one warning, its text is that of the first.
    """
    begun = {run.record.run_id: run.record for run in analysis.runs}
    of_all, directory = runs_table(analysis), ResultDirectory(analysis.results.path)
    table = replace(of_all, columns=of_all.columns[:-1])  # notes have links
    rows = [
        {
            "texts": texts,
            "marks": values["notes"],
            "arm": arm_label(planned.variant, planned.cell),
            "block": planned.block,
            "record_state": begun[planned.run_id].state if planned.run_id in begun else None,
            "path": quote(directory.run_folder(planned.run_id)) if is_inside and planned.run_id in begun else None,
            "has_log": is_file(directory.run(planned.run_id).server_log, within=directory.path),
        }
        for planned, values, texts in zip(analysis.results.plan.runs, table.rows, table.texts(), strict=True)
    ]
    states = Counter(row["state"] for row in table.rows)
    return {
        "columns": table.used_columns,
        "rows": rows,
        "arms": list(dict.fromkeys(row["arm"] for row in rows)),
        "all_states": list(states),
        "states": ", ".join(f"{number} {state}" for state, number in states.items()),
        "notes": [(warning.code, warning.message) for warning in footnotes(analysis)],
        "logs": list(_logs(analysis)),
    }


def _logs(analysis: AnalyzedExperiment) -> Iterator[dict[str, str]]:
    directory = ResultDirectory(analysis.results.path)
    for run in analysis.runs:
        failure = run.record.failure
        if failure is not None or run.record.state == "failed":
            tail = _log_tail(directory.run(run.record.run_id).server_log, within=directory.path)
            cause = "failed" if failure is None else f"{failure.cause}: {failure.message}"
            tail = tail or ("" if failure is None else failure.log_tail) or "(the server's log is empty or absent)"
            yield {"run_id": run.record.run_id, "cause": cause, "tail": tail}


def _log_tail(path: Path, *, within: Path) -> str:
    """The last lines of a log, without secrets and bytes that are not text; empty without a log, and
    the reason where its entry is not a file.
    """
    try:
        with open_file(path, within=within) as file:
            file.seek(max(0, file.seek(0, 2) - 64 * 1024))
            content = file.read()
    except OSError:
        return ""
    except RecordError as error:
        return f"({error})"
    return "\n".join(redacted(content.decode(errors="replace")).splitlines()[-40:])


def directory_values(analysis: AnalyzedExperiment) -> dict[str, Any]:
    """One result directory: the contents of ``manifest.json`` and ``profile.yaml``, and the servers' commands."""
    manifest, git = analysis.results.manifest, analysis.results.manifest.git
    servers: dict[str, str] = {}
    for run in analysis.runs:
        if run.record.argv:
            servers.setdefault(run.label, shlex.join(run.record.argv))
    commit = "unknown" if git is None else f"{git.sha}{' with uncommitted changes' if git.is_dirty else ''}"
    versions = sorted({run.record.engine_version for run in analysis.runs if run.record.engine_version is not None})
    work = {"passes": passes_text(analysis)}
    if analysis.passes is None:
        work = {
            "requests": f"{number_text(analysis)} of {manifest.dataset}, stop {manifest.stop}",
            "prompts": prompt_lengths_text(analysis.results.sets.requests, manifest.engine) or "",
            "prefix hits": hits_text(analysis) or "",
            "request set": ", ".join(each.sha256 for each in manifest.all_sets),
        }
    facts = {
        "directory": directory_name(analysis),
        "label": manifest.label,
        "state": manifest.state,
        "measured": manifest.created_at,
        "command": shlex.join(manifest.argv),
        "engine": f"{manifest.engine} {', '.join(versions)}",
        **work,
        "profile": manifest.profile,
        "seed, blocks": f"{manifest.seed}, {blocks_text(manifest)}",
        **_machine_facts(analysis),
        "benchctl": f"{manifest.benchctl_version}, commit {commit}",
        "versions": ", ".join(f"{name} {version}" for name, version in manifest.versions.items()),
    }
    return {
        "name": directory_name(analysis),
        "facts": [(name, text) for name, text in facts.items() if text],
        "profile_sha256": manifest.profile_sha256,
        "servers": list(servers.items()),
        "profile_yaml": analysis.results.profile_yaml,
    }


def _machine_facts(analysis: AnalyzedExperiment) -> dict[str, str | list[str]]:
    """The machines that measured, and the one on which the experiment was created, where that is another."""
    machines, host = machines_of(analysis.results), analysis.results.manifest.host
    is_here = any(machine.hostname == host.hostname for machine in machines)
    hosts = [
        f"{machine.node}: {machine.cpu_model or 'unknown CPU'}, {machine.num_cores or 'unknown'} cores, "
        f"{gib(machine.memory_bytes)}, {machine.platform or 'unknown system'}"
        for machine in machines
    ]
    gpus = [
        (f"{machine.node}: " if len(machines) > 1 else "")
        + f"{gpu.name}, {gib(gpu.memory_bytes)}, driver {gpu.driver or 'unknown'}, {gpu.uuid or 'no UUID'}"
        for machine in machines
        for gpu in machine.gpus
    ]
    facts: dict[str, str | list[str]] = {"host": hosts[0] + (f", Python {host.python}" if is_here else "")}
    if len(machines) > 1:
        blocks = [count_of(len(machine.blocks), "block") for machine in machines]
        facts = {f"{len(machines)} nodes": [f"{text}; {num}" for text, num in zip(hosts, blocks, strict=True)]}
    facts["GPUs"] = gpus or "none"
    return facts if is_here else {**facts, "created on": f"{host.hostname}, Python {host.python}"}


def condition_values(verdict: PageVerdict) -> dict[str, Any]:
    """Settings in which the sides differ, the noise floors, and every warning of the comparisons once."""
    warnings = dict.fromkeys(
        (warning.code, warning.message + (f" [{warning.where}]" if warning.where else ""))
        for comparison in verdict.comparisons
        for warning in comparison.warnings
    )
    differences: list[dict[str, Any]] = []
    for each in verdict.all:
        rows = [(d.key, d.a, d.b, True) for d in (each.comparison.allowed if each.comparison is not None else ())]
        parted = (line.partition(": ") for line in each.differences)
        rows += [(key, *values.partition(" against ")[::2], False) for key, _, values in parted]
        names = ("key", "a", "b", "is_allowed")
        differences += [{"variant": each.b_name, **dict(zip(names, row, strict=True))} for row in rows]
    noise = {name: noise for comparison in verdict.comparisons for name, noise in comparison.noise.items()}
    headings = ("metric", "floor", "scatter of the log-ratio", "blocks")
    floors = [
        (name, percentage(floor.floor_frac, 2), f"{floor.log_sd:.2g}", floor.num_blocks)
        for name, floor in noise.items()
    ]
    return {
        "differences": differences,
        "noise": table_of(headings, floors, left=("metric",)) if floors else None,
        "warnings": list(warnings),
    }
