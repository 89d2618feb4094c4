"""Estimates over blocks: agreement with scipy, and their laws.

The robust estimate: blocks that lie far off count little, and its interval is worth its name.
"""

import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st
from scipy import stats

from benchctl.analysis.compare.decide import (
    blocks_to_detect,
    decision_alpha,
    margins_of,
    minimum_detectable_effect,
    verdict_of,
)
from benchctl.analysis.statistics import robust
from benchctl.analysis.statistics.estimate import (
    PooledSlope,
    RatioEstimate,
    estimate_paired,
    log_ratios,
    unpaired_ratio,
)
from benchctl.analysis.statistics.intervals import order_effects, outlier_indices
from benchctl.analysis.statistics.robust import (
    PositionCovariate,
    alpha_of,
    calibration_of,
    credibility_of,
    estimate_mixture,
)

DIFFERENCES = (0.010, 0.014, 0.008, 0.021, -0.002, 0.016)
POSITIONS = (1, -1, 1, -1, 3, -2)
NOISE = (0.01, -0.02, 0.005, 0.0, 0.013, -0.004, 0.002, -0.006)
A = (10.0, 11.0, 10.5, 9.8)
B = (12.0, 12.5, 12.2, 13.0, 11.9)

positive = st.floats(0.01, 100)
blocks = st.lists(st.tuples(positive, positive), min_size=3, max_size=10)
estimators = st.sampled_from(["robust", "mean"])


def mean_of(differences, confidence=0.95, positions=None, slope=None) -> RatioEstimate:
    return estimate_paired(differences, confidence, positions, slope=slope, estimator="mean")


def test_the_paired_mean_is_that_of_a_one_sample_t_test():
    estimate, test = mean_of(DIFFERENCES, 0.9), stats.ttest_1samp(DIFFERENCES, 0)
    assert (estimate.log_ratio, *estimate.log_interval) == pytest.approx(
        (np.mean(DIFFERENCES), *test.confidence_interval(0.9))
    )
    assert estimate.ratio == pytest.approx(math.exp(np.mean(DIFFERENCES)))
    assert (estimate.p_value, estimate.is_paired) == (pytest.approx(test.pvalue), True)
    both = stats.t.ppf(0.975, 5) + stats.t.ppf(0.8, 5)
    detectable = math.exp(both * np.std(DIFFERENCES, ddof=1) / math.sqrt(6)) - 1
    assert mean_of(DIFFERENCES).minimum_detectable_effect == pytest.approx(detectable)


def test_the_position_in_the_block_is_taken_out_by_least_squares():
    estimate, line = mean_of(DIFFERENCES, positions=POSITIONS), stats.linregress(POSITIONS, DIFFERENCES)
    assert (estimate.log_ratio, estimate.position_effect, estimate.standard_error) == pytest.approx(
        (line.intercept, line.slope, line.intercept_stderr)
    )
    assert estimate.uncertainty.degrees_of_freedom == 4
    assert estimate.p_value == pytest.approx(2 * stats.t.sf(line.intercept / line.intercept_stderr, 4))


def test_a_slope_pooled_from_the_two_arms_alone_is_the_analysis_of_covariance():
    own = mean_of(DIFFERENCES, positions=POSITIONS)
    slope = PooledSlope(own.position_effect, len(POSITIONS) * np.var(POSITIONS) / 2)
    pooled = mean_of(DIFFERENCES, positions=POSITIONS, slope=slope)
    assert pooled.log_interval == pytest.approx(own.log_interval)
    assert pooled.uncertainty.degrees_of_freedom == pytest.approx(4)


def test_positions_that_never_vary_or_few_blocks_leave_the_estimate_as_it_is():
    assert estimate_paired(DIFFERENCES, positions=(1,) * 6) == estimate_paired(DIFFERENCES)
    few = estimate_paired(DIFFERENCES[:5])
    assert estimate_paired(DIFFERENCES[:5], positions=(1, -1, 1, -1, 1)) == few == mean_of(DIFFERENCES[:5])


