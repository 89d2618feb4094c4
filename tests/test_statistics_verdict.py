"""The verdict: an interval against a margin."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchctl.analysis.metric_comparison import MetricComparison, judged
from benchctl.analysis.metric_table import METRICS
from benchctl.analysis.multiplicity import holm_levels
from benchctl.analysis.planning import blocks_for_verdict
from benchctl.analysis.statistics import estimate_paired, log_margin, verdict_of

MIRROR = {"regression": "improvement", "improvement": "regression"}
differences = st.lists(st.floats(-0.2, 0.2), min_size=1, max_size=8)


def around(ratio, scatter=0.0005):
    """Four blocks around a ratio, with an interval of about three times the scatter."""
    return estimate_paired([math.log(ratio) + scatter * sign for sign in (1, -1, 1, -1)])


@pytest.mark.parametrize(
    ("ratio", "direction", "verdict"),
    [
        (1.05, "lower", "regression"),
        (0.95, "lower", "improvement"),
        (1.05, "higher", "improvement"),
        (0.95, "higher", "regression"),
        (1.05, "none", "changed"),
        (1.001, "lower", "equivalent"),
        (0.999, "none", "equivalent"),
        (1.01, "lower", "inconclusive"),
        (0.99, "higher", "inconclusive"),
    ],
)
def test_the_side_of_the_margin_and_the_better_direction_make_the_verdict(ratio, direction, verdict):
    assert verdict_of(around(ratio), 0.01, direction) == verdict


def test_a_wide_interval_is_inconclusive_and_never_equivalent():
    assert verdict_of(around(1.0, scatter=0.02), 0.01, "lower") == "inconclusive"


def test_a_significant_change_inside_the_margin_is_equivalent():
    estimate = around(1.005)
    assert estimate.ci_low > 1
    assert verdict_of(estimate, 0.01, "lower") == "equivalent"


@pytest.mark.parametrize("ratio", [0.2, 1.0, 5.0])
def test_one_block_never_tells(ratio):
    assert verdict_of(estimate_paired([math.log(ratio)]), 0.01, "lower") == "inconclusive"


def test_a_margin_of_zero_calls_nothing_equivalent_that_scatters():
    assert verdict_of(around(1.0), 0.0, "lower") == "inconclusive"
    assert verdict_of(around(1.01), 0.0, "lower") == "regression"


def test_a_margin_is_a_factor_either_way():
    inside = around(1 / 1.0999, scatter=1e-6)
    assert verdict_of(inside, 0.1, "lower") == "equivalent"
    assert verdict_of(around(0.9, scatter=1e-6), 0.1, "lower") == "improvement"
    assert log_margin(0.1) == pytest.approx(-math.log(1 / 1.1))


@given(differences, st.floats(0, 0.3), st.sampled_from(["lower", "higher"]))
def test_swapping_the_sides_mirrors_the_verdict(values, margin, direction):
    forth = verdict_of(estimate_paired(values), margin, direction)
    back = verdict_of(estimate_paired([-value for value in values]), margin, direction)
    assert back == MIRROR.get(forth, forth)


@given(differences, st.floats(0, 0.3))
def test_turning_the_better_direction_mirrors_the_verdict(values, margin):
    estimate = estimate_paired(values)
    lower, higher = verdict_of(estimate, margin, "lower"), verdict_of(estimate, margin, "higher")
    assert higher == MIRROR.get(lower, lower)


@given(differences, st.floats(0, 0.3), st.floats(0, 0.3))
def test_a_wider_margin_never_turns_equivalent_into_something_else(values, margin, more):
    estimate = estimate_paired(values)
    if verdict_of(estimate, margin, "lower") == "equivalent":
        assert verdict_of(estimate, margin + more, "lower") == "equivalent"


def test_the_blocks_still_needed_end_the_doubt():
    estimate = around(1.002, scatter=0.01)
    needed = blocks_for_verdict(estimate, 0.01)
    assert needed > 4
    many = estimate_paired(
        [math.log(1.002) + 0.01 * (-1) ** i * math.sqrt(4 / 3) for i in range(needed + needed % 2)]
    )
    assert verdict_of(many, 0.01, "lower") == "equivalent"


def test_no_number_of_blocks_tells_a_change_that_lies_on_the_margin():
    assert blocks_for_verdict(around(1.01), 0.01) is None
    assert blocks_for_verdict(estimate_paired([0.0]), 0.01) is None


@pytest.mark.parametrize(
    ("scatter", "told"),
    [
        (0.6, "not even 1000 blocks would tell: the scatter is too large"),
        (0.05, "more blocks, if ratio and scatter stay as they are"),
    ],
)
def test_a_scatter_beyond_any_number_of_blocks_is_not_called_a_change_close_to_the_margin(scatter, told):
    compared = MetricComparison(
        metric=METRICS["step_ms"],
        role="deciding",
        verdict="inconclusive",
        a_blocks=(),
        b_blocks=(),
        estimate=around(1.03, scatter=scatter),
        margin_frac=0.01,
    )
    assert told in judged(compared, 0.95).reason


@pytest.mark.parametrize(
    ("p_values", "decided"),
    [
        ([0.01, 0.02, 0.03], [True, True, True]),
        ([0.04, 0.01, 0.03], [False, True, False]),
        ([0.02, 0.9, 0.02], [False, False, False]),
        ([0.05], [True]),
        ([], []),
    ],
)
def test_holm_lets_a_verdict_stand_while_all_smaller_p_values_stand(p_values, decided):
    levels = holm_levels(p_values, 0.05)
    assert [p <= level for p, level in zip(p_values, levels, strict=True)] == decided


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_decides_all_that_bonferroni_does_and_nothing_beyond_one_test_alone(p_values):
    levels = holm_levels(p_values, 0.05)
    assert all(0.05 / len(p_values) - 1e-12 <= level <= 0.05 for level in levels)
