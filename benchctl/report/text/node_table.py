"""Results by node as headings, rows and sentences, for every form of table."""

import math
from collections.abc import Iterator, Sequence
from typing import Final

from rich.table import Table

from benchctl.analysis.analyzed import AnalyzedExperiment
from benchctl.analysis.summary.nodes import MetricByNode, NodeResults, NodeRow
from benchctl.formats import UNKNOWN, change_in_interval, count_of, p_value, percentage, shortened_inside
from benchctl.report.text.plain_table import plain_table
from benchctl.untrusted.text import visible_line

TITLE: Final = "Results by node"
OVER_BLOCKS: Final = "over blocks"
OVER_NODES: Final = "over nodes"
NODE_CHARACTERS: Final = 40
"""Of the name of a node in a table; longer ones are cut inside."""
_MOST_NODES: Final = 12
"""Rows of one metric in a terminal: those of the nodes that are farthest from the others."""
_UNTOLD: Final = {
    "one-block-per-node": "no node did two blocks: a node cannot be told from a block",
    "order": "on each node the arms ran in one order: the node cannot be told from the order",
}


def nodes_table(analysis: AnalyzedExperiment) -> Table | None:
    """Every variant against the baseline by node; None where the blocks ran on one."""
    if not analysis.nodes:
        return None
    first = analysis.nodes[0]
    *left, change, against, p = node_headings(first.confidence)
    table = plain_table(f"{TITLE}: {'; '.join(node_lines(analysis.nodes))}", left, [change, against, p])
    for results in analysis.nodes:
        for row in node_rows(results, show_all=False):
            table.add_row(*row)
    return table


def node_headings(confidence: float) -> tuple[str, ...]:
    """The columns of the table."""
    return ("cell", "metric", "node", "blocks", f"change ({percentage(confidence)} CI)", "against the others", "p")


def node_rows(results: NodeResults, *, show_all: bool) -> Iterator[tuple[str, ...]]:
    """The rows of the table: the nodes of a metric, then the ratio over all blocks and over nodes.

    Without ``show_all`` those of one metric of each cell: the first in which a node differs, else the first.
    """
    label = None
    for metric in results.metrics if show_all else foremost(results.metrics):
        for i, row in enumerate(metric_rows(metric, most=None if show_all else _MOST_NODES)):
            yield (visible_line(metric.label) if metric.label != label else "", "" if i else metric.metric, *row)
            label = metric.label


def metric_rows(metric: MetricByNode, most: int | None = None) -> list[tuple[str, ...]]:
    """Node, blocks, change, change against the others, p: of ``most`` nodes, then over blocks and over nodes."""
    farthest = _farthest(metric.rows, most)
    rows = [_row(row) for row in metric.rows if row in farthest]
    if len(farthest) < len(metric.rows):
        rows.append((f"and {count_of(len(metric.rows) - len(farthest), 'node')} more", "", "", "", ""))
    blocks = metric.over_blocks
    rows.append(
        (OVER_BLOCKS, str(blocks.num_blocks), change_in_interval(blocks.ratio, metric.blocks_interval), "", "")
    )
    if metric.over_nodes is not None:
        change, p = change_in_interval(*metric.over_nodes), metric.effects.test
        scatter = "" if metric.between_sd is None else f"{percentage(metric.between_sd, 2)} between nodes"
        test = "" if p is None else f"F {p_value(p.p_value)}"
        rows.append((OVER_NODES, f"{len(metric.rows)} nodes", change, scatter, test))
    return rows


def node_lines(variants: Sequence[NodeResults]) -> list[str]:
    """Meaning of the last two rows, the correction of p, and reasons why nodes cannot be told apart."""
    num_tests = sum(results.num_tests for results in variants)
    lines = [
        f"the verdict is '{OVER_BLOCKS}', about these nodes; '{OVER_NODES}' counts each once, for a node like these"
    ]
    if num_tests:
        of_each = " of each variant" if len(variants) > 1 else ""
        lines.append(f"p-values are corrected for all tests of nodes, cells and deciding metrics{of_each}")
    metrics = [metric for results in variants for metric in results.metrics]
    if any(len(metric.rows) == 2 and metric.over_nodes is not None for metric in metrics):
        lines.append("two nodes say little of a third, so their interval is wide")
    reasons = dict.fromkeys(metric.effects.reason for metric in metrics)
    return [*lines, *(_UNTOLD[reason] for reason in reasons if reason in _UNTOLD)]


def foremost(metrics: Sequence[MetricByNode]) -> list[MetricByNode]:
    """One metric of each cell: the first in which a node differs, else the first."""
    chosen: dict[str, MetricByNode] = {}
    for metric in metrics:
        if metric.label not in chosen or (metric.differing and not chosen[metric.label].differing):
            chosen[metric.label] = metric
    return list(chosen.values())


def _row(row: NodeRow) -> tuple[str, ...]:
    return (
        visible_line(shortened_inside(row.node, NODE_CHARACTERS)),
        str(row.num_blocks),
        change_in_interval(row.ratio, row.interval),
        change_in_interval(row.against_others, row.against_interval),
        UNKNOWN if row.p_value is None else p_value(row.p_value),
    )


def _farthest(rows: Sequence[NodeRow], most: int | None) -> Sequence[NodeRow]:
    """The ``most`` nodes that are farthest from the others."""
    if most is None or len(rows) <= most:
        return rows
    return sorted(rows, key=lambda row: -abs(math.log(row.against_others or 1.0)))[:most]
