"""Laws of the least squares on relative error."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from benchctl.steptime.design import Pull, open_directions, relative_rows, solve

SEEDS = st.integers(0, 10_000)
BLOCKS = np.array_split(np.arange(80), 8)


def design(seed, num_columns=5):
    """Columns that matter alike, from one stream, and times that scatter around their sum."""
    stream = np.random.default_rng(seed)
    matrix = stream.gamma(2.0, 1.0, (80, num_columns))
    return matrix, stream, matrix.sum(axis=1) * np.exp(stream.normal(0.0, 0.05, 80))


def solved(matrix, measured, constraint="non-negative", **more):
    return solve(relative_rows(matrix, measured, BLOCKS), pull(matrix.shape[1]), constraint=constraint, **more)


def pull(num_columns, strength=0.0):
    return Pull(values=np.ones(num_columns), spreads=np.full(num_columns, 0.5), strength=strength)


@settings(max_examples=30)
@given(SEEDS)
def test_planted_coefficients_return_exactly_without_noise(seed):
    matrix, stream, _ = design(seed)
    planted = stream.uniform(0.2, 4.0, matrix.shape[1]) / matrix.mean(axis=0)
    for constraint in ("non-negative", "none"):
        np.testing.assert_allclose(solved(matrix, matrix @ planted, constraint), planted, rtol=1e-7)


@settings(max_examples=30)
@given(SEEDS)
def test_both_constraints_agree_where_all_coefficients_are_positive(seed):
    matrix, _, measured = design(seed)
    free = solved(matrix, measured, "none")
    if (free > 1e-6 / matrix.mean(axis=0)).all():
        np.testing.assert_allclose(solved(matrix, measured), free, rtol=1e-7)


@settings(max_examples=30)
@given(SEEDS, st.floats(1e-3, 1e3))
def test_the_unit_of_time_scales_every_coefficient_and_that_of_a_column_its_own(seed, factor):
    matrix, _, measured = design(seed)
    one, other = solved(matrix, measured), solved(matrix, measured * factor)
    np.testing.assert_allclose(other, one * factor, rtol=1e-6, atol=1e-9 * np.abs(one * factor).max())
    scales = np.array([factor, 1.0, 1.0, 1.0, 1.0])
    scaled = solved(matrix * scales, measured, "none") * scales
    np.testing.assert_allclose(scaled, solved(matrix, measured, "none"), rtol=1e-5, atol=1e-8)


def test_the_cut_into_blocks_changes_nothing_and_weights_repeat_them():
    matrix, _, measured = design(3)
    whole = solve(relative_rows(matrix, measured, [np.arange(80)]), pull(5), constraint="non-negative")
    np.testing.assert_allclose(solved(matrix, measured), whole, rtol=1e-8)
    twice = relative_rows(matrix, measured, [*BLOCKS[1:], BLOCKS[2]])
    repeated = solved(matrix, measured, "none", weights=np.array([0.0, 1.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0]))
    np.testing.assert_allclose(solve(twice, pull(5), constraint="none"), repeated, rtol=1e-6)


def test_a_direction_that_the_data_leave_open_is_decided_by_the_typical_values():
    matrix, _, _ = design(5, num_columns=3)
    matrix[:, 2] = matrix[:, 1]
    rows = relative_rows(matrix, matrix @ np.array([1.0, 1.4, 0.0]), BLOCKS)
    (direction,) = open_directions(rows)
    np.testing.assert_allclose(np.abs(direction), [0.0, np.sqrt(0.5), np.sqrt(0.5)], atol=1e-9)
    typical = Pull(values=np.array([1.0, 1.0, 0.2]), spreads=np.full(3, 0.5))
    np.testing.assert_allclose(solve(rows, typical, constraint="non-negative"), [1.0, 1.1, 0.3], rtol=1e-5)


def test_a_strong_ridge_returns_the_typical_values():
    matrix, _, measured = design(7)
    rows = relative_rows(matrix, measured, BLOCKS)
    np.testing.assert_allclose(solve(rows, pull(5, 1e9), constraint="non-negative"), np.ones(5), rtol=1e-3)
