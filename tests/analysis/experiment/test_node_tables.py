"""Results by node of whole experiments: a ratio for each node, one F test, and the warning."""

import json

import msgspec
import pytest
from scipy import stats
from support import cli
from support.results.builders import edit_run
from support.results.comparing import compare_arms, messages
from support.results.nodes import write_on_nodes

from benchctl.analysis.analyzed import analyze_directory
from benchctl.analysis.compare.cells import node_of_run, p_of_equal_nodes
from benchctl.records.record import RunRecord
from benchctl.records.schema import NodeInfo

THREE = ("n1", "n2", "n3") * 4


def test_blocks_on_one_node_have_no_results_by_node(tmp_path):
    results = write_on_nodes(tmp_path / "r", ("n1",) * 6)
    assert compare_arms(results).nodes is None
    assert analyze_directory(results.path).nodes == ()
    record = RunRecord(schema_version=3, index=0, run_id="r", block=0, position=0, variant="base", host="login")
    for fields, node in (
        ({"node": NodeInfo(name="n1", hostname="n1"), "argv": ("server",)}, "n1"),
        ({"argv": ("server",)}, "login"),
        ({"clock": "virtual"}, None),
    ):
        assert node_of_run(msgspec.structs.replace(record, **fields)) == node


def test_the_test_is_the_f_test_of_the_textbook_where_a_node_has_two_blocks():
    groups = [(0.10, 0.12, 0.11), (0.09, 0.13), (0.16, 0.18, 0.15)]
    assert p_of_equal_nodes(groups) == pytest.approx(stats.f_oneway(*groups).pvalue)
    assert p_of_equal_nodes([(0.1,), (0.2,), (0.1,), (0.3,), (0.1,), (0.2,)]) is None
    assert p_of_equal_nodes([(0.1, 0.2), (0.3, 0.3)]) is None
    assert p_of_equal_nodes([(0.1,) * 3, (0.1 + 1e-16,) * 3]) == 1
    assert p_of_equal_nodes([(0.1,) * 3, (0.2,) * 3]) == 0


def test_nodes_that_are_alike_are_not_called_different_and_exactly_equal_blocks_neither(tmp_path):
    for scatter in (0.004, 0.0):
        results = write_on_nodes(tmp_path / f"{scatter}", THREE, scatter=scatter)
        comparison = compare_arms(results)
        assert not messages(comparison, "node-differs")
        assert comparison.nodes.num_tests == 2 * 3
        assert [row.node for row in comparison.nodes.metrics[0].rows] == ["n1", "n2", "n3"]
    metric = comparison.nodes.metrics[0]
    assert [row.ratio for row in metric.rows] == pytest.approx([metric.over_blocks.ratio] * 3)
    edit_run(results, next(run.run_id for run in results.plan().runs if run.block == 4), state="failed")
    named = compare_arms(results, metrics=("wall_s",), confidence=0.9).nodes
    assert {row.node: row.num_blocks for row in named.metrics[0].rows} == {"n1": 4, "n2": 3, "n3": 4}
    assert {metric.metric for metric in named.metrics} == {"wall_s"}
    assert (named.num_tests, named.confidence) == (2, 0.9)


def test_nodes_that_differ_are_named_with_cell_metric_and_size_and_change_no_verdict(tmp_path):
    results = write_on_nodes(tmp_path / "r", THREE, {"n3": 0.05})
    before = compare_arms(results)
    (message,) = messages(before, "node-differs")
    metric = before.nodes.differing[0]
    low, _, high = (row.ratio for row in sorted(metric.rows, key=lambda row: row.ratio))
    assert high / low == pytest.approx(1.05, abs=0.01)
    assert message.startswith(f"nodes differ beyond chance: {metric.metric} in {metric.label} changes by +")
    assert " on n3 (p <0.001, one of 6 tests)" in message
    assert "and so in 5 more metrics of these cells" in message
    for run in results.plan().runs:
        edit_run(results, run.run_id, node=NodeInfo(name="n1", hostname="n1"))
    after = compare_arms(results)
    estimates = [[m.estimate for cell in each.cells for m in cell.metrics] for each in (before, after)]
    assert estimates[0] == estimates[1]
    assert before.verdict == after.verdict


def test_with_one_block_per_node_these_cannot_be_told_from_blocks_and_a_table_of_many_has_the_farthest(tmp_path):
    path = write_on_nodes(tmp_path / "r", [f"n{i:02d}" for i in range(14)], {"n07": 0.05}).path
    table = cli.benchctl("compare", str(path)).stdout
    assert "a node cannot be told from a block" in table
    assert "n07" in table
    assert "and 2 nodes more" in table
    (document,) = json.loads(cli.benchctl("compare", str(path), "--json").stdout)["comparisons"]
    assert len(document["nodes"]["metrics"][0]["nodes"]) == 14
    assert {metric["p"] for metric in document["nodes"]["metrics"]} == {None}
