"""The verdict: an interval against a margin, and on experiments whose truth is known.

The latter are a small version of ``benchmarks/verdict/verdict_truth.py``. Streams are named, so that each test sees
the same experiments every time; a demand fails where chance would explain it in less than one of a hundred cases.
"""

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st
from scipy import stats

from benchctl.analysis.compare.decide import (
    Margins,
    blocks_for_verdict,
    holm_levels,
    joint_level,
    margins_of,
    verdict_of as verdict_of_interval,
)
from benchctl.analysis.compare.metric import Rules, compare_metric
from benchctl.analysis.statistics.estimate import BlockDesign, estimate_paired, side_ratio
from benchctl.records.stores import MetricNoise
from benchmarks.verdict import known_truth, shares, verdict_truth

MIRROR = {"regression": "improvement", "improvement": "regression"}
differences = st.lists(st.floats(-0.2, 0.2), min_size=1, max_size=8)


def verdict_of(estimate, margin, direction):
    """Both margins alike: no noise floor, none named."""
    return verdict_of_interval(estimate.log_interval, margins_of(margin), direction)


def around(ratio, scatter=0.0005):
    """Four blocks around a ratio, with an interval of about three times the scatter."""
    return estimate_paired([math.log(ratio) + scatter * sign for sign in (1, -1, 1, -1)])


@pytest.mark.parametrize(
    ("ratio", "scatter", "margin", "direction", "verdict"),
    [
        (1.05, 0.0005, 0.01, "lower", "regression"),
        (0.95, 0.0005, 0.01, "lower", "improvement"),
        (1.05, 0.0005, 0.01, "higher", "improvement"),
        (0.95, 0.0005, 0.01, "higher", "regression"),
        (1.05, 0.0005, 0.01, "none", "changed"),
        (1.001, 0.0005, 0.01, "lower", "equivalent"),
        (0.999, 0.0005, 0.01, "none", "equivalent"),
        (1.01, 0.0005, 0.01, "lower", "inconclusive"),
        (0.99, 0.0005, 0.01, "higher", "inconclusive"),
        pytest.param(1.0, 0.02, 0.01, "lower", "inconclusive", id="a wide interval is never equivalent"),
        pytest.param(1.005, 0.0005, 0.01, "lower", "equivalent", id="a significant change inside the margin"),
        pytest.param(1.0, 0.0005, 0.0, "lower", "inconclusive", id="inside a margin of zero is nothing"),
        pytest.param(1.01, 0.0005, 0.0, "lower", "regression", id="a margin of zero is exceeded"),
        pytest.param(1 / 1.0999, 1e-6, 0.1, "lower", "equivalent", id="a margin is a factor downwards"),
        pytest.param(0.9, 1e-6, 0.1, "lower", "improvement", id="and no difference"),
    ],
)
def test_the_side_of_the_margin_and_the_better_direction_make_the_verdict(
    ratio, scatter, margin, direction, verdict
):
    assert verdict_of(around(ratio, scatter), margin, direction) == verdict


@given(differences, st.floats(0, 0.3), st.floats(0, 0.3))
def test_verdicts_mirror_sides_and_directions_and_a_wider_margin_keeps_equivalence(values, margin, more):
    estimate, back = estimate_paired(values), estimate_paired([-value for value in values])
    lower, higher = (verdict_of(estimate, margin, direction) for direction in ("lower", "higher"))
    assert higher == verdict_of(back, margin, "lower") == MIRROR.get(lower, lower)
    assert lower != "equivalent" or verdict_of(estimate, margin + more, "lower") == "equivalent"
    assert verdict_of(estimate_paired(values[:1]), margin, "lower") == "inconclusive"  # of one block


def compared(ratio, scatter, floor_frac=0.0):
    """A deciding metric of six blocks around a ratio, beside a noise floor."""
    values = tuple(ratio * math.exp(scatter * sign) for sign in (1, -1, 1, -1, 1, -1))
    noise = {"step_ms": MetricNoise(log_sd=scatter, num_blocks=6, floor_frac=floor_frac)}
    rules = Rules(margin_frac=0.01, confidence=0.95, is_paired=True, noise=noise)
    sides = (1.0,) * 6, values
    return compare_metric("step_ms", "deciding", sides, rules, side_ratio(*sides, BlockDesign(tuple(range(6)))))


intervals = st.tuples(st.floats(-0.5, 0.5), st.floats(-0.5, 0.5)).map(lambda ends: tuple(sorted(ends)))


