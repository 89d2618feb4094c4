"""Findings about nodes: one whose ratios are not those of the others."""

from collections.abc import Iterable, Iterator

from benchctl.analysis.summary.finding import Finding
from benchctl.analysis.summary.nodes import NodeResults, node_sentence


def node_findings(variants: Iterable[NodeResults]) -> Iterator[Finding]:
    """A finding for each variant in whose comparison a node differs from the others beyond chance."""
    for results in variants:
        sentence, rows = node_sentence(results), [row for metric in results.metrics for row in metric.differing]
        if sentence is not None:
            numbers = {"num_nodes": float(len({row.node for row in rows})), "num_tests": float(results.num_tests)}
            yield Finding(code="node-differs", sentence=f"{results.variant}: {sentence}.", numbers=numbers)
