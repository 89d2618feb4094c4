"""Results by node: laws of the one-way layout, degenerate cases, and how often intervals and tests are right."""

import math
from statistics import fmean, stdev

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from benchctl.analysis.statistics.decide import holm_p_values
from benchctl.analysis.statistics.estimate import BlockDesign, PooledSlope, side_ratio
from benchctl.analysis.statistics.nodes import NodeEffects, node_effects, ratio_by_node
from benchctl.analysis.statistics.robust import PositionCovariate

N1, N2, N3 = (0.10, 0.12, 0.11, 0.15), (0.09, 0.13, 0.12, 0.10), (0.16, 0.18, 0.15, 0.21)
BALANCED = {"n1": N1, "n2": N2, "n3": N3}
UNBALANCED = {"n1": N1[:2], "n2": N2, "n3": (*N3, 0.17)}


def effects_of(groups: dict[str, tuple[float, ...]]) -> NodeEffects:
    """The effects of nodes whose blocks have these log-ratios."""
    nodes = [node for node, values in groups.items() for _ in values]
    return node_effects([value for values in groups.values() for value in values], nodes)


@pytest.mark.parametrize("groups", [BALANCED, UNBALANCED])
def test_the_f_test_is_that_of_the_textbook(groups):
    reference = stats.f_oneway(*groups.values())
    test = effects_of(groups).test
    assert test.statistic == pytest.approx(reference.statistic)
    assert test.p_value == pytest.approx(reference.pvalue)


@pytest.mark.parametrize("groups", [BALANCED, UNBALANCED])
def test_the_interval_over_nodes_is_students_over_the_means_of_nodes(groups):
    reference = stats.ttest_1samp([fmean(values) for values in groups.values()], 0).confidence_interval(0.95)
    assert effects_of(groups).over_nodes.interval(0.95) == pytest.approx(tuple(reference))


def test_the_variance_between_equally_long_nodes_is_what_their_means_scatter_beyond_their_blocks():
    found = effects_of(BALANCED)
    within = fmean(stdev(values) ** 2 for values in BALANCED.values())
    between = stdev(fmean(values) for values in BALANCED.values()) ** 2 - within / 4
    assert found.within_variance == pytest.approx(within)
    assert found.between_variance == pytest.approx(between)


def test_the_variance_between_nodes_is_unbiased_where_their_blocks_are_unequally_many():
    stream, found = np.random.default_rng(3), []
    for _ in range(4000):
        groups = {f"n{i}": tuple(stream.normal(0, 3) + stream.normal(0, 1, n)) for i, n in enumerate((2, 3, 8, 12))}
        found.append(effects_of(groups).between_variance)
    assert fmean(found) == pytest.approx(9, rel=0.05)


def test_the_interval_of_a_node_pools_the_scatter_of_all_where_it_has_few_blocks():
    found = effects_of(BALANCED)
    half = stats.t.ppf(0.975, 9) * math.sqrt(found.within_variance / 4)
    assert found.nodes[2].estimate.interval(0.95) == pytest.approx((fmean(N3) - half, fmean(N3) + half))


def test_a_node_with_six_blocks_uses_their_own_scatter():
    quiet, wild = (0.1, 0.101, 0.099, 0.1, 0.102, 0.098), (0.1, 0.3, -0.1, 0.2, 0.0, 0.15)
    found = effects_of({"quiet": quiet, "wild": wild})
    for node, values in zip(found.nodes, (quiet, wild), strict=True):
        reference = stats.ttest_1samp(values, 0).confidence_interval(0.95)
        assert node.estimate.interval(0.95) == pytest.approx(tuple(reference))


def test_a_node_is_tested_against_all_blocks_elsewhere_with_the_scatter_within_nodes():
    found = effects_of(UNBALANCED)
    error = math.sqrt(found.within_variance * (1 / 2 + 1 / 9))
    elsewhere = (*UNBALANCED["n2"], *UNBALANCED["n3"])
    t = (fmean(UNBALANCED["n1"]) - fmean(elsewhere)) / error
    assert found.nodes[0].difference.p_value() == pytest.approx(2 * stats.t.sf(abs(t), 8))


def test_two_nodes_are_tested_as_by_t_with_common_scatter_or_by_welch_with_six_blocks_each():
    few = effects_of({"n1": N1, "n2": N3})
    assert few.nodes[0].difference.p_value() == pytest.approx(stats.ttest_ind(N1, N3).pvalue)
    assert few.nodes[0].difference.p_value() == pytest.approx(few.test.p_value)
    assert few.num_differences == 1
    a, b = (*N1, 0.3, 0.05), (*N2, 0.11, 0.115)
    many = effects_of({"n1": a, "n2": b})
    assert many.nodes[0].difference.p_value() == pytest.approx(stats.ttest_ind(a, b, equal_var=False).pvalue)


