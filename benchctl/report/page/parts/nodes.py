"""Results by node as values for strips of SVG and for a table.

The tables of forward passes: the time of one pass, and the cost of its launches.
The verdicts on backfill of bonus tokens: their sentences, and the rows that they rest on.
"""

from itertools import zip_longest
from typing import Any, Final

from benchctl.analysis.bonus.bonus import BackfillVerdict, BonusDesign
from benchctl.analysis.bonus.sentences import context_in_words, modes_in_words, verdict_sentences
from benchctl.analysis.compare.result import Comparison
from benchctl.analysis.statistics.intervals import Interval
from benchctl.analysis.summary.analyzed import AnalyzedExperiment, LaunchCost, PassTimes, floor_peaks
from benchctl.analysis.summary.nodes import MetricByNode
from benchctl.formats import NOT_AVAILABLE, capitalized, page_number
from benchctl.report.page.forest import node_strips
from benchctl.report.tables.experiment import (
    HEADINGS,
    foremost,
    metric_rows,
    node_headings,
    node_lines,
    row_cells,
)

_MOST_PLOTTED: Final = 24
"""Nodes of a plot; more are in the table only."""


def node_values(comparison: Comparison) -> dict[str, Any] | None:
    """Plots and table of one comparison; None where the blocks ran on one node."""
    results = comparison.nodes
    if results is None:
        return None
    return {
        **node_strips([metric for metric in foremost(results.metrics) if len(metric.rows) <= _MOST_PLOTTED]),
        "lines": [f"{capitalized(line)}." for line in node_lines([results])],
        "headings": node_headings(results.confidence)[2:],
        "bodies": [_body(metric) for metric in results.metrics],
    }


def _body(metric: MetricByNode) -> dict[str, Any]:
    differing = {row.node for row in metric.differing}
    return {
        "label": metric.label,
        "metric": metric.metric,
        "rows": [
            {"cells": cells, "is_summary": row is None, "differs": row is not None and row.node in differing}
            for cells, row in zip_longest(metric_rows(metric), metric.rows)
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