@given(st.floats(-0.1, 0.1), st.floats(-0.2, 0.2))
def test_a_drift_inside_the_blocks_leaves_the_mean_alone_and_hardly_touches_the_robust_interval(change, drift):
    def drifting_by(slope, estimator):
        """Eight blocks with a scatter of 1 %, in which a run is slower by ``slope`` than the one before it."""
        differences = [change + noise + slope * (-1) ** i for i, noise in enumerate(NOISE)]
        return estimate_paired(differences, positions=(1, -1) * 4, estimator=estimator)

    mean, shifted_mean = (drifting_by(slope, "mean") for slope in (0.0, drift / 4))
    assert shifted_mean.log_interval == pytest.approx(mean.log_interval, abs=1e-7)
    robust, shifted = (drifting_by(slope, "robust") for slope in (0.0, drift))
    assert shifted.log_ratio == pytest.approx(robust.log_ratio, abs=0.1 * robust.half_width)
    assert shifted.half_width < 1.25 * robust.half_width


@given(st.floats(-0.02, 0.02), st.lists(st.integers(-5, 5), min_size=8, max_size=8), estimators)
def test_a_pooled_slope_takes_its_own_effect_out_of_every_block(slope, positions, estimator):
    with_effect = [e + slope * x for e, x in zip(NOISE, positions, strict=True)]
    still, shifted = (
        estimate_paired(values, positions=positions, slope=PooledSlope(taken_out, 200.0), estimator=estimator)
        for values, taken_out in ((NOISE, 0.0), (with_effect, slope))
    )
    assert shifted.log_interval == pytest.approx(still.log_interval, abs=1e-7)
    assert shifted.log_ratio == pytest.approx(still.log_ratio, abs=1e-9)


@given(st.lists(st.floats(-0.2, 0.2), min_size=6, max_size=20), st.booleans(), estimators)
def test_the_ratio_is_the_weighted_mean_of_the_blocks_at_equal_positions(differences, is_ordered, estimator):
    positions = [is_ordered * (-1) ** i * (1 + i % 3) for i in range(len(differences))]
    estimate = estimate_paired(differences, positions=positions, estimator=estimator)
    shifted = np.array(differences) - (estimate.position_effect or 0.0) * np.array(positions)
    assert sum(estimate.block_weights) == pytest.approx(1)
    assert estimate.log_ratio == pytest.approx(np.dot(estimate.block_weights, differences), abs=1e-9)
    assert shifted - estimate.residuals == pytest.approx(estimate.log_ratio, abs=1e-9)


@given(st.lists(st.floats(-0.2, 0.2), min_size=3, max_size=18), st.booleans(), estimators)
def test_an_interval_excludes_no_change_just_where_p_is_below_its_alpha(differences, is_ordered, estimator):
    positions = [(-1) ** i for i in range(len(differences))] if is_ordered else None
    estimate = estimate_paired(differences, positions=positions, estimator=estimator)
    assume(1e-6 < estimate.p_value < 0.99)
    for factor, excludes in ((1.001, True), (0.999, False)):
        low, high = estimate.interval_at(1 - min(factor * estimate.p_value, 0.999))
        assert (low > 0 or high < 0) == excludes


@given(st.lists(st.floats(-0.1, 0.1), min_size=3, max_size=9), st.floats(0, 0.05))
def test_a_verdict_is_given_at_its_own_p_value_and_not_at_a_smaller_one(differences, margin):
    estimate, margins = mean_of(differences), margins_of(margin)
    alpha = decision_alpha(estimate, margins)
    distance = abs(abs(estimate.log_ratio) - math.log1p(margin))
    assume(distance >= 1e-6 and alpha >= 1e-9)
    for factor, is_open in ((1.001, False), (0.999, True)):
        assert (verdict_of(estimate.interval_at(1 - alpha * factor), margins, "none") == "inconclusive") is is_open
    p = 2 * stats.t.sf(distance / estimate.standard_error, estimate.uncertainty.degrees_of_freedom)
    assert alpha == pytest.approx(p, rel=1e-3)


