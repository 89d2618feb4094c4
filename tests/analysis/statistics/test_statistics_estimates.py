"""Estimates over blocks: agreement with scipy, their laws, and how often the interval covers the truth."""

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from benchctl.analysis.compare.decide import (
    blocks_to_detect,
    decision_alpha,
    margins_of,
    minimum_detectable_effect,
    verdict_of,
)
from benchctl.analysis.statistics.estimate import (
    PooledSlope,
    RatioEstimate,
    estimate_paired,
    log_ratios,
    unpaired_ratio,
)
from benchctl.analysis.statistics.intervals import t_quantile

DIFFERENCES = (0.010, 0.014, 0.008, 0.021, -0.002, 0.016)
A = (10.0, 11.0, 10.5, 9.8)
B = (12.0, 12.5, 12.2, 13.0, 11.9)

positive = st.floats(0.01, 100)
blocks = st.lists(st.tuples(positive, positive), min_size=2, max_size=10)
estimators = st.sampled_from(["robust", "mean"])


def mean_of(differences, confidence=0.95, positions=None, slope=None) -> RatioEstimate:
    return estimate_paired(differences, confidence, positions, slope=slope, estimator="mean")


def test_the_paired_interval_is_that_of_a_one_sample_t_test():
    estimate = mean_of(DIFFERENCES, 0.9)
    reference = stats.ttest_1samp(DIFFERENCES, 0).confidence_interval(0.9)
    assert estimate.log_ratio == pytest.approx(np.mean(DIFFERENCES))
    assert estimate.log_interval == pytest.approx((reference.low, reference.high))
    assert estimate.ratio == pytest.approx(math.exp(np.mean(DIFFERENCES)))
    assert estimate.is_paired


def test_the_unpaired_ratio_is_the_median_shift_and_its_test_is_that_of_mann_and_whitney():
    estimate = unpaired_ratio(A, B, 0.95).estimate
    shifts = np.subtract.outer(np.log(B), np.log(A)).ravel()
    assert estimate.log_ratio == pytest.approx(np.median(shifts))
    assert estimate.p_value == pytest.approx(stats.mannwhitneyu(A, B, method="exact").pvalue)
    welch = stats.ttest_ind(np.log(B), np.log(A), equal_var=False)
    assert estimate.uncertainty.degrees_of_freedom == pytest.approx(welch.df)
    assert (estimate.method, estimate.is_paired, estimate.num_blocks) == ("hodges-lehmann", False, 4)


@given(st.integers(2, 7), st.integers(2, 7), st.sampled_from([0.8, 0.9, 0.95, 0.99]))
def test_the_unpaired_interval_is_where_the_rank_test_does_not_refuse(num_a, num_b, confidence):
    stream = random.Random(f"{num_a} {num_b}")
    a = [math.exp(stream.gauss(0, 0.1)) for _ in range(num_a)]
    b = [math.exp(stream.gauss(0.1, 0.1)) for _ in range(num_b)]
    interval = unpaired_ratio(a, b, confidence).estimate.log_interval
    least_p = 2 / math.comb(num_a + num_b, num_a)
    if least_p > 1 - confidence:
        assert interval is None
        return
    for end, outward in zip(interval, (-1, 1), strict=True):
        for nudge, is_refused in ((1e-9 * outward, True), (-1e-9 * outward, False)):
            shifted = [value / math.exp(end + nudge) for value in b]
            p = stats.mannwhitneyu(a, shifted, method="exact").pvalue
            assert (p <= 1 - confidence) == is_refused


@given(st.lists(st.integers(1, 30), min_size=2, max_size=9), st.lists(st.integers(1, 30), min_size=2, max_size=9))
def test_the_rank_test_is_scipys_and_a_tie_counts_against_a_difference(a, b):
    p_value = unpaired_ratio(a, b).estimate.p_value
    nudged = [stats.mannwhitneyu(a, [v * f for v in b], method="exact").pvalue for f in (0.999, 1.001)]
    if set(a).isdisjoint(b):
        assert p_value == pytest.approx(nudged[0], abs=1e-12)
    assert p_value >= max(nudged) - 1e-12


def test_the_position_in_the_block_is_taken_out_by_least_squares():
    positions = (1, -1, 1, -1, 3, -2)
    estimate = mean_of(DIFFERENCES, positions=positions)
    line = stats.linregress(positions, DIFFERENCES)
    assert estimate.log_ratio == pytest.approx(line.intercept)
    assert estimate.position_effect == pytest.approx(line.slope)
    assert estimate.standard_error == pytest.approx(line.intercept_stderr)
    assert estimate.uncertainty.degrees_of_freedom == 4


