"""Results by node of whole experiments: a ratio for each node, one F test, and the warning."""

import json

import pytest
from scipy import stats
from support import cli
from support.results.builders import edit_run
from support.results.nodes import write_on_nodes

from benchctl.analysis.analyzed import analyze_directory
from benchctl.analysis.compare.cells import p_of_equal_nodes
from benchctl.analysis.compare.compare import CompareOptions, compare_sides
from benchctl.analysis.compare.result import Comparison
from benchctl.analysis.experiment.pairing import Side
from benchctl.records.schema import NodeInfo

THREE = ("n1", "n2", "n3") * 4


def compared(path, **options) -> Comparison:
    """The comparison of both variants."""
    return compare_sides(Side(path, "baseline"), Side(path, "guided"), CompareOptions(**options))


def node_warnings(comparison: Comparison) -> list[str]:
    """What is said of nodes that differ."""
    return [warning.message for warning in comparison.warnings if warning.code == "node-differs"]


def test_blocks_on_one_node_have_no_results_by_node(tmp_path):
    path = write_on_nodes(tmp_path / "r", ("n1",) * 6).path
    assert compared(path).nodes is None
    assert analyze_directory(path).nodes == ()
    assert "by node" not in cli.benchctl("compare", str(path)).stdout


def test_the_test_is_the_f_test_of_the_textbook_where_a_node_has_two_blocks():
    groups = [(0.10, 0.12, 0.11), (0.09, 0.13), (0.16, 0.18, 0.15)]
    assert p_of_equal_nodes(groups) == pytest.approx(stats.f_oneway(*groups).pvalue)
    assert p_of_equal_nodes([(0.1,), (0.2,), (0.1,), (0.3,), (0.1,), (0.2,)]) is None
    assert p_of_equal_nodes([(0.1, 0.2), (0.3, 0.3)]) is None
    assert p_of_equal_nodes([(0.1,) * 3, (0.1 + 1e-16,) * 3]) == 1
    assert p_of_equal_nodes([(0.1,) * 3, (0.2,) * 3]) == 0


def test_nodes_that_are_alike_are_not_called_different(tmp_path):
    comparison = compared(write_on_nodes(tmp_path / "r", THREE).path)
    assert not node_warnings(comparison)
    assert comparison.nodes.num_tests == 2 * 3
    assert [row.node for row in comparison.nodes.metrics[0].rows] == ["n1", "n2", "n3"]


def test_nodes_that_differ_are_named_with_cell_metric_and_size(tmp_path):
    comparison = compared(write_on_nodes(tmp_path / "r", THREE, {"n3": 0.05}).path)
    (message,) = node_warnings(comparison)
    metric = comparison.nodes.differing[0]
    low, _, high = (row.ratio for row in sorted(metric.rows, key=lambda row: row.ratio))
    assert high / low == pytest.approx(1.05, abs=0.01)
    assert message.startswith(f"nodes differ beyond chance: {metric.metric} in {metric.label} changes by +")
    for words in (" on n3 (p <0.001, one of 6 tests)", "and so in 5 more metrics of these cells"):
        assert words in message


def test_the_verdict_is_the_same_whatever_nodes_the_blocks_ran_on(tmp_path):
    results = write_on_nodes(tmp_path / "r", THREE, {"n3": 0.05})
    before = compared(results.path)
    for run in results.plan().runs:
        edit_run(results, run.run_id, node=NodeInfo(name="n1", hostname="n1"))
    after = compared(results.path)
    assert [m.estimate for c in before.cells for m in c.metrics] == [
        m.estimate for c in after.cells for m in c.metrics
    ]
    assert before.verdict == after.verdict


def test_with_one_block_per_node_it_is_said_that_nodes_cannot_be_told_from_blocks(tmp_path):
    path = write_on_nodes(tmp_path / "r", [f"n{i}" for i in range(8)]).path
    assert all(metric.p_value is None for metric in compared(path).nodes.metrics)
    assert "a node cannot be told from a block" in cli.benchctl("compare", str(path)).stdout


def test_nodes_of_exactly_equal_blocks_do_not_differ(tmp_path):
    comparison = compared(write_on_nodes(tmp_path / "r", THREE, scatter=0.0).path)
    assert not node_warnings(comparison)
    metric = comparison.nodes.metrics[0]
    assert [row.ratio for row in metric.rows] == pytest.approx([metric.over_blocks.ratio] * 3)


def test_a_block_whose_run_is_lost_leaves_the_others_of_its_node(tmp_path):
    results = write_on_nodes(tmp_path / "r", THREE)
    edit_run(results, next(run.run_id for run in results.plan().runs if run.block == 4), state="failed")
    counts = {row.node: row.num_blocks for row in compared(results.path).nodes.metrics[0].rows}
    assert counts == {"n1": 4, "n2": 3, "n3": 4}


def test_the_deciding_metrics_that_are_named_are_those_by_node(tmp_path):
    comparison = compared(write_on_nodes(tmp_path / "r", THREE).path, metrics=("wall_s",), confidence=0.9)
    assert {metric.metric for metric in comparison.nodes.metrics} == {"wall_s"}
    assert comparison.nodes.num_tests == 2
    assert comparison.nodes.confidence == 0.9


def test_a_table_of_many_nodes_has_those_that_are_farthest(tmp_path):
    path = write_on_nodes(tmp_path / "r", [f"n{i:02d}" for i in range(20)] * 2, {"n07": 0.05}).path
    table = cli.benchctl("compare", str(path)).stdout
    assert "n07" in table
    assert "and 8 nodes more" in table
    document = json.loads(cli.benchctl("compare", str(path), "--json").stdout)["comparisons"][0]
    assert len(document["nodes"]["metrics"][0]["nodes"]) == 20