def test_the_unpaired_ratio_is_the_median_shift_and_its_test_is_that_of_mann_and_whitney():
    estimate, ranks = unpaired_ratio(A, B, 0.95).estimate, stats.mannwhitneyu(A, B, method="exact")
    shift, welch = (
        np.median(np.subtract.outer(np.log(B), np.log(A))),
        stats.ttest_ind(np.log(B), np.log(A), equal_var=False),
    )
    found = (estimate.log_ratio, estimate.p_value, estimate.uncertainty.degrees_of_freedom)
    assert found == pytest.approx((shift, ranks.pvalue, welch.df))
    assert (estimate.method, estimate.is_paired, estimate.num_blocks) == ("hodges-lehmann", False, 4)


@settings(max_examples=40)
@given(st.integers(2, 7), st.integers(2, 7), st.sampled_from([0.8, 0.9, 0.95, 0.99]))
def test_the_unpaired_interval_is_where_the_rank_test_does_not_refuse(num_a, num_b, confidence):
    stream = np.random.default_rng([num_a, num_b])
    a, b = np.exp(stream.normal(0, 0.1, num_a)), np.exp(stream.normal(0.1, 0.1, num_b))
    interval = unpaired_ratio(a.tolist(), b.tolist(), confidence).estimate.log_interval
    if 2 / math.comb(num_a + num_b, num_a) > 1 - confidence:  # the least p of so few values
        assert interval is None
        return
    for end, outward in zip(interval, (-1, 1), strict=True):
        for nudge, is_refused in ((1e-9 * outward, True), (-1e-9 * outward, False)):
            p = stats.mannwhitneyu(a, b / math.exp(end + nudge), method="exact").pvalue
            assert (p <= 1 - confidence) == is_refused


@settings(max_examples=60)
@given(st.lists(st.integers(1, 30), min_size=2, max_size=9), st.lists(st.integers(1, 30), min_size=2, max_size=9))
def test_the_rank_test_is_scipys_and_a_tie_counts_against_a_difference(a, b):
    estimate = unpaired_ratio(a, b).estimate
    nudged = [stats.mannwhitneyu(a, [v * f for v in b], method="exact").pvalue for f in (0.999, 1.001)]
    if set(a).isdisjoint(b):
        assert estimate.p_value == pytest.approx(nudged[0], abs=1e-12)
    assert estimate.p_value >= max(nudged) - 1e-12
    interval = estimate.interval_at(0.9)
    if abs(estimate.p_value - 0.1) > 1e-9:
        assert (interval is not None and not interval[0] <= 0 <= interval[1]) == (estimate.p_value < 0.1)


def test_blocks_that_do_not_scatter_are_told_apart_or_equal_without_dividing_by_zero():
    same, apart = estimate_paired((0.0, 0.0, 0.0)), unpaired_ratio((2.0,) * 4, (3.0,) * 4).estimate
    assert (same.p_value, same.ci_low, same.ratio, same.ci_high, same.minimum_detectable_effect) == (1, 1, 1, 1, 0)
    assert (apart.p_value < 0.05, apart.ci_low) == (True, pytest.approx(1.5))
    assert unpaired_ratio((2.0, 2.0), (2.0, 2.0)).estimate.p_value == 1


@pytest.mark.parametrize("estimate", [estimate_paired((0.5,)), unpaired_ratio((1.0,), (2.0, 3.0)).estimate])
def test_one_block_tells_a_ratio_and_nothing_else(estimate):
    assert estimate.ratio > 1
    assert estimate.ci_low is estimate.ci_high is estimate.p_value is estimate.minimum_detectable_effect is None


