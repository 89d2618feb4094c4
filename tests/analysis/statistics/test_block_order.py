"""Order effects of an experiment: straight lines over positions and blocks, and blocks that stand out."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from benchctl.analysis.statistics.intervals import order_effects, outlier_indices

POSITIONS = (1, -1, 1, -1, 3, -2)
BLOCKS = (0, 1, 2, 4, 5, 6)
logs = st.lists(st.floats(-1, 1).map(lambda value: round(value, 6)), min_size=6, max_size=6)


@given(logs, logs)
def test_slopes_and_their_tests_are_those_of_ordinary_least_squares(a, b):
    effects = order_effects(a, b, BLOCKS, POSITIONS)
    differences = [after - before for before, after in zip(a, b, strict=True)]
    levels = [(after + before) / 2 for before, after in zip(a, b, strict=True)]
    for slope, x, y in (
        (effects.position, POSITIONS, differences),
        (effects.ratio_drift, BLOCKS, differences),
        (effects.machine_drift, BLOCKS, levels),
    ):
        if max(y) - min(y) < 1e-9:
            continue
        line = stats.linregress(x, y)
        assert slope.log_per_unit == pytest.approx(line.slope, abs=1e-12)
        assert slope.standard_error == pytest.approx(line.stderr, abs=1e-9)
        assert slope.p_value == pytest.approx(line.pvalue, abs=1e-6)


def test_a_drift_without_scatter_is_certain():
    effects = order_effects([0.01 * block for block in BLOCKS], [0.01 * block for block in BLOCKS], BLOCKS, None)
    assert effects.machine_drift.log_per_unit == pytest.approx(0.01)
    assert effects.machine_drift.p_value == pytest.approx(0, abs=1e-12)
    assert effects.position is None
    assert effects.ratio_drift is None


def test_what_never_varies_or_is_too_short_has_no_slope():
    same = order_effects([0.0] * 6, [1.0] * 6, BLOCKS, (1,) * 6)
    assert (same.position, same.ratio_drift, same.machine_drift) == (None, None, None)
    short = order_effects([0.0, 0.1, 0.0], [0.2, 0.0, 0.1], (0, 1, 2), (1, -1, 1))
    assert (short.position, short.ratio_drift, short.machine_drift) == (None, None, None)


def test_a_block_that_stands_out_is_marked_and_ordinary_scatter_is_not():
    assert outlier_indices([0.01, 0.012, 0.009, 0.011, math.log(1.5), 0.010]) == (4,)
    assert outlier_indices([0.01, 0.012, 0.009, 0.011, 0.0105, 0.010]) == ()
    assert outlier_indices([0.0, 0.0, 0.0, 0.0, 9.0]) == ()