@given(st.floats(-0.1, 0.1), st.floats(-0.05, 0.05))
def test_a_drift_inside_the_blocks_neither_shifts_nor_widens_the_interval(change, drift):
    still, drifting = (drifting_by(effect, change, "mean") for effect in (0.0, drift))
    assert drifting.log_interval == pytest.approx(still.log_interval, abs=1e-7)


@given(st.floats(-0.1, 0.1), st.floats(-0.2, 0.2))
def test_a_drift_inside_the_blocks_hardly_touches_the_robust_interval(change, drift):
    still, drifting = (drifting_by(effect, change, "robust") for effect in (0.0, drift))
    assert drifting.log_ratio == pytest.approx(still.log_ratio, abs=0.1 * still.half_width)
    assert drifting.half_width < 1.25 * still.half_width


def drifting_by(drift, change, estimator):
    """Eight blocks with a scatter of 1 %, in which a run is slower by ``drift`` than the one before it."""
    positions = (1, -1, 1, -1, 1, -1, 1, -1)
    noise = (0.01, -0.02, 0.005, 0.0, 0.013, -0.004, 0.002, -0.006)
    differences = [change + e + drift * x for e, x in zip(noise, positions, strict=True)]
    return estimate_paired(differences, positions=positions, estimator=estimator)


def test_positions_that_never_vary_or_few_blocks_leave_the_estimate_as_it_is():
    plain = estimate_paired(DIFFERENCES)
    assert estimate_paired(DIFFERENCES, positions=(1,) * 6) == plain
    assert estimate_paired(DIFFERENCES[:5], positions=(1, -1, 1, -1, 1)) == estimate_paired(DIFFERENCES[:5])


@given(st.floats(-0.02, 0.02), st.lists(st.integers(-5, 5), min_size=8, max_size=8), estimators)
def test_a_pooled_slope_takes_its_own_effect_out_of_every_block(slope, positions, estimator):
    noise = (0.01, -0.02, 0.005, 0.0, 0.013, -0.004, 0.002, -0.006)
    with_effect = [e + slope * x for e, x in zip(noise, positions, strict=True)]
    still = estimate_paired(noise, positions=positions, slope=PooledSlope(0.0, 200.0), estimator=estimator)
    shifted = estimate_paired(
        with_effect, positions=positions, slope=PooledSlope(slope, 200.0), estimator=estimator
    )
    assert shifted.log_interval == pytest.approx(still.log_interval, abs=1e-7)
    assert shifted.log_ratio == pytest.approx(still.log_ratio, abs=1e-9)


def test_a_slope_pooled_from_the_two_arms_alone_is_the_analysis_of_covariance():
    positions = (1, -1, 1, -1, 3, -2)
    own = mean_of(DIFFERENCES, positions=positions)
    squares = float(np.sum((np.array(positions) - np.mean(positions)) ** 2))
    pooled = mean_of(DIFFERENCES, positions=positions, slope=PooledSlope(own.position_effect, squares / 2))
    assert pooled.log_interval == pytest.approx(own.log_interval)
    assert pooled.uncertainty.degrees_of_freedom == pytest.approx(4)


@given(st.lists(st.floats(-0.2, 0.2), min_size=6, max_size=20), st.booleans(), estimators)
def test_the_ratio_is_the_weighted_mean_of_the_blocks_at_equal_positions(differences, is_ordered, estimator):
    positions = [(-1) ** i * (1 + i % 3) for i in range(len(differences))] if is_ordered else None
    estimate = estimate_paired(differences, positions=positions, estimator=estimator)
    effect = estimate.position_effect or 0.0
    shifted = [d - effect * x for d, x in zip(differences, positions or [0] * len(differences), strict=True)]
    assert sum(estimate.block_weights) == pytest.approx(1)
    assert estimate.log_ratio == pytest.approx(np.dot(estimate.block_weights, differences), abs=1e-9)
    assert [d - r for d, r in zip(shifted, estimate.residuals, strict=True)] == pytest.approx(
        [estimate.log_ratio] * len(shifted), abs=1e-9
    )


