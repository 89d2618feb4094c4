"""Results by node of whole experiments: the node that is named, the interval over nodes, and the unsaid."""

import json
import math
import re

import pytest
from support import cli
from support.results.builders import edit_run
from support.results.nodes import write_on_nodes

from benchctl.analysis.compare.compare import CompareOptions, Side, compare_sides
from benchctl.analysis.compare.result import Comparison
from benchctl.analysis.summary.analyzed import analyze_directory
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


def test_nodes_that_are_alike_are_not_called_different(tmp_path):
    comparison = compared(write_on_nodes(tmp_path / "r", THREE).path)
    assert not node_warnings(comparison)
    assert comparison.nodes.nodes == ("n1", "n2", "n3")
    assert comparison.nodes.num_tests == 3 * 2 * 3
    assert not any(metric.differing for metric in comparison.nodes.metrics)


def test_a_node_that_differs_is_named_with_cell_metric_size_and_the_interval_over_nodes(tmp_path):
    comparison = compared(write_on_nodes(tmp_path / "r", THREE, {"n3": 0.05}).path)
    (message,) = node_warnings(comparison)
    metric = next(m for m in comparison.nodes.metrics if m.label == "top_k=2" and m.metric == "step_ms")
    (row,) = metric.differing
    assert (row.node, row.num_blocks) == ("n3", 4)
    assert math.log(row.against_others) == pytest.approx(0.05, abs=0.01)
    assert row.against_interval[0] > 1.03
    assert message.startswith("node n3 differs from the others beyond chance: ")
    for words in ("in top_k=", "corrected for 18 tests", "the interval over nodes is", "and so in 5 more metrics"):
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


def test_two_nodes_are_called_different_together_and_their_interval_is_wide(tmp_path):
    comparison = compared(write_on_nodes(tmp_path / "r", ("n1", "n1", "n2", "n2") * 2, {"n2": 0.05}).path)
    (message,) = node_warnings(comparison)
    assert message.startswith("nodes n1 and n2 differ beyond chance: ")
    assert comparison.nodes.num_tests == 2 * 3
    metric = comparison.nodes.metrics[0]
    low, high = metric.over_nodes[1]
    assert math.log(high / low) > 5 * 0.05
    assert len({row.p_value for row in metric.rows}) == 1


def test_with_one_block_per_node_it_is_said_that_nodes_cannot_be_told_from_blocks(tmp_path):
    path = write_on_nodes(tmp_path / "r", [f"n{i}" for i in range(8)]).path
    comparison = compared(path)
    assert comparison.nodes.num_tests == 0
    assert all(row.p_value is None and row.interval is None for row in comparison.nodes.metrics[0].rows)
    assert "a node cannot be told from a block" in cli.benchctl("compare", str(path)).stdout


def test_an_order_that_changes_only_with_the_node_is_told_and_no_node_is_called_different(tmp_path):
    orders = ((0, 1, 2), (2, 1, 0)) * 4
    results = write_on_nodes(tmp_path / "r", ("n1", "n2") * 4, {"n2": 0.05}, orders=orders)
    assert not node_warnings(compared(results.path))
    assert "cannot be told from the order" in cli.benchctl("compare", str(results.path)).stdout


def test_fewer_blocks_than_a_verdict_needs_warn_of_no_node(tmp_path):
    comparison = compared(write_on_nodes(tmp_path / "r", ("n1", "n1", "n2", "n2"), {"n2": 0.5}).path)
    assert not node_warnings(comparison)
    assert comparison.nodes.num_tests == 0
    assert comparison.nodes.metrics[0].rows[1].against_others > 1.4


def test_nodes_of_exactly_equal_blocks_do_not_differ(tmp_path):
    comparison = compared(write_on_nodes(tmp_path / "r", THREE, scatter=0.0).path)
    assert not node_warnings(comparison)
    metric = comparison.nodes.metrics[0]
    assert metric.over_nodes[1] == pytest.approx((metric.over_blocks.ratio,) * 2)
    assert metric.between_sd == 0


def test_a_block_whose_run_is_lost_leaves_the_others_of_its_node(tmp_path):
    results = write_on_nodes(tmp_path / "r", THREE)
    edit_run(results, next(run.run_id for run in results.plan().runs if run.block == 4), state="failed")
    counts = {row.node: row.num_blocks for row in compared(results.path).nodes.metrics[0].rows}
    assert counts == {"n1": 4, "n2": 3, "n3": 4}


def test_the_deciding_metrics_that_are_named_are_those_by_node(tmp_path):
    comparison = compared(write_on_nodes(tmp_path / "r", THREE).path, metrics=("wall_s",), confidence=0.9)
    assert {metric.metric for metric in comparison.nodes.metrics} == {"wall_s"}
    assert comparison.nodes.num_tests == 3 * 2
    assert comparison.nodes.confidence == 0.9


def test_show_finds_what_compare_warns_of(tmp_path):
    path = write_on_nodes(tmp_path / "r", THREE, {"n3": 0.05}).path
    (message,) = node_warnings(compared(path))
    (finding,) = [f for f in analyze_directory(path).findings if f.code == "node-differs"]
    numbers = r"[-+][\d.]+%"
    assert re.findall(numbers, finding.sentence) == re.findall(numbers, message)
    assert finding.numbers == {"num_nodes": 1, "num_tests": 18}


def test_a_table_of_many_nodes_has_those_that_are_farthest_from_the_others(tmp_path):
    path = write_on_nodes(tmp_path / "r", [f"n{i:02d}" for i in range(20)] * 2, {"n07": 0.05}).path
    table = cli.benchctl("compare", str(path)).stdout
    assert "n07" in table
    assert "and 8 nodes more" in table
    document = json.loads(cli.benchctl("compare", str(path), "--json").stdout)["comparisons"][0]
    assert len(document["nodes"]["metrics"][0]["nodes"]) == 20