@given(blocks, positive)
def test_sides_can_be_swapped_and_units_and_what_a_block_has_in_common_changes_nothing(pairs, factor):
    a, b = zip(*pairs, strict=True)
    forth, back = estimate_paired(log_ratios(a, b)), estimate_paired(log_ratios(b, a))
    assert (forth.ratio * back.ratio, forth.ci_low * back.ci_high) == pytest.approx((1, 1))
    assert forth.p_value == pytest.approx(back.p_value)
    shaken = log_ratios((a[0] * factor, *a[1:]), (b[0] * factor, *b[1:]))
    assert shaken == pytest.approx(log_ratios(a, b), abs=1e-9)
    before = unpaired_ratio(a, b).estimate
    after = unpaired_ratio([factor * v for v in a], [factor * v for v in b]).estimate
    shift = (before.log_ratio, before.standard_error)
    assert (after.log_ratio, after.standard_error) == pytest.approx(shift, abs=1e-9)
    for estimate in (forth, before):
        assert 0 <= estimate.p_value <= 1
        assert estimate.ci_low is None or estimate.ci_low <= estimate.ratio <= estimate.ci_high


@pytest.mark.parametrize(("log_sd", "change", "blocks"), [(0.005, 0.05, 6), (0.01, 0.02, 6), (0.02, 0.02, 12)])
def test_a_plan_says_which_change_so_many_blocks_can_show(log_sd, change, blocks):
    assert blocks_to_detect(change, log_sd) == blocks
    least, of_many, beyond_margin = (
        minimum_detectable_effect(log_sd, blocks, **options)
        for options in ({}, {"num_tests": 15}, {"margin_frac": 0.01})
    )
    assert least <= change
    assert least < min(of_many, beyond_margin)


def test_a_planned_change_is_found_four_times_in_five():
    stream, num_detected, n, sd = np.random.default_rng(1), 0, 8, 0.02
    change = minimum_detectable_effect(sd, n, margin_frac=0.01)
    for differences in stream.normal(math.log1p(change), sd, size=(500, n)).tolist():
        estimate = estimate_paired(differences, positions=[(-1) ** i for i in range(n)])
        num_detected += verdict_of(estimate.log_interval, margins_of(0.01), "lower") == "regression"
    assert num_detected / 500 == pytest.approx(0.8, abs=0.04)


logs = st.lists(st.floats(-1, 1).map(lambda value: round(value, 6)), min_size=6, max_size=6)
NUMBERS = (0, 1, 2, 4, 5, 6)


@given(logs, logs)
def test_slopes_over_positions_and_blocks_are_those_of_ordinary_least_squares(a, b):
    effects = order_effects(a, b, NUMBERS, POSITIONS)
    differences, levels = np.subtract(b, a), np.add(b, a) / 2
    for slope, x, y in (
        (effects.position, POSITIONS, differences),
        (effects.ratio_drift, NUMBERS, differences),
        (effects.machine_drift, NUMBERS, levels),
    ):
        if np.ptp(y) >= 1e-9:
            line = stats.linregress(x, y)
            assert slope.log_per_unit == pytest.approx(line.slope, abs=1e-12)
            assert slope.standard_error == pytest.approx(line.stderr, abs=1e-9)
            assert slope.p_value == pytest.approx(line.pvalue, abs=1e-6)


def test_a_drift_without_scatter_is_certain_and_what_never_varies_or_is_too_short_has_no_slope():
    line = [0.01 * number for number in NUMBERS]
    drift = order_effects(line, line, NUMBERS, None)
    machine = drift.machine_drift
    assert (machine.log_per_unit, machine.p_value) == pytest.approx((0.01, 0), abs=1e-12)
    assert (drift.position, drift.ratio_drift) == (None, None)
    same = order_effects([0.0] * 6, [1.0] * 6, NUMBERS, (1,) * 6)
    short = order_effects([0.0, 0.1, 0.0], [0.2, 0.0, 0.1], (0, 1, 2), (1, -1, 1))
    for effects in (same, short):
        assert (effects.position, effects.ratio_drift, effects.machine_drift) == (None, None, None)