@given(intervals, st.floats(0.001, 0.3), st.floats(0, 0.5), st.sampled_from(["lower", "higher", "none"]))
def test_a_noise_floor_calls_nothing_equivalent_and_turns_no_verdict_into_its_opposite(
    interval, threshold, floor, direction
):
    quiet = verdict_of_interval(interval, margins_of(threshold), direction)
    noisy = verdict_of_interval(interval, margins_of(threshold, floor), direction)
    assert (noisy == "equivalent") == (quiet == "equivalent")
    assert noisy in {quiet, "inconclusive"}


def test_a_real_change_below_the_noise_floor_is_inconclusive_and_no_number_of_blocks_is_promised():
    """A floor of 19 % and a true +10 %, known well."""
    margins, metric = margins_of(0.01, 0.19), compared(1.10, scatter=0.0005, floor_frac=0.19)
    assert metric.verdict == "inconclusive"
    assert "between the margin of 1% and the noise floor of 19%" in metric.reason
    assert "benchctl run NAME --aa" in metric.reason
    assert blocks_for_verdict(around(1.10), margins) is None
    assert verdict_of_interval(around(1.30).log_interval, margins, "lower") == "regression"


def test_inside_a_named_equivalence_margin_a_change_beyond_the_threshold_is_equivalent():
    margins = margins_of(0.01, equivalence_frac=0.2)
    assert verdict_of_interval(around(1.10).log_interval, margins, "lower") == "equivalent"
    assert verdict_of_interval(around(1.30).log_interval, margins, "lower") == "regression"
    assert margins_of(0.05, 0.02, 0.03) == Margins(0.05, 0.03)


def test_the_blocks_still_needed_end_the_doubt_and_no_number_tells_a_change_that_lies_on_the_margin():
    needed = blocks_for_verdict(around(1.002, scatter=0.01), margins_of(0.01))
    assert needed > 4
    scatter = [0.01 * (-1) ** i * math.sqrt(4 / 3) for i in range(needed + needed % 2)]
    many = estimate_paired([math.log(1.002) + each for each in scatter], estimator="mean")
    assert verdict_of(many, 0.01, "lower") == "equivalent"
    for undecidable in (around(1.01), estimate_paired([0.0])):
        assert blocks_for_verdict(undecidable, margins_of(0.01)) is None


@pytest.mark.parametrize(
    ("scatter", "reason"),
    [
        (0.6, "not even 1000 blocks would give a verdict: the scatter is too large"),
        (0.05, "the interval reaches across the margin of 1%"),
    ],
)
def test_a_scatter_beyond_any_number_of_blocks_is_not_called_a_change_close_to_the_margin(scatter, reason):
    assert reason in compared(1.03, scatter).reason


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


def scores(values, blocks=None):
    """A test in which every block counts the same."""
    return dict(zip(blocks or range(len(values)), values, strict=True))


residuals = st.lists(st.floats(-0.1, 0.1), min_size=6, max_size=9)


@given(residuals, st.integers(2, 6))
def test_tests_that_say_the_same_are_judged_as_one(values, num_tests):
    two = joint_level([scores(values), scores(values)], 0.05)
    level = joint_level([scores([factor * v for v in values]) for factor in range(1, num_tests + 1)], 0.05)
    if two > 0.025:  # not the least that two tests may be judged at
        assert level == pytest.approx(two)


@given(st.lists(residuals, min_size=2, max_size=5))
def test_the_joint_level_lies_between_that_of_bonferroni_and_that_of_one_test(several):
    assert 0.05 / len(several) <= joint_level([scores(values) for values in several], 0.05) <= 0.05


def test_independent_tests_cost_about_what_bonferroni_asks_for_and_equal_ones_nearly_nothing():
    stream = np.random.default_rng(5)
    noises = [stream.normal(size=(3, 12)) for _ in range(60)]
    independent, alike = (
        np.mean([joint_level([scores(row - row.mean()) for row in of_tests(noise)], 0.05) for noise in noises])
        for of_tests in (lambda noise: noise, lambda noise: noise[0] + 0.05 * noise)
    )
    assert 0.05 / 3 <= independent < 0.025
    assert alike > 0.04


def test_tests_that_lack_some_blocks_are_judged_together_with_the_others():
    stream = np.random.default_rng(6)
    tests = [scores(stream.normal(size=20)), scores(stream.normal(size=8), range(12, 20))]
    assert 0.025 <= joint_level(tests, 0.05) == joint_level(tests, 0.05) <= 0.05


def test_the_joint_level_refuses_any_of_six_equal_arms_in_one_experiment_of_twenty_at_most():
    """Five differences that share a baseline, eight blocks, nothing changed: t-tests at the joint level."""
    stream, refused, trials = np.random.default_rng(7), 0, 300
    for _ in range(trials):
        runs = stream.normal(size=(6, 8))
        d = runs[1:] - runs[0]
        off = d - d.mean(axis=1, keepdims=True)
        level = joint_level([scores(row) for row in off], 0.05)
        t = d.mean(axis=1) / (off.std(axis=1, ddof=1) / math.sqrt(8))
        refused += bool(np.any(2 * stats.t.sf(np.abs(t), 7) < level))
    assert stats.binom.sf(refused - 1, trials, 0.05) > 0.01


