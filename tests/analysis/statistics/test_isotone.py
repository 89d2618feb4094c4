"""The size at which a rising latency crosses its limit."""

import math

import pytest
from hypothesis import given, strategies as st

from benchctl.analysis.statistics.isotone import Crossing, crossing

SIZES = st.lists(st.floats(0.5, 500), min_size=3, max_size=9, unique_by=lambda size: round(math.log(size), 2)).map(
    sorted
)


@given(SIZES, st.floats(0.1, 8), st.floats(0.05, 0.95))
def test_the_crossing_of_a_straight_line_is_exact(sizes, elasticity, part):
    truth = sizes[0] ** (1 - part) * sizes[-1] ** part
    fitted = crossing(sizes, [elasticity * math.log(size / truth) for size in sizes])
    assert fitted.size == pytest.approx(truth)
    assert fitted.elasticity == pytest.approx(elasticity)


def test_a_pool_lies_at_its_centre():
    """The two middle sizes fall, so they are one point at their geometric mean, 2 sqrt(2), with y = -1."""
    fitted = crossing([1, 2, 4, 8], [-2, 0, -2, 1])
    slope = 2 / (math.log(8) - math.log(2 * math.sqrt(2)))
    assert fitted.size == pytest.approx(2 * math.sqrt(2) * math.exp(1 / slope))
    assert fitted.elasticity == pytest.approx(slope)
    assert (fitted.holds, fitted.breaks) == (4, 8)


@given(SIZES, st.lists(st.floats(-2, 2), min_size=9, max_size=9), st.floats(0.01, 100))
def test_the_crossing_scales_with_the_unit_of_size(sizes, log_ratios, unit):
    one, other = (crossing([each * by for each in sizes], log_ratios[: len(sizes)]) for by in (1, unit))
    assert (one.size is None) == (other.size is None)
    if one.size is not None:
        assert other.size == pytest.approx(unit * one.size)


@given(SIZES, st.lists(st.floats(-2, 2), min_size=9, max_size=9), st.floats(0.4, 600))
def test_the_crossing_stays_between_what_holds_and_what_breaks(sizes, log_ratios, breaks_from):
    fitted = crossing(sizes, log_ratios[: len(sizes)], breaks_from)
    if fitted.size is None:
        assert (fitted.holds is None) != (fitted.breaks is None)
        return
    assert fitted.holds <= fitted.size < fitted.breaks <= max(breaks_from, sizes[-1])
    assert sizes[0] <= fitted.size


def test_the_crossing_is_censored_where_all_or_no_sizes_hold():
    assert crossing([4, 8], [-0.5, -0.1]) == Crossing(None, holds=8)
    assert crossing([4, 8], [0.1, 0.5]) == Crossing(None, breaks=4)
    assert crossing([4, 8], [-0.5, -0.1], breaks_from=4) == Crossing(None, breaks=4)


def test_where_all_steady_sizes_hold_it_lies_between_the_last_and_the_overloaded_one():
    fitted = crossing([4, 8, 16], [-0.5, -0.1, -0.4], breaks_from=16)
    assert fitted == Crossing(math.sqrt(8 * 16), holds=8, breaks=16)


def test_a_size_above_the_overloaded_one_is_ignored():
    assert crossing([4, 8, 16, 32], [-1, 1, -3, -3], 16) == crossing([4, 8], [-1, 1])