CLEAN = (0.010, 0.014, 0.008, 0.021, -0.002, 0.016, 0.005, 0.012)
ALTERNATING = (1, -1, 1, -1, 1, -1, 1, -1)
data_sets = st.lists(st.floats(-0.3, 0.3), min_size=6, max_size=14)


def exact_mixture(d, x):
    """Centres, scales and shares over all choices and both slopes, each by weighted least squares written out."""
    n, choices = len(d), []
    for is_far, (slope_sd, most) in itertools.product(
        itertools.product([False, True], repeat=n), ((0.5, (n - 1) // 2 - 1), (30.0, (n - 1) // 2 - 2))
    ):
        if sum(is_far) > most:
            continue
        design = np.vstack([np.column_stack([np.ones(n), x]), [0, 1]])  # the last row is the prior of the slope
        weights = np.append(np.where(is_far, 1 / 256, 1.0), np.mean(x**2) / slope_sd**2)
        values, information = np.append(d, 0.0), design.T @ (weights[:, None] * design)
        beta = np.linalg.solve(information, design.T @ (weights * values))
        rss, df = float(np.sum(weights * (values - design @ beta) ** 2)), n - 1
        log_share = sum(is_far) * math.log(0.25 / 16) - math.log(slope_sd)
        log_share -= np.linalg.slogdet(information)[1] / 2 + df / 2 * math.log(rss)
        choices.append((beta[0], math.sqrt(rss / df * np.linalg.inv(information)[0, 0]), log_share))
    centres, scales, logs = map(np.array, zip(*choices, strict=True))
    shares = np.exp(logs - logs.max())
    return centres, scales, shares / shares.sum()


def test_the_mixture_is_that_of_weighted_least_squares_over_every_choice_of_outliers(monkeypatch):
    monkeypatch.setattr(robust, "_NEGLIGIBLE", 0.0)
    d, x = np.array([*CLEAN[:6], 0.3, 0.012]), np.array(ALTERNATING, dtype=float)
    centres, scales, shares = exact_mixture(d, x)
    mixture, block_weights, _ = estimate_mixture(d, PositionCovariate(x))
    for value in (-0.02, 0.0, 0.01, 0.05):
        expected = float(shares @ stats.t.cdf((value - centres) / scales, 7))
        assert mixture.below(value) == pytest.approx(expected, abs=1e-9)
    assert block_weights @ d == pytest.approx(float(shares @ centres))


def test_a_block_far_off_hardly_moves_the_ratio_and_the_mean_follows_it():
    shaken = [*CLEAN[:7], 0.3]
    robust, mean = (estimate_paired(shaken, positions=ALTERNATING, estimator=name) for name in ("robust", "mean"))
    assert robust.log_ratio == pytest.approx(estimate_paired(CLEAN).log_ratio, abs=0.004)
    assert mean.log_ratio > 0.04
    assert robust.block_weights[7] < 0.01
    assert robust.p_value < 0.05 < mean.p_value
    for far, outliers in ((math.log(1.5), (4,)), (0.0105, ())):
        assert outlier_indices([0.01, 0.012, 0.009, 0.011, far, 0.010]) == outliers


@pytest.mark.parametrize("positions", [None, ALTERNATING])
def test_two_of_eight_blocks_may_lie_far_off_and_five_do_not_outvote_three(positions):
    two = [d + (0.26 * (-1) ** i if i < 2 else 0.0) for i, d in enumerate(CLEAN)]
    three = [d + (-0.26 if i < 3 else 0.0) for i, d in enumerate(CLEAN)]
    assert estimate_paired(two).log_ratio == pytest.approx(np.mean(CLEAN[2:]), abs=0.005)
    assert estimate_paired(three, positions=positions).log_interval[0] < 0


def test_without_outliers_the_estimate_is_nearly_the_mean():
    normal = estimate_paired((stats.norm.ppf((np.arange(8) + 0.5) / 8) * 0.02 + 0.03).tolist())
    assert normal.log_ratio == pytest.approx(0.03, abs=1e-6)
    assert np.std(normal.block_weights) < 0.04


@given(data_sets, st.floats(-1, 1), st.floats(0.01, 100))
def test_shifting_and_stretching_the_differences_does_so_to_the_interval(differences, shift, factor):
    assume(np.ptp(differences) >= 1e-3)
    expected = [shift + factor * end for end in estimate_paired(differences).log_interval]
    shifted = estimate_paired([shift + factor * d for d in differences])
    assert shifted.log_interval == pytest.approx(expected, abs=1e-5 * factor, rel=1e-5)


@given(data_sets, st.floats(0.5, 0.99), st.floats(0.001, 0.4))
def test_an_interval_of_higher_confidence_holds_that_of_lower(differences, confidence, more):
    estimate = estimate_paired(differences)
    (low, high), (wider_low, wider_high) = map(
        estimate.interval_at, (confidence, confidence + (1 - confidence) * more)
    )
    rounding = 1e-8 * (1 + abs(high - low))
    assert wider_low - rounding <= low <= high <= wider_high + rounding


@given(st.floats(1e-9, 1), st.integers(6, 80), st.floats(0, 1))
def test_credibility_and_alpha_are_each_others_inverse(alpha, num_blocks, own_share):
    calibration = calibration_of(num_blocks, own_share)
    assert alpha_of(credibility_of(alpha, calibration), calibration) == pytest.approx(alpha, rel=1e-6)


@pytest.mark.parametrize(
    ("has_positions", "num_blocks", "trials"),
    [(False, 6, 2000), (True, 6, 2000), (True, 11, 700)]
    + [
        pytest.param(*case, 2000, marks=pytest.mark.nightly)
        for case in ((False, 8), (True, 8), (False, 11), (True, 11))
    ],
)
def test_the_interval_of_normal_noise_covers_as_it_says(has_positions, num_blocks, trials):
    stream = np.random.default_rng([3, num_blocks, has_positions])
    x = np.array([(-1.0) ** i for i in range(num_blocks)])
    covariate = PositionCovariate(x) if has_positions else None
    data_sets = stream.normal(size=(trials, num_blocks))
    below = np.array([estimate_mixture(data_set, covariate)[0].below(0.0) for data_set in data_sets])
    calibration = calibration_of(num_blocks, float(has_positions))
    for alpha in (0.05, 0.01):
        missed = np.mean(2 * np.minimum(below, 1 - below) < credibility_of(alpha, calibration))
        assert 0.85 * alpha - 0.002 < missed < 1.2 * alpha + 0.004


def test_with_a_pooled_slope_the_interval_covers_although_the_positions_are_not_balanced():
    """Six arms in seven blocks of random orders; a drift of 1 % per position; one run in ten 30 % slower."""
    stream, missed, trials = np.random.default_rng(11), 0, 300
    for _ in range(trials):
        positions = np.array([stream.permutation(6) for _ in range(7)], dtype=float)
        logs = 0.01 * positions + 0.014 * stream.normal(size=(7, 6)) + 0.26 * (stream.random((7, 6)) < 0.1)
        left, rest = (v - v.mean(axis=0) - v.mean(axis=1, keepdims=True) + v.mean() for v in (positions, logs))
        slope = PooledSlope(float(np.sum(left * rest) / np.sum(left**2)), float(np.sum(left**2)))
        x, d = ((v[:, 3] - v[:, 0]).tolist() for v in (positions, logs))
        low, high = estimate_paired(d, positions=x, slope=slope).log_interval
        missed += not low <= 0 <= high
    assert stats.binom.sf(missed - 1, trials, 0.07) > 0.01
