"""The forest plot as values for small SVG strips in a grid of text.

The table of results by node.
The tables of forward passes: the time of one pass, and the cost of its launches.
The verdicts on backfill of bonus tokens: their sentences, and the rows that they rest on.
"""

from typing import Any, Final

from benchctl.analysis.bonus.bonus import BackfillVerdict, BonusDesign
from benchctl.analysis.bonus.sentences import context_in_words, modes_in_words, verdict_sentences
from benchctl.analysis.compare.result import Comparison
from benchctl.analysis.statistics.intervals import Interval
from benchctl.analysis.summary.analyzed import AnalyzedExperiment, LaunchCost, PassTimes, floor_peaks
from benchctl.formats import NOT_AVAILABLE, capitalized, page_number
from benchctl.report.charts.figure import LogScale
from benchctl.report.page.charts.acceptance import ForestRow, forest_of
from benchctl.report.page.words import change_term, metric_term, svg_length
from benchctl.report.tables.experiment import HEADINGS, metric_rows, node_headings, node_lines, row_cells

MOST_LABEL_CH: Final = 26
"""Characters of the names of cells that have room beside the plot; longer ones are broken."""


def forest_values(comparison: Comparison) -> dict[str, Any] | None:
    """The plot of one comparison; None where no deciding metric has a ratio."""
    plot = forest_of(comparison)
    if plot is None:
        return None
    ticks = [(plot.scale.at(log_ratio), label) for log_ratio, label in plot.scale.ticks()]
    return {
        "groups": [
            {
                "name": group.metric.name,
                "meaning": metric_term(group.metric),
                "words": f"{group.metric.unit}, {group.direction}",
                "rows": [_forest_row(row, plot.scale) for row in group.rows],
            }
            for group in plot.groups
        ],
        "ticks": [
            {
                "x": svg_length(at),
                "anchor": "start" if at < 0.04 else "end" if at > 0.96 else "middle",
                "label": label,
            }
            for at, label in ticks
        ],
        "no_change": svg_length(plot.scale.at(0)),
        "bands": plot.bands,
        "label_ch": min(MOST_LABEL_CH, max(len(row.label) for group in plot.groups for row in group.rows)),
    }


def _forest_row(row: ForestRow, scale: LogScale) -> dict[str, Any]:
    metric, estimate = row.metric, row.metric.estimate
    margins = [(scale.at(-margin), scale.at(margin)) for margin in metric.margins.log_bands]
    return {
        "label": row.label,
        "verdict": metric.verdict,
        "change": row.change,
        "meaning": change_term(metric),
        "spoken": f"{metric.metric.name} in {row.label}: {row.change}, {metric.verdict}",
        "bands": [{"x": svg_length(low), "width": svg_length(high - low)} for low, high in margins],
        "interval": ends_of(None if estimate is None else estimate.log_interval, scale),
        "ratio": None if estimate is None else svg_length(scale.at(estimate.log_ratio)),
    }


def ends_of(log_interval: Interval | None, scale: LogScale) -> dict[str, Any] | None:
    """Both ends, with an arrow where the scale does not hold one."""
    if log_interval is None:
        return None
    low, high = log_interval
    ends = [
        {"x": svg_length(scale.at(end)), "is_cut": not scale.holds(end), "turn": turn}
        for end, turn in ((low, 180), (high, 0))
    ]
    return {"low": ends[0]["x"], "high": ends[1]["x"], "ends": ends}


def node_values(comparison: Comparison) -> dict[str, Any] | None:
    """The table of one comparison by node; None where the blocks ran on one."""
    results = comparison.nodes
    if results is None:
        return None
    return {
        "lines": [f"{capitalized(line)}." for line in node_lines([results])],
        "headings": node_headings(results.confidence)[2:],
        "bodies": [
            {"label": metric.label, "metric": metric.metric, "rows": metric_rows(metric)}
            for metric in results.metrics
        ],
    }


def passes_values(analysis: AnalyzedExperiment) -> dict[str, Any] | None:
    """Both tables, in ms; None without a pass that counts."""
    if analysis.passes is None or not analysis.passes.times:
        return None
    return {
        "name": analysis.results.path.resolve().name,
        "baseline": analysis.results.manifest.baseline,
        "peaks": floor_peaks(analysis.passes, analysis.results, analysis.experiment.hardware),
        "times": [_times_row(times) for times in analysis.passes.times],
        "launches": [_launch_row(cost) for cost in analysis.passes.launches],
    }


def _times_row(times: PassTimes) -> dict[str, Any]:
    return {
        "label": times.cell.label,
        "numbers": [
            str(len(times.cell.runs)),
            str(times.num_replays),
            page_number(times.median_ms),
            _interval(times.interval_ms),
            page_number(times.p5_ms),
            page_number(times.p95_ms),
            page_number(times.floor_ms),
            NOT_AVAILABLE if times.times_floor is None else f"{times.times_floor:.3g}",
        ],
    }


def _launch_row(cost: LaunchCost) -> dict[str, Any]:
    numbers = (page_number(number) for number in (cost.baseline_ms, cost.other_ms, cost.saved_ms))
    operators = NOT_AVAILABLE if cost.num_operators is None else str(cost.num_operators)
    each_us = NOT_AVAILABLE if cost.us_per_operator is None else f"{cost.us_per_operator:.3g}"
    ends = [str(cost.num_blocks), *numbers, _interval(cost.interval_ms), f"{cost.ratio:.3g}", operators, each_us]
    return {"label": cost.label, "numbers": ends}


def _interval(interval: Interval | None) -> str:
    return NOT_AVAILABLE if interval is None else f"[{page_number(interval[0])}, {page_number(interval[1])}]"


def bonus_values(analysis: AnalyzedExperiment) -> dict[str, Any] | None:
    """Every verdict with its tables, in ms; None where no ways of backfill are compared."""
    if analysis.bonus is None:
        return None
    return {
        "name": analysis.results.path.resolve().name,
        "where": analysis.bonus.where,
        "headings": HEADINGS,
        "verdicts": [_verdict(design, verdict) for design, verdict in analysis.bonus.verdicts],
        "missing": analysis.bonus.missing,
    }


def _verdict(design: BonusDesign, verdict: BackfillVerdict) -> dict[str, Any]:
    return {
        "context": context_in_words(design),
        "sentences": verdict_sentences(verdict),
        "tables": [
            {"modes": modes_in_words(*modes), "rows": [row_cells(row) for row in verdict.rows(*modes)]}
            for modes in verdict.mode_pairs
        ],
    }
