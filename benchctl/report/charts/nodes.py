"""The plot of results by node: the ratio on each node with its interval, against the ratio over all blocks.

All cells share one scale, on which the ratio over blocks of each is in one place: what differs is what is seen.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from benchctl.analysis.summary.nodes import MetricByNode
from benchctl.report.charts.scale import LogScale, scale_of


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePoint:
    """One row: logarithms less that of the ratio over blocks."""

    label: str
    at: float
    ends: tuple[float, float] | None
    differs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlot:
    """One metric of one cell: the nodes, then over nodes where that is known."""

    metric: MetricByNode
    nodes: tuple[NodePoint, ...]
    over_blocks: NodePoint
    over_nodes: NodePoint | None


def node_plots(metrics: Sequence[MetricByNode]) -> tuple[tuple[NodePlot, ...], LogScale]:
    """A plot for each metric, and the scale of all."""
    plots = tuple(_plot(metric) for metric in metrics)
    points = [point for plot in plots for point in (*plot.nodes, plot.over_blocks)]
    summaries = [plot.over_nodes for plot in plots if plot.over_nodes is not None]
    ends = [end for point in (*points, *summaries) for end in point.ends or ()]
    return plots, scale_of([point.at for point in (*points, *summaries)], ends, ())


def _plot(metric: MetricByNode) -> NodePlot:
    centre = metric.over_blocks.log_ratio
    differing = {row.node for row in metric.differing}
    blocks = metric.over_blocks
    over_nodes = metric.over_nodes
    return NodePlot(
        metric=metric,
        nodes=tuple(
            _point(row.node, row.ratio, row.interval, centre, differs=row.node in differing) for row in metric.rows
        ),
        over_blocks=_point("over blocks", blocks.ratio, metric.blocks_interval, centre),
        over_nodes=None if over_nodes is None else _point("over nodes", *over_nodes, centre),
    )


def _point(
    label: str, ratio: float, interval: tuple[float, float] | None, centre: float, *, differs: bool = False
) -> NodePoint:
    ends = None if interval is None else (math.log(interval[0]) - centre, math.log(interval[1]) - centre)
    return NodePoint(label=label, at=math.log(ratio) - centre, ends=ends, differs=differs)