@given(st.lists(st.floats(-0.1, 0.1), min_size=2, max_size=9), st.floats(0, 0.05))
def test_a_verdict_is_given_at_its_own_p_value_and_not_at_a_smaller_one(differences, margin):
    estimate, margins = mean_of(differences), margins_of(margin)
    alpha = decision_alpha(estimate, margins)
    if abs(abs(estimate.log_ratio) - math.log1p(margin)) < 1e-6 or alpha < 1e-9:
        return
    assert verdict_of(estimate.interval_at(1 - alpha * 1.001), margins, "none") != "inconclusive"
    assert verdict_of(estimate.interval_at(1 - alpha * 0.999), margins, "none") == "inconclusive"
    distance = abs(abs(estimate.log_ratio) - math.log1p(margin))
    p = 2 * stats.t.sf(distance / estimate.standard_error, estimate.uncertainty.degrees_of_freedom)
    assert alpha == pytest.approx(p, rel=1e-3)


@pytest.mark.parametrize(("df", "value"), [(2, 4.302653), (4, 2.776445), (7, 2.364624), (19, 2.093024)])
def test_t_quantiles_are_those_of_the_tables(df, value):
    assert t_quantile(0.975, df) == pytest.approx(value, abs=1e-6)


@given(st.lists(st.floats(-0.2, 0.2), min_size=2, max_size=18), st.booleans(), estimators)
def test_an_interval_excludes_no_change_just_where_p_is_below_its_alpha(differences, is_ordered, estimator):
    positions = [(-1) ** i for i in range(len(differences))] if is_ordered else None
    estimate = estimate_paired(differences, positions=positions, estimator=estimator)
    p_value = estimate.p_value
    if not 1e-6 < p_value < 0.99:
        return
    for alpha, excludes in ((min(1.001 * p_value, 0.999), True), (0.999 * p_value, False)):
        low, high = estimate.interval_at(1 - alpha)
        assert (low > 0 or high < 0) == excludes


@given(
    st.lists(positive, min_size=2, max_size=9), st.lists(positive, min_size=2, max_size=9), st.floats(0.5, 0.999)
)
def test_without_pairs_an_interval_excludes_no_change_just_where_p_is_at_most_its_alpha(a, b, confidence):
    estimate = unpaired_ratio(a, b).estimate
    interval = estimate.interval_at(confidence)
    excludes = interval is not None and (interval[0] > 0 or interval[1] < 0)
    if abs(estimate.p_value - (1 - confidence)) > 1e-9:
        assert excludes == (estimate.p_value < 1 - confidence)


def test_p_of_the_mean_is_that_of_the_t_test_and_knows_the_positions():
    assert mean_of(DIFFERENCES).p_value == pytest.approx(stats.ttest_1samp(DIFFERENCES, 0).pvalue)
    positions = (1, -1, 1, -1, 3, -2)
    line = stats.linregress(positions, DIFFERENCES)
    p = 2 * stats.t.sf(line.intercept / line.intercept_stderr, 4)
    assert mean_of(DIFFERENCES, positions=positions).p_value == pytest.approx(p)


def test_blocks_that_do_not_differ_have_p_one_and_an_interval_of_no_width():
    estimate = estimate_paired((0.0, 0.0, 0.0))
    assert estimate.p_value == 1
    assert (estimate.ci_low, estimate.ratio, estimate.ci_high) == (1, 1, 1)
    assert estimate.minimum_detectable_effect == 0


def test_sides_that_do_not_scatter_are_told_apart_without_dividing_by_zero():
    assert unpaired_ratio((2.0,) * 4, (3.0,) * 4).estimate.p_value < 0.05
    assert unpaired_ratio((2.0,) * 4, (3.0,) * 4).estimate.ci_low == pytest.approx(1.5)
    assert unpaired_ratio((2.0, 2.0), (2.0, 2.0)).estimate.p_value == 1


@pytest.mark.parametrize("estimate", [estimate_paired((0.5,)), unpaired_ratio((1.0,), (2.0, 3.0)).estimate])
def test_one_block_tells_a_ratio_and_nothing_else(estimate):
    assert estimate.ratio > 1
    assert estimate.ci_low is estimate.ci_high is estimate.p_value is estimate.minimum_detectable_effect is None


@given(blocks)
def test_swapping_the_sides_turns_the_ratio_round(pairs):
    a, b = zip(*pairs, strict=True)
    forth, back = estimate_paired(log_ratios(a, b)), estimate_paired(log_ratios(b, a))
    assert forth.ratio * back.ratio == pytest.approx(1)
    assert forth.ci_low * back.ci_high == pytest.approx(1)
    assert forth.p_value == pytest.approx(back.p_value)


