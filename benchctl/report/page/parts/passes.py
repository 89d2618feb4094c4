"""The tables of forward passes: the time of one pass, and the cost of its launches."""

from typing import Any

from benchctl.analysis.analyzed import AnalyzedExperiment
from benchctl.analysis.statistics.intervals import Interval
from benchctl.analysis.summary.passes import LaunchCost, PassTimes, floor_peaks
from benchctl.formats import NOT_AVAILABLE, page_number


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
