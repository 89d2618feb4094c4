"""What is said of nodes where the truth is known: a small version of ``benchmarks/verdict/node_truth.py``."""

import pytest

from benchmarks.verdict import node_truth, shares
from benchmarks.verdict.known_truth import Made
from benchmarks.verdict.node_truth import Nodes

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("counts", [(2, 3, 7)])
@pytest.mark.parametrize("num_arms", [2, 4])
def test_equal_nodes_are_seldom_called_different(counts, num_arms):
    made = Made(num_blocks=12, num_arms=num_arms, num_metrics=3, noise="linear drift")
    called = shares.row({}, node_truth.called(made, Nodes(counts=counts), 200)).shares
    assert shares.SELDOM.is_met(called["a node called different"])


def test_a_node_that_differs_is_named_and_no_other():
    made = Made(num_blocks=16, num_arms=4, num_metrics=3, are_metrics_alike=True)
    nodes = Nodes(counts=(4, 4, 4, 4), shift=4 * node_truth.SCATTER)
    named = [
        {row.node for metric in results.metrics for row in metric.differing}
        for results in node_truth.many(made, nodes, 100)
    ]
    assert sum("n0" in names for names in named) >= 95
    assert sum(bool(names - {"n0"}) for names in named) <= 10
