"""The forest plot as values for small SVG strips in a grid of text."""

from typing import Any, Final

from benchctl.analysis.compare.result import Comparison
from benchctl.analysis.statistics.intervals import Interval
from benchctl.report.charts.figure import LogScale
from benchctl.report.page.charts.acceptance import ForestRow, forest_of
from benchctl.report.page.words import change_term, metric_term, svg_length

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
