"""Results by node as values for strips of SVG and for a table."""

from itertools import zip_longest
from typing import Any, Final

from benchctl.analysis.compare.result import Comparison
from benchctl.analysis.summary.nodes import MetricByNode
from benchctl.formats import capitalized, change_in_interval, count_of, shortened_inside
from benchctl.report.charts.nodes import NodePlot, NodePoint, node_plots
from benchctl.report.charts.scale import LogScale
from benchctl.report.page.parts.forest import MOST_LABEL_CH, ends_of
from benchctl.report.page.parts.shapes import svg_length
from benchctl.report.text.node_table import NODE_CHARACTERS, foremost, metric_rows, node_headings, node_lines

_MOST_PLOTTED: Final = 24
"""Nodes of a plot; more are in the table only."""


def node_values(comparison: Comparison) -> dict[str, Any] | None:
    """Plots and table of one comparison; None where the blocks ran on one node."""
    results = comparison.nodes
    if results is None:
        return None
    plots, scale = node_plots([metric for metric in foremost(results.metrics) if len(metric.rows) <= _MOST_PLOTTED])
    values = [_plot_values(plot, scale) for plot in plots]
    widths = [len(f"{row['label']} {row['note']}") for plot in values for row in plot["rows"]]
    ticks = [(scale.at(log_ratio), label) for log_ratio, label in scale.ticks()]
    return {
        "label_ch": min(MOST_LABEL_CH, max(widths, default=0)),
        "lines": [f"{capitalized(line)}." for line in node_lines([results])],
        "plots": values,
        "ticks": [
            {
                "x": svg_length(at),
                "anchor": "start" if at < 0.04 else "end" if at > 0.96 else "middle",
                "label": label,
            }
            for at, label in ticks
        ],
        "centre": svg_length(scale.at(0)),
        "headings": node_headings(results.confidence)[2:],
        "bodies": [_body(metric) for metric in results.metrics],
    }


def _plot_values(plot: NodePlot, scale: LogScale) -> dict[str, Any]:
    metric = plot.metric
    blocks = [count_of(row.num_blocks, "block") for row in metric.rows]
    changes = [change_in_interval(row.ratio, row.interval) for row in metric.rows]
    rows = [
        _row(point, scale, note, change) for point, note, change in zip(plot.nodes, blocks, changes, strict=True)
    ]
    change = change_in_interval(metric.over_blocks.ratio, metric.blocks_interval)
    number = count_of(metric.over_blocks.num_blocks, "block")
    rows.append(_row(plot.over_blocks, scale, number, change, is_summary=True))
    if plot.over_nodes is not None and metric.over_nodes is not None:
        change = change_in_interval(*metric.over_nodes)
        rows.append(_row(plot.over_nodes, scale, count_of(len(metric.rows), "node"), change, is_summary=True))
    return {"label": metric.label, "metric": metric.metric, "rows": rows}


def _row(point: NodePoint, scale: LogScale, note: str, change: str, *, is_summary: bool = False) -> dict[str, Any]:
    label = shortened_inside(point.label, NODE_CHARACTERS)
    return {
        "label": label,
        "note": note,
        "change": change,
        "is_summary": is_summary,
        "differs": point.differs,
        "spoken": f"{label}, {note}: {change}{', differs from the others' if point.differs else ''}",
        "interval": ends_of(point.ends, scale),
        "at": svg_length(scale.at(point.at)),
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