@given(blocks, positive)
def test_the_unit_of_measurement_changes_nothing(pairs, factor):
    a, b = zip(*pairs, strict=True)
    scaled = log_ratios([factor * value for value in a], [factor * value for value in b])
    assert estimate_paired(scaled).log_ratio == pytest.approx(estimate_paired(log_ratios(a, b)).log_ratio, abs=1e-7)
    before, after = (
        unpaired_ratio(a, b).estimate,
        unpaired_ratio([factor * v for v in a], [factor * v for v in b]).estimate,
    )
    assert after.log_ratio == pytest.approx(before.log_ratio, abs=1e-9)
    assert after.standard_error == pytest.approx(before.standard_error, abs=1e-9)


@given(blocks)
def test_the_ratio_lies_inside_its_interval(pairs):
    a, b = zip(*pairs, strict=True)
    for estimate in (estimate_paired(log_ratios(a, b)), unpaired_ratio(a, b).estimate):
        assert 0 <= estimate.p_value <= 1
        if estimate.ci_low is not None:
            assert estimate.ci_low <= estimate.ratio <= estimate.ci_high


@given(blocks, st.floats(0.5, 2))
def test_a_factor_common_to_a_block_leaves_the_paired_ratio_alone(pairs, factor):
    a, b = zip(*pairs, strict=True)
    shaken = log_ratios((a[0] * factor, *a[1:]), (b[0] * factor, *b[1:]))
    assert shaken == pytest.approx(log_ratios(a, b), abs=1e-9)


@pytest.mark.parametrize("num_blocks", [3, 5, 8])
def test_an_interval_of_95_per_cent_covers_the_truth_95_times_in_a_hundred(num_blocks):
    stream, truth, trials = random.Random(f"coverage of {num_blocks}"), 0.03, 3000
    covered = 0
    for _ in range(trials):
        low, high = estimate_paired([stream.gauss(truth, 0.02) for _ in range(num_blocks)]).log_interval
        covered += low <= truth <= high
    assert covered / trials == pytest.approx(0.95, abs=0.012)


def test_the_unpaired_interval_covers_the_truth():
    stream, trials = random.Random("ranks"), 2000
    covered = 0
    for _ in range(trials):
        a = [math.exp(stream.gauss(0, 0.1)) for _ in range(6)]
        b = [math.exp(stream.gauss(0.5, 0.1)) for _ in range(8)]
        low, high = unpaired_ratio(a, b).estimate.log_interval
        covered += low <= 0.5 <= high
    assert covered / trials == pytest.approx(0.957, abs=0.015)


def test_the_detectable_effect_is_the_one_that_these_blocks_show_four_times_in_five():
    n = len(DIFFERENCES)
    both = stats.t.ppf(0.975, n - 1) + stats.t.ppf(0.8, n - 1)
    expected = math.exp(both * np.std(DIFFERENCES, ddof=1) / math.sqrt(n)) - 1
    assert mean_of(DIFFERENCES).minimum_detectable_effect == pytest.approx(expected)


@pytest.mark.parametrize(("log_sd", "change", "blocks"), [(0.005, 0.05, 6), (0.01, 0.02, 6), (0.02, 0.02, 12)])
def test_a_plan_says_which_change_so_many_blocks_can_show(log_sd, change, blocks):
    assert blocks_to_detect(change, log_sd) == blocks
    assert minimum_detectable_effect(log_sd, blocks) <= change
    assert minimum_detectable_effect(log_sd, blocks, num_tests=15) > minimum_detectable_effect(log_sd, blocks)
    assert minimum_detectable_effect(log_sd, blocks, margin_frac=0.01) > minimum_detectable_effect(log_sd, blocks)


def test_a_planned_change_is_found_four_times_in_five():
    stream, trials, n, sd = random.Random("plan"), 2000, 8, 0.02
    change = minimum_detectable_effect(sd, n, margin_frac=0.01)
    num_detected = 0
    for _ in range(trials):
        differences = [math.log1p(change) + stream.gauss(0, sd) for _ in range(n)]
        estimate = estimate_paired(differences, positions=[(-1) ** i for i in range(n)])
        num_detected += verdict_of(estimate.log_interval, margins_of(0.01), "lower") == "regression"
    assert num_detected / trials == pytest.approx(0.8, abs=0.04)