def verdict_shares(num_experiments, **options):
    """Shares of experiments by their verdicts."""
    conditions = known_truth.Made(**options)
    events = (
        {
            "covers": verdict_truth.covers(metrics[i % len(metrics)], conditions.truth),
            "any change": any(metric.verdict in verdict_truth.CHANGES for metric in metrics),
            **{name: metrics[0].verdict == name for name in ("regression", "equivalent")},
        }
        for i, (_, metrics) in enumerate(known_truth.experiments(conditions, num_experiments))
    )
    return shares.row({}, events).shares


EQUAL = {"covers": shares.COVERS_AT_LEAST, "any change": shares.SELDOM}
"""Demands on equal servers: the interval covers the truth, and they are told apart seldom."""
DRIFT = {"noise": "linear drift", "margin_frac": 0.0}


@pytest.mark.parametrize(
    ("num_experiments", "conditions", "demands"),
    [
        (200, {"noise": "gaussian", "num_blocks": 6}, EQUAL),
        (200, {"noise": "heavy tail"}, EQUAL),
        (200, {"noise": "linear drift", "num_blocks": 6}, EQUAL),
        (200, {"noise": "random walk"}, EQUAL),
        (200, {"noise": "AR(1)"}, EQUAL),
        (100, {"noise": "gaussian", "num_blocks": 15}, EQUAL),
        (200, {"noise": "two speeds, 10 %, 0.2"}, EQUAL),
        (200, {"noise": "outliers, 10 % by 30 %"}, EQUAL),
        # Arms that share a slope, also where positions are not balanced; fifteen corrected tests.
        (60, {"num_arms": 3, "num_blocks": 6, **DRIFT}, EQUAL),
        (60, {"num_arms": 5, "num_blocks": 7, **DRIFT}, EQUAL),
        (60, {"num_arms": 6, "num_metrics": 3, **DRIFT}, EQUAL),
        # Eight blocks find five per cent at two per cent of scatter.
        (100, {"noise": "gaussian", "change_frac": 0.05}, {"regression": shares.NEARLY_ALWAYS}),
        (100, {"noise": "heavy tail", "change_frac": 0.05}, {"regression": shares.NEARLY_ALWAYS}),
        (100, {"noise": "random walk", "change_frac": 0.05}, {"regression": shares.NEARLY_ALWAYS}),
        (100, {"change_frac": 0.01, "margin_frac": 0.02}, {"regression": shares.SELDOM}),
        (100, {"ratio_sd": 0.003}, {"equivalent": shares.NEARLY_ALWAYS}),
        (
            100,
            {"ratio_sd": 0.003, "change_frac": 0.02},
            {"equivalent": shares.SELDOM, "regression": shares.NEARLY_ALWAYS},
        ),
        # A noise floor makes no real change equivalent, and hides one that lies below it.
        (60, {"change_frac": 0.05, "floor_frac": 0.02}, {"equivalent": shares.SELDOM}),
        (60, {"change_frac": 0.05, "floor_frac": 0.1}, {"equivalent": shares.SELDOM, "regression": shares.SELDOM}),
    ],
)
def test_the_verdict_is_right_about_experiments_whose_truth_is_known(num_experiments, conditions, demands):
    rates = verdict_shares(num_experiments, **conditions)
    assert {event for event, demand in demands.items() if not demand.is_met(rates[event])} == set(), rates


def test_the_remainder_of_equal_servers_covers_1_whether_answers_end_naturally_or_are_forced():
    rows = list(verdict_truth.remainder(16))
    assert {row.condition["stop"] for row in rows} == {"natural", "forced"}
    assert all(not row.failures for row in rows), [row.cells() for row in rows if row.failures]


def test_the_robust_estimate_finds_a_change_that_outliers_hide_from_the_mean():
    options = {"noise": "outliers, 10 % by 30 %", "change_frac": 0.05}
    robust = verdict_shares(100, **options)["regression"]
    assert robust.hits > 1.5 * verdict_shares(100, estimator="mean", **options)["regression"].hits


@pytest.mark.parametrize("num_blocks", [4, 8])
def test_two_experiments_without_common_blocks_have_an_interval_that_covers(num_blocks):
    conditions = known_truth.Made(num_blocks=num_blocks)
    events = ({"covers": verdict_truth.covers(one, 0.0)} for one in verdict_truth.two_days(conditions, 200, 0.0))
    assert shares.COVERS_AT_LEAST.is_met(shares.row({}, events).shares["covers"])
