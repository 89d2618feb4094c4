"""Laws of the least squares on relative error."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from benchctl.steptime.design import Pull, open_directions, relative_rows, solve

SEEDS = st.integers(0, 10_000)


def design(seed: int, num_steps: int = 80, num_columns: int = 5):
    """Columns that matter alike, from one stream."""
    stream = np.random.default_rng(seed)
    return stream.gamma(2.0, 1.0, (num_steps, num_columns)), stream


def pull(num_columns: int, strength: float = 0.0) -> Pull:
    return Pull(values=np.ones(num_columns), spreads=np.full(num_columns, 0.5), strength=strength)


def blocks(num_steps: int, number: int = 8):
    return np.array_split(np.arange(num_steps), number)


@settings(deadline=None, max_examples=40)
@given(SEEDS)
def test_planted_coefficients_return_exactly_without_noise(seed: int) -> None:
    matrix, stream = design(seed)
    planted = stream.uniform(0.2, 4.0, matrix.shape[1]) / matrix.mean(axis=0)
    rows = relative_rows(matrix, matrix @ planted, blocks(len(matrix)))
    for constraint in ("non-negative", "none"):
        np.testing.assert_allclose(solve(rows, pull(5), constraint=constraint), planted, rtol=1e-7)


@settings(deadline=None, max_examples=40)
@given(SEEDS)
def test_both_constraints_agree_where_all_coefficients_are_positive(seed: int) -> None:
    matrix, stream = design(seed)
    planted = stream.uniform(0.5, 4.0, matrix.shape[1]) / matrix.mean(axis=0)
    measured = matrix @ planted * np.exp(stream.normal(0.0, 0.02, len(matrix)))
    rows = relative_rows(matrix, measured, blocks(len(matrix)))
    free = solve(rows, pull(5), constraint="none")
    if (free > 1e-6 / matrix.mean(axis=0)).all():
        np.testing.assert_allclose(solve(rows, pull(5), constraint="non-negative"), free, rtol=1e-7)


@settings(deadline=None, max_examples=40)
@given(SEEDS, st.floats(1e-3, 1e3))
def test_the_unit_of_time_scales_every_coefficient(seed: int, factor: float) -> None:
    matrix, stream = design(seed)
    measured = matrix.sum(axis=1) * np.exp(stream.normal(0.0, 0.05, len(matrix)))
    one = solve(relative_rows(matrix, measured, blocks(len(matrix))), pull(5), constraint="non-negative")
    other = solve(relative_rows(matrix, measured * factor, blocks(len(matrix))), pull(5), constraint="non-negative")
    np.testing.assert_allclose(other, one * factor, rtol=1e-6, atol=1e-9 * np.abs(one * factor).max())


@settings(deadline=None, max_examples=40)
@given(SEEDS, st.floats(1e-3, 1e3))
def test_the_unit_of_a_column_scales_its_coefficient_alone(seed: int, factor: float) -> None:
    matrix, stream = design(seed)
    measured = matrix.sum(axis=1) * np.exp(stream.normal(0.0, 0.05, len(matrix)))
    scales = np.array([factor, 1.0, 1.0, 1.0, 1.0])
    one = solve(relative_rows(matrix, measured, blocks(len(matrix))), pull(5), constraint="none")
    other = solve(relative_rows(matrix * scales, measured, blocks(len(matrix))), pull(5), constraint="none")
    np.testing.assert_allclose(other * scales, one, rtol=1e-5, atol=1e-8)


def test_the_cut_into_blocks_changes_nothing_and_weights_repeat_them() -> None:
    matrix, stream = design(3)
    measured = matrix.sum(axis=1) * np.exp(stream.normal(0.0, 0.05, len(matrix)))
    whole = solve(relative_rows(matrix, measured, [np.arange(80)]), pull(5), constraint="non-negative")
    parts = relative_rows(matrix, measured, blocks(80))
    np.testing.assert_allclose(solve(parts, pull(5), constraint="non-negative"), whole, rtol=1e-8)
    chosen = blocks(80)
    twice = relative_rows(matrix, measured, [*chosen[1:], chosen[2]])
    weights = np.array([0.0, 1.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    repeated = solve(parts, pull(5), constraint="none", weights=weights)
    np.testing.assert_allclose(solve(twice, pull(5), constraint="none"), repeated, rtol=1e-6)


def test_a_direction_that_the_data_leave_open_is_decided_by_the_typical_values() -> None:
    matrix, _ = design(5, num_columns=3)
    matrix[:, 2] = matrix[:, 1]
    planted = np.array([1.0, 1.4, 0.0])
    rows = relative_rows(matrix, matrix @ planted, blocks(80))
    (direction,) = open_directions(rows)
    np.testing.assert_allclose(np.abs(direction), [0.0, np.sqrt(0.5), np.sqrt(0.5)], atol=1e-9)
    solved = solve(rows, Pull(values=np.array([1.0, 1.0, 0.2]), spreads=np.full(3, 0.5)), constraint="non-negative")
    np.testing.assert_allclose(solved, [1.0, 1.1, 0.3], rtol=1e-5)


def test_a_strong_ridge_returns_the_typical_values() -> None:
    matrix, stream = design(7)
    measured = matrix.sum(axis=1) * np.exp(stream.normal(0.0, 0.05, len(matrix)))
    rows = relative_rows(matrix, measured, blocks(len(matrix)))
    pulled = solve(rows, pull(5, strength=1e9), constraint="non-negative")
    np.testing.assert_allclose(pulled, np.ones(5), rtol=1e-3)
