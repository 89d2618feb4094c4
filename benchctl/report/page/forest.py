"""The forest plot as values for small SVG strips in a grid of text."""

from typing import Any, Final

from benchctl.analysis.compare.metric import MetricComparison
from benchctl.analysis.compare.result import Comparison
from benchctl.analysis.compare.words import change_text
from benchctl.analysis.statistics.intervals import Interval
from benchctl.report.charts.forest import BETTER, LogScale, forest_of
from benchctl.report.page.words import change_term, metric_term, svg_length

MOST_LABEL_CH: Final = 26
"""Characters of the names of cells that have room beside the plot; longer ones are broken."""


def forest_values(comparison: Comparison) -> dict[str, Any] | None:
    """The plot of one comparison; None where no deciding metric has a ratio."""
    plot = forest_of(comparison)
    if plot is None:
        return None
    groups = [
        {
            "name": name,
            "meaning": metric_term(rows[0][1].metric),
            "words": f"{rows[0][1].metric.unit}, {BETTER[rows[0][1].metric.direction]}",
            "rows": [_forest_row(label, metric, plot.scale) for label, metric in rows],
        }
        for name, rows in plot.groups.items()
    ]
    return {
        "groups": groups,
        "ticks": _ticks(plot.scale),
        "no_change": svg_length(plot.scale.at(0)),
        "bands": plot.bands,
        "label_ch": min(MOST_LABEL_CH, max(len(label) for rows in plot.groups.values() for label, _ in rows)),
    }


def _ticks(scale: LogScale) -> list[dict[str, str]]:
    ticks = [(scale.at(log_ratio), label) for log_ratio, label in scale.ticks()]
    return [
        {"x": svg_length(at), "anchor": "start" if at < 0.04 else "end" if at > 0.96 else "middle", "label": label}
        for at, label in ticks
    ]


def _forest_row(label: str, metric: MetricComparison, scale: LogScale) -> dict[str, Any]:
    estimate, change = metric.estimate, change_text(metric)
    margins = [(scale.at(-margin), scale.at(margin)) for margin in metric.margins.log_bands]
    return {
        "label": label,
        "verdict": metric.verdict,
        "change": change,
        "meaning": change_term(metric),
        "spoken": f"{metric.metric.name} in {label}: {change}, {metric.verdict}",
        "bands": [{"x": svg_length(low), "width": svg_length(high - low)} for low, high in margins],
        "interval": _ends_of(None if estimate is None else estimate.log_interval, scale),
        "ratio": None if estimate is None else svg_length(scale.at(estimate.log_ratio)),
    }


def _ends_of(log_interval: Interval | None, scale: LogScale) -> dict[str, Any] | None:
    """Both ends, with an arrow where the scale does not hold one."""
    if log_interval is None:
        return None
    low, high = log_interval
    ends = [
        {"x": svg_length(scale.at(end)), "is_cut": not scale.holds(end), "turn": turn}
        for end, turn in ((low, 180), (high, 0))
    ]
    return {"low": ends[0]["x"], "high": ends[1]["x"], "ends": ends}