def test_a_second_node_that_differs_does_not_hide_the_first():
    quiet = {f"n{i}": tuple(0.001 * (j - 1) + 0.0001 * i for j in range(3)) for i in range(4)}
    shifted = {f"m{i}": tuple(0.05 + 0.001 * (j - 1) for j in range(3)) for i in range(2)}
    by_name = {node.node: node.difference.p_value() for node in effects_of(quiet | shifted).nodes}
    assert by_name["m0"] < 1e-4
    assert by_name["m1"] < 1e-4


@given(st.permutations(range(12)), st.permutations(["a", "b", "c"]))
def test_neither_the_order_of_blocks_nor_the_names_of_nodes_change_a_number(order, names):
    values, nodes = (*N1, *N2, *N3), [name for name in ("n1", "n2", "n3") for _ in range(4)]
    renamed = dict(zip(("n1", "n2", "n3"), names, strict=True))
    before = node_effects(values, nodes)
    after = node_effects([values[i] for i in order], [renamed[nodes[i]] for i in order])
    found = {node.node: node for node in after.nodes}
    for node in before.nodes:
        same = found[renamed[node.node]]
        assert same.log_ratio == pytest.approx(node.log_ratio)
        assert same.estimate.interval(0.95) == pytest.approx(node.estimate.interval(0.95))
        assert same.difference.p_value() == pytest.approx(node.difference.p_value())
    assert after.test.p_value == pytest.approx(before.test.p_value)
    assert after.over_nodes.interval(0.95) == pytest.approx(before.over_nodes.interval(0.95))
    assert after.between_variance == pytest.approx(before.between_variance)


def test_one_node_has_no_others():
    found = effects_of({"n1": N1})
    assert found.reason == "one-node"
    assert found.over_nodes is None
    assert found.nodes[0].difference is None
    assert found.nodes[0].estimate.interval(0.95) == pytest.approx(
        tuple(stats.ttest_1samp(N1, 0).confidence_interval(0.95))
    )


def test_with_one_block_per_node_a_node_is_a_block():
    found = effects_of({f"n{i}": (value,) for i, value in enumerate(N1)})
    assert found.reason == "one-block-per-node"
    assert found.test is None
    assert found.between_variance is None
    assert all(node.estimate is None and node.difference is None for node in found.nodes)
    assert found.over_nodes.interval(0.95) == pytest.approx(
        tuple(stats.ttest_1samp(N1, 0).confidence_interval(0.95))
    )


def test_a_single_block_beside_others_has_the_interval_of_their_scatter():
    found = effects_of({"n1": N1, "n2": N2, "n3": (0.12,)})
    low, high = found.nodes[2].estimate.interval(0.95)
    assert high - low == pytest.approx(2 * stats.t.ppf(0.975, 6) * math.sqrt(found.within_variance))


def test_equal_blocks_have_no_scatter_and_no_node_differs():
    found = effects_of({"n1": (0.1, 0.1), "n2": (0.1, 0.1 + 2e-17, 0.1)})
    assert found.within_variance == found.between_variance == 0
    assert found.test is None
    assert found.over_nodes.interval(0.95) == (0.1, 0.1)
    assert [node.difference.p_value() for node in found.nodes] == [1, 1]


def test_equal_blocks_on_nodes_that_differ_do_differ():
    found = effects_of({"n1": (0.1, 0.1, 0.1), "n2": (0.1, 0.1, 0.1), "n3": (0.2, 0.2, 0.2)})
    assert found.test.p_value == 0
    assert [node.difference.p_value() for node in found.nodes] == [0, 0, 0]
    assert found.nodes[2].estimate.interval(0.95) == pytest.approx((0.2, 0.2))


def test_an_order_that_is_that_of_the_nodes_leaves_nothing_to_say():
    found = node_effects((0.1, 0.2) * 4, ["n1", "n2"] * 4, is_ordered_by_node=True)
    assert found.reason == "order"
    assert found.over_nodes is None
    assert found.nodes[0].difference is None


def test_positions_are_removed_as_by_the_analysis_of_covariance():
    stream = np.random.default_rng(5)
    x = np.array([1, -1, 1, 1, -1, -1, 1, -1, -1, 1, 1, 1.0])
    nodes = np.repeat([0, 1, 2], [3, 4, 5])
    d = stream.normal(0, 0.02, 12) + 0.03 * x + 0.05 * (nodes == 2)
    dummies = np.eye(3)[nodes]
    full, of_full = np.linalg.lstsq(np.column_stack([dummies, x]), d)[:2]
    of_null = np.linalg.lstsq(np.column_stack([np.ones(12), x]), d)[1]
    f = (of_null[0] - of_full[0]) / 2 / (of_full[0] / 8)
    off = x - dummies @ (dummies.T @ x / [3, 4, 5])
    covariate = PositionCovariate(x, float(off @ off) / 2)
    found = node_effects(d - full[3] * x, [f"n{i}" for i in nodes], covariate)
    assert [node.log_ratio for node in found.nodes] == pytest.approx(list(full[:3]))
    assert found.test.statistic == pytest.approx(f)
    assert found.test.df_within == 8
    inverse = np.linalg.inv(np.column_stack([dummies, x]).T @ np.column_stack([dummies, x]))
    assert found.nodes[0].estimate.standard_error == pytest.approx(math.sqrt(of_full[0] / 8 * inverse[0, 0]))
    contrast = np.array([1, -4 / 9, -5 / 9, 0])
    error = math.sqrt(of_full[0] / 8 * contrast @ inverse @ contrast)
    assert found.nodes[0].difference.standard_error == pytest.approx(error)


