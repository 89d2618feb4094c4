"""What every decomposition must satisfy, whatever was measured."""

import math

import pytest

from benchctl.analysis.attribution.decomposition import Decomposition
from benchctl.analysis.attribution.estimate import Part


def assert_exact(found: Decomposition) -> None:
    """Factors multiply to the ratio, parts add up to the difference, within rounding."""
    wall = found.wall
    log_ratio = wall.whole.estimate.log_ratio
    assert math.log(wall.whole.ratio) == pytest.approx(log_ratio, abs=1e-9)
    if wall.parts:
        assert math.fsum(factor.estimate.log_ratio for factor in wall.parts) == pytest.approx(log_ratio, abs=1e-9)
        assert_adds_up(wall.whole, wall.parts)
    if found.sections is not None:
        assert_adds_up(found.sections.whole, found.sections.parts)
    if not isinstance(found.work, str):
        assert_adds_up(found.work.whole, found.work.parts)


def assert_adds_up(whole: Part, parts: tuple[Part, ...]) -> None:
    assert whole.a_s is not None
    assert whole.b_s is not None
    scale = 1e-9 * max(abs(whole.a_s), abs(whole.b_s))
    assert whole.b_s - whole.a_s == pytest.approx(whole.added_s, abs=scale)
    assert math.fsum(part.added_s for part in parts) == pytest.approx(whole.added_s, abs=scale)
    if all(part.a_s is not None for part in parts):
        assert math.fsum(part.a_s or 0.0 for part in parts) == pytest.approx(whole.a_s, abs=scale)
        assert math.fsum(part.b_s or 0.0 for part in parts) == pytest.approx(whole.b_s, abs=scale)
