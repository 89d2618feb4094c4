"""The start of a series and its trend: truncation by precision, and a test that knows autocorrelation."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from benchctl.analysis.statistics.trend import mser5, trend_of


def noise(seed, number, *, carried=0.0):
    """Values around 0 of variance 1, of which each carries a share of the one before."""
    draws = np.random.default_rng(seed).normal(size=number)
    for i in range(1, number):
        draws[i] = carried * draws[i - 1] + (1 - carried**2) ** 0.5 * draws[i]
    return draws


def test_a_planted_start_is_cut_and_hardly_anything_of_a_series_without_one():
    cuts, spared = [], []
    for seed in range(50):
        values = noise(seed, 400)
        spared.append(mser5(values, 20))
        values[:60] += 5
        cuts.append(mser5(values, 20))
    assert min(cuts) >= 60
    assert np.mean(cuts) < 100
    assert np.median(spared) <= 20


@given(st.integers(0, 1000), st.floats(-1e3, 1e3), st.sampled_from([-2.0, -1.0, 0.5, 3.0]))
def test_the_cut_depends_on_precision_and_not_on_the_value(seed, level, scale):
    values = noise(seed, 200)
    values[:25] += 3
    assert mser5(scale * values + level, 10) == mser5(values, 10)


def test_at_most_half_of_a_series_that_never_settles_is_cut():
    assert mser5(np.linspace(0, 1, 400), 20) == 200


def test_a_trend_has_the_size_of_its_slope_and_is_certain():
    trend = trend_of(np.linspace(1, 1.03, 25) + 0.001 * noise(1, 25))
    assert trend.change == pytest.approx(0.03, rel=0.1)
    assert trend.p_value < 1e-6
    assert trend_of(-np.linspace(1, 1.03, 25)).change == pytest.approx(-0.03)


@pytest.mark.parametrize(("carried", "most"), [(0.0, 0.015), (0.3, 0.04), (0.5, 0.07)])
def test_series_without_a_trend_seldom_have_one_at_one_per_cent(carried, most):
    p_values = [trend_of(noise(seed, 25, carried=carried)).p_value for seed in range(400)]
    assert np.mean(np.array(p_values) < 0.01) <= most


def test_equal_values_have_no_trend():
    assert trend_of(np.ones(25)) == (0.0, 1.0)
