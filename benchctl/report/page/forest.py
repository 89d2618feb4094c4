"""The forest plot and the ratios by node as values for small SVG strips in a grid of text."""

import math
from collections.abc import Sequence
from typing import Any, Final

from benchctl.analysis.compare.metric import MetricComparison
from benchctl.analysis.compare.result import Comparison
from benchctl.analysis.compare.words import change_text
from benchctl.analysis.statistics.intervals import Interval
from benchctl.analysis.summary.nodes import MetricByNode
from benchctl.formats import change_in_interval, count_of, shortened_inside
from benchctl.report.charts.forest import BETTER, LogScale, forest_of, scale_of
from benchctl.report.page.words import change_term, metric_term, svg_length
from benchctl.report.tables.experiment import NODE_CHARACTERS

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


_NodeRow = tuple[str, str, float, Interval | None, bool]
"""Label, note, ratio, interval, and whether the node differs from the others."""


def node_strips(metrics: Sequence[MetricByNode]) -> dict[str, Any]:
    """A plot for each metric: the nodes, the ratio over blocks, and that over nodes where it is known.

    All are drawn as logarithms less that of the ratio over blocks.
    """
    groups = [(metric, _node_rows(metric)) for metric in metrics]
    points = [_logs(metric, ratio, interval) for metric, rows in groups for _, _, ratio, interval, _ in rows]
    scale = scale_of([at for at, _ in points], [end for _, ends in points for end in ends or ()], ())
    plots: list[dict[str, Any]] = [
        {
            "label": metric.label,
            "metric": metric.metric,
            "rows": [_strip(metric, row, scale, is_summary=i >= len(metric.rows)) for i, row in enumerate(rows)],
        }
        for metric, rows in groups
    ]
    widths = [len(f"{row['label']} {row['note']}") for plot in plots for row in plot["rows"]]
    return {
        "label_ch": min(MOST_LABEL_CH, max(widths, default=0)),
        "plots": plots,
        "ticks": _ticks(scale),
        "centre": svg_length(scale.at(0)),
    }


def _node_rows(metric: MetricByNode) -> list[_NodeRow]:
    differing = {row.node for row in metric.differing}
    rows: list[_NodeRow] = [
        (row.node, count_of(row.num_blocks, "block"), row.ratio, row.interval, row.node in differing)
        for row in metric.rows
    ]
    blocks = metric.over_blocks
    rows.append(("over blocks", count_of(blocks.num_blocks, "block"), blocks.ratio, metric.blocks_interval, False))
    if metric.over_nodes is not None:
        rows.append(("over nodes", count_of(len(metric.rows), "node"), *metric.over_nodes, False))
    return rows


def _logs(metric: MetricByNode, ratio: float, interval: Interval | None) -> tuple[float, Interval | None]:
    centre = metric.over_blocks.log_ratio
    ends = None if interval is None else (math.log(interval[0]) - centre, math.log(interval[1]) - centre)
    return math.log(ratio) - centre, ends


def _strip(metric: MetricByNode, row: _NodeRow, scale: LogScale, *, is_summary: bool) -> dict[str, Any]:
    name, note, ratio, interval, differs = row
    at, ends = _logs(metric, ratio, interval)
    label, change = shortened_inside(name, NODE_CHARACTERS), change_in_interval(ratio, interval)
    return {
        "label": label,
        "note": note,
        "change": change,
        "is_summary": is_summary,
        "differs": differs,
        "spoken": f"{label}, {note}: {change}{', differs from the others' if differs else ''}",
        "interval": _ends_of(ends, scale),
        "at": svg_length(scale.at(at)),
    }
