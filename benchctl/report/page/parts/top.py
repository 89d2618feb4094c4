"""The top of the page: subject, verdict, the rules behind it, and what must be known before it is believed."""

from collections.abc import Sequence
from typing import Any, Final

from benchctl.analysis.analyzed import AnalyzedExperiment
from benchctl.analysis.compare.metric_comparison import MetricComparison
from benchctl.analysis.compare.result import CellComparison, Comparison
from benchctl.analysis.compare.text import (
    change_text,
    floors_text,
    looks_lines,
    reasons_of,
    threshold_text,
    unrecorded_lines,
)
from benchctl.analysis.validity.comparability.machines import gpu_names, machines_of
from benchctl.formats import first_of, minus_in_numbers, percentage, range_of
from benchctl.report.page.verdict import PageVerdict
from benchctl.report.text.comparison_table import correction_text
from benchctl.report.text.tables import device_of_passes

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
