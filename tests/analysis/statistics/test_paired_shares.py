"""Shares of the same questions: each law that the formulas promise, and their published examples."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest

from benchctl.analysis.statistics.intervals import (
    mean_interval,
    minimum_detectable_difference,
    newcombe_interval,
    pass_at,
    sign_flip_p,
    wilson_interval,
)

tables = st.tuples(*[st.integers(0, 60)] * 4).filter(any)


def differences_of(num_better: int, num_worse: int, num_equal: int = 0) -> list[Fraction]:
    return [Fraction(1)] * num_better + [Fraction(-1)] * num_worse + [Fraction(0)] * num_equal


# pass@k


@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.integers(1, n), st.integers(0, n), st.just(n))))
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_correct_sample(count: tuple[int, int, int]) -> None:
    k, num_correct, n = count
    wrong = Fraction(math.comb(n - num_correct, k), math.comb(n, k))
    assert pass_at(k, num_correct, n) == pytest.approx(float(1 - wrong), abs=1e-12)


def test_pass_at_k_stays_finite_where_binomials_overflow() -> None:
    assert pass_at(1000, 3, 100_000) == pytest.approx(1 - (1 - 0.01) ** 3, rel=1e-3)


# Intervals


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        # The table of R. G. Newcombe 1998 with 20 + 12 + 2 + 16 pairs.
        ((20, 12, 2, 16), (-0.3292, -0.0562)),
        # Airway hyper-responsiveness (Bentur 2009), in M. Fagerland et al., Statistics in Medicine 33, 2014.
        ((1, 1, 7, 12), (0.0256, 0.5069)),
    ],
)
def test_newcombes_interval_is_that_of_published_tables(
    table: tuple[int, int, int, int], expected: tuple[float, float]
) -> None:
    assert newcombe_interval(*table, 0.95) == pytest.approx(expected, abs=1e-4)


def test_wilsons_interval_is_the_one_of_scipy() -> None:
    for num_correct, n in ((0, 10), (7, 10), (10, 10), (312, 1319)):
        expected = binomtest(num_correct, n).proportion_ci(0.9, method="wilson")
        assert wilson_interval(num_correct, n, 0.9) == pytest.approx((expected.low, expected.high))


@given(tables, st.sampled_from([0.8, 0.95, 0.99]))
def test_swapping_the_sides_mirrors_newcombes_interval(table: tuple[int, int, int, int], confidence: float) -> None:
    both, only_a, only_b, neither = table
    low, high = newcombe_interval(both, only_a, only_b, neither, confidence)
    assert newcombe_interval(both, only_b, only_a, neither, confidence) == pytest.approx((-high, -low))
    assert -1 <= low <= (only_b - only_a) / sum(table) + 1e-12
    assert high <= 1
    assert high > low


@settings(max_examples=40)
@given(st.lists(st.fractions(-1, 1, max_denominator=8), min_size=2, max_size=40))
def test_the_mean_interval_holds_the_mean_or_reaches_it(differences: list[Fraction]) -> None:
    low, high = mean_interval(differences, 0.95)
    assert -1 <= low <= float(sum(differences) / len(differences)) <= high <= 1
    assert math.isfinite(low + high)
    if len(set(differences)) == 1:
        assert low < high


def correlated(stream: np.random.Generator, num_questions: int, num_samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Correct answers of two sides to questions of varied difficulty; B is worse by 5 points on each."""
    ability = stream.beta(2, 1, size=num_questions) * 0.9 + 0.05
    return stream.binomial(num_samples, ability), stream.binomial(num_samples, np.clip(ability - 0.05, 0, 1))


def test_both_intervals_cover_the_truth_in_a_simulation() -> None:
    stream = np.random.default_rng(3)
    of_tables = of_means = 0
    for _ in range(200):
        a, b = correlated(stream, 150, 1)
        table = [int(np.sum((a == x) & (b == y))) for x, y in ((1, 1), (1, 0), (0, 1), (0, 0))]
        low, high = newcombe_interval(*table, 0.9)
        of_tables += low <= -0.05 <= high
    for _ in range(100):
        a, b = correlated(stream, 120, 4)
        low, high = mean_interval([Fraction(int(y - x), 4) for x, y in zip(a, b, strict=True)], 0.9)
        of_means += low <= -0.05 <= high
    assert 0.84 <= of_tables / 200 <= 0.97
    assert 0.80 <= of_means / 100 <= 0.97


# The test


@settings(max_examples=40)
@given(st.integers(0, 200), st.integers(0, 200))
def test_with_one_answer_per_question_the_test_is_mcnemars(num_better: int, num_worse: int) -> None:
    p_value = sign_flip_p(differences_of(num_better, num_worse, 7))
    discordant = num_better + num_worse
    assert p_value == pytest.approx(binomtest(num_better, discordant).pvalue if discordant else 1.0)


@settings(max_examples=40)
@given(st.lists(st.fractions(-1, 1, max_denominator=6), min_size=1, max_size=10))
def test_the_test_counts_all_choices_of_signs(differences: list[Fraction]) -> None:
    sums = [Fraction(0)]
    for value in differences:
        sums = [one + sign * value for one in sums for sign in (1, -1)]
    observed = abs(sum(differences))
    p_value = sum(abs(one) >= observed for one in sums) / len(sums)
    assert sign_flip_p(differences) == pytest.approx(p_value)
    assert sign_flip_p([-value for value in differences]) == pytest.approx(p_value)


@pytest.mark.parametrize(("num_questions", "num_samples"), [(40, 1), (90, 4), (160, 9), (240, 4)])
def test_the_counted_distribution_is_that_of_drawn_signs(num_questions: int, num_samples: int) -> None:
    stream = np.random.default_rng([7, num_questions, num_samples])
    steps = stream.integers(-num_samples, num_samples + 2, size=num_questions)
    signs = stream.choice([-1, 1], size=(20_000, num_questions))
    simulated = np.mean(np.abs(signs @ steps) >= abs(steps.sum()))
    p_value = sign_flip_p([Fraction(int(step), num_samples) for step in steps])
    assert simulated == pytest.approx(p_value, abs=5 * math.sqrt(p_value * (1 - p_value) / 20_000) + 1e-4)


def test_many_odd_differences_are_tested_by_their_normal_distribution() -> None:
    stream = np.random.default_rng(5)
    draws = stream.integers(-9973, 9973, size=400)
    differences = [Fraction(int(value), 9973) for value in draws]
    z = float(np.sum(draws) / np.sqrt(np.sum(draws.astype(float) ** 2)))
    assert sign_flip_p(differences) == pytest.approx(math.erfc(abs(z) / math.sqrt(2)))


# What could be seen


def test_the_detectable_difference_follows_from_the_questions_on_which_the_sides_disagree() -> None:
    differences = differences_of(66, 66, 1319 - 132)
    assert minimum_detectable_difference(differences, 0.95) == pytest.approx(
        2.8016 * math.sqrt(132) / 1319, rel=1e-3
    )
    none = minimum_detectable_difference(differences_of(0, 0, 100), 0.95)
    assert none == pytest.approx(minimum_detectable_difference(differences_of(1, 0, 99), 0.95))
