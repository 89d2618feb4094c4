"""The robust estimate: blocks that lie far off count little, and its interval is worth its name."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from benchctl.analysis.statistics import robust
from benchctl.analysis.statistics.estimate import PooledSlope, estimate_paired
from benchctl.analysis.statistics.intervals import outlier_indices
from benchctl.analysis.statistics.robust import (
    PositionCovariate,
    alpha_of,
    calibration_of,
    credibility_of,
    estimate_mixture,
)

CLEAN = (0.010, 0.014, 0.008, 0.021, -0.002, 0.016, 0.005, 0.012)
POSITIONS = (1, -1, 1, -1, 1, -1, 1, -1)
data_sets = st.lists(st.floats(-0.3, 0.3), min_size=6, max_size=14)


def exact_mixture(d, x):
    """Centres, scales and shares over all choices and both slopes, each by weighted least squares written out."""
    n, choices = len(d), []
    for choice in range(2**n):
        is_far = np.array([choice >> i & 1 for i in range(n)], dtype=bool)
        w = np.where(is_far, 1 / 256, 1.0)
        for slope_sd, most in ((0.5, (n - 1) // 2 - 1), (30.0, (n - 1) // 2 - 2)):
            if is_far.sum() > most:
                continue
            design = np.vstack([np.column_stack([np.ones(n), x]), [0, 1]])  # the last row is the prior of the slope
            weights, values = np.append(w, np.mean(x**2) / slope_sd**2), np.append(d, 0.0)
            information = design.T @ (weights[:, None] * design)
            beta = np.linalg.solve(information, design.T @ (weights * values))
            rss = float(np.sum(weights * (values - design @ beta) ** 2))
            df = n - 1
            log_share = is_far.sum() * math.log(0.25 / 16) - math.log(slope_sd)
            log_share -= np.linalg.slogdet(information)[1] / 2 + df / 2 * math.log(rss)
            choices.append((beta[0], math.sqrt(rss / df * np.linalg.inv(information)[0, 0]), log_share))
    centres, scales, logs = map(np.array, zip(*choices, strict=True))
    shares = np.exp(logs - logs.max())
    return centres, scales, shares / shares.sum()


def test_the_mixture_is_that_of_weighted_least_squares_over_every_choice_of_outliers(monkeypatch):
    monkeypatch.setattr(robust, "_NEGLIGIBLE", 0.0)
    d, x = np.array([*CLEAN[:6], 0.3, 0.012]), np.array(POSITIONS, dtype=float)
    centres, scales, shares = exact_mixture(d, x)
    mixture, block_weights, _ = estimate_mixture(d, PositionCovariate(x))
    for value in (-0.02, 0.0, 0.01, 0.05):
        expected = float(shares @ stats.t.cdf((value - centres) / scales, 7))
        assert mixture.below(value) == pytest.approx(expected, abs=1e-9)
    assert block_weights @ d == pytest.approx(float(shares @ centres))


def test_a_block_far_off_hardly_moves_the_ratio_and_the_mean_follows_it():
    shaken = [*CLEAN[:7], 0.3]
    robust, mean = (estimate_paired(shaken, positions=POSITIONS, estimator=name) for name in ("robust", "mean"))
    assert robust.log_ratio == pytest.approx(estimate_paired(CLEAN).log_ratio, abs=0.004)
    assert mean.log_ratio > 0.04
    assert robust.block_weights[7] < 0.01
    assert robust.p_value < 0.05 < mean.p_value
    assert outlier_indices([0.01, 0.012, 0.009, 0.011, math.log(1.5), 0.010]) == (4,)
    assert outlier_indices([0.01, 0.012, 0.009, 0.011, 0.0105, 0.010]) == ()
    assert outlier_indices([0.0, 0.0, 0.0, 0.0, 9.0]) == ()


def test_two_of_eight_blocks_may_lie_far_off_and_five_do_not_outvote_three():
    two = [d + (0.26 * (-1) ** i if i < 2 else 0.0) for i, d in enumerate(CLEAN)]
    assert estimate_paired(two).log_ratio == pytest.approx(np.mean(CLEAN[2:]), abs=0.005)
    three = [d + (-0.26 if i < 3 else 0.0) for i, d in enumerate(CLEAN)]
    for positions in (None, POSITIONS):
        assert estimate_paired(three, positions=positions).log_interval[0] < 0


def test_without_outliers_the_estimate_is_nearly_the_mean():
    normal = estimate_paired((stats.norm.ppf((np.arange(8) + 0.5) / 8) * 0.02 + 0.03).tolist())
    assert normal.log_ratio == pytest.approx(0.03, abs=1e-6)
    assert np.std(normal.block_weights) < 0.04


@given(data_sets, st.floats(-1, 1), st.floats(0.01, 100))
def test_shifting_and_stretching_the_differences_does_so_to_the_interval(differences, shift, factor):
    if np.ptp(differences) < 1e-3:
        return
    plain = estimate_paired(differences)
    shifted = estimate_paired([shift + factor * d for d in differences])
    expected = [shift + factor * end for end in plain.log_interval]
    assert shifted.log_interval == pytest.approx(expected, abs=1e-5 * factor, rel=1e-5)


@given(data_sets, st.floats(0.5, 0.99), st.floats(0.001, 0.4))
def test_an_interval_of_higher_confidence_holds_that_of_lower(differences, confidence, more):
    estimate = estimate_paired(differences)
    low, high = estimate.interval_at(confidence)
    wider_low, wider_high = estimate.interval_at(confidence + (1 - confidence) * more)
    rounding = 1e-8 * (1 + abs(high - low))
    assert wider_low <= low + rounding
    assert high <= wider_high + rounding


@given(st.floats(1e-9, 1), st.integers(6, 80), st.floats(0, 1))
def test_credibility_and_alpha_are_each_others_inverse(alpha, num_blocks, own_share):
    calibration = calibration_of(num_blocks, own_share)
    assert alpha_of(credibility_of(alpha, calibration), calibration) == pytest.approx(alpha, rel=1e-6)


@pytest.mark.parametrize("num_blocks", [6, 8, 11])
@pytest.mark.parametrize("has_positions", [False, True])
def test_the_interval_of_normal_noise_covers_as_it_says(num_blocks, has_positions):
    stream, trials = np.random.default_rng([3, num_blocks, has_positions]), 2000
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
        information = float(np.sum(left**2))
        slope = PooledSlope(float(np.sum(left * rest)) / information, information)
        x = (positions[:, 3] - positions[:, 0]).tolist()
        low, high = estimate_paired((logs[:, 3] - logs[:, 0]).tolist(), positions=x, slope=slope).log_interval
        missed += not low <= 0 <= high
    assert stats.binom.sf(missed - 1, trials, 0.07) > 0.01