def test_by_node_are_the_log_ratios_that_the_verdict_pools():
    stream = np.random.default_rng(5)
    a, b = np.exp(stream.normal(0, 0.02, 12)), np.exp(stream.normal(0.1, 0.02, 12))
    positions = (1, -1) * 6
    design = BlockDesign(tuple(range(12)), positions, tuple(-x / 2 for x in positions))
    ratio = side_ratio(tuple(a), tuple(b), design, None, estimator="mean")
    within = PooledSlope(ratio.estimate.position_effect, 6)
    found = ratio_by_node(ratio, [f"n{i // 4}" for i in range(12)], within)
    assert fmean(node.log_ratio for node in found.nodes) == pytest.approx(ratio.estimate.log_ratio)
    assert found.nodes[0].estimate.degrees_of_freedom == 12 - 3 - 1
    assert ratio_by_node(ratio, ["n1", "n2"] * 6, None).reason == "order"


def test_blocks_without_a_node_are_left_out():
    ratio = side_ratio((1.0,) * 6, (1.1, 1.2, 1.15, 1.3, 1.25, 9.0), BlockDesign(tuple(range(6))), None)
    found = ratio_by_node(ratio, ["n1", "n1", "n2", "n2", "n2", None], None)
    assert [node.num_blocks for node in found.nodes] == [2, 3]
    assert ratio_by_node(ratio, [None] * 6, None) is None


def covered(counts: tuple[int, ...], sd_between: float, num: int, seed: int) -> float:
    """Share of experiments whose interval over nodes holds the truth."""
    stream, hits = np.random.default_rng(seed), 0
    nodes = [f"n{i}" for i, count in enumerate(counts) for _ in range(count)]
    for _ in range(num):
        effects = np.repeat(stream.normal(0, sd_between, len(counts)), counts)
        low, high = node_effects(0.1 + effects + stream.normal(0, 0.02, len(nodes)), nodes).over_nodes.interval(
            0.95
        )
        hits += low <= 0.1 <= high
    return hits / num


@pytest.mark.slow
@pytest.mark.parametrize("sd_between", [0.005, 0.04])
@pytest.mark.parametrize("counts", [(4, 4, 4), (2, 3, 7), (1, 2, 3, 4, 5, 6), (2,) * 11 + (26,)])
def test_the_interval_over_nodes_holds_the_truth_in_93_to_97_per_cent(counts, sd_between):
    assert 0.93 <= covered(counts, sd_between, 1500, 11) <= 0.97


def warned(counts: tuple[int, ...], shift: float, num: int, num_metrics: int = 3) -> float:
    """Share of experiments in which any node differs, in metrics that are half correlated."""
    stream, hits = np.random.default_rng(17), 0
    nodes = [f"n{i}" for i, count in enumerate(counts) for _ in range(count)]
    deviating = np.array([node == "n0" for node in nodes])
    for _ in range(num):
        shared, p_values = stream.normal(0, 0.014, len(nodes)), []
        for _ in range(num_metrics):
            found = node_effects(shared + stream.normal(0, 0.014, len(nodes)) + shift * deviating, nodes)
            p_values += [node.difference.p_value() for node in found.nodes[: found.num_differences]]
        hits += min(holm_p_values(p_values)) < 0.05
    return hits / num


@pytest.mark.slow
@pytest.mark.parametrize("counts", [(4, 4), (8, 8), (2, 3, 7), (2,) * 6])
def test_equal_nodes_are_told_apart_in_at_most_5_per_cent_of_experiments(counts):
    assert warned(counts, 0.0, 800) <= 0.06


@pytest.mark.slow
def test_a_node_that_deviates_by_three_times_the_scatter_of_a_block_is_found():
    assert warned((4, 4, 4), 0.06, 200) > 0.9
    assert warned((3,) * 6, 0.06, 200) > 0.9


def test_holms_p_values_decide_at_the_level_of_his_procedure():
    assert holm_p_values([0.01, 0.04, 0.03, 0.5]) == pytest.approx((0.04, 0.09, 0.09, 0.5))
    assert holm_p_values([]) == ()
