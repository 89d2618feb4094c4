"""What an unknown part does to a sum, a mean and a quotient."""

import pytest

from benchctl.analysis.metrics.latency import known_values, mean_of_known, quotient, total


def test_a_sum_with_an_unknown_part_is_unknown_and_so_is_the_sum_of_nothing():
    assert total([1, 2, 0]) == 3
    assert total([1, None, 2]) is None
    assert total([]) is None
    assert known_values([1, None, 0]) == [1, 0]


def test_a_mean_is_that_of_the_readings_that_there_are():
    assert mean_of_known([1.0, None, 2.0]) == pytest.approx(1.5)
    assert mean_of_known([None]) is None


@pytest.mark.parametrize(("above", "below"), [(None, 2), (1, None), (1, 0), (None, None)])
def test_a_quotient_is_unknown_when_a_side_is_and_over_nothing(above, below):
    assert quotient(above, below) is None
    assert quotient(0, 2) == 0
