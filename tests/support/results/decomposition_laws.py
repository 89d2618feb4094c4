"""What every decomposition must satisfy, whatever was measured."""

import math

import pytest

from benchctl.analysis.attribution.decomposition import Decomposition
from benchctl.analysis.attribution.estimate import Contribution


def assert_exact(found: Decomposition) -> None:
    """Factors multiply to the ratio, parts add up to the difference, within rounding."""
    wall = found.wall
    assert math.log(wall.b_s / wall.a_s) == pytest.approx(wall.total.log_ratio, abs=1e-9)
    if wall.factors:
        assert math.fsum(f.estimate.log_ratio for f in wall.factors) == pytest.approx(
            wall.total.log_ratio, abs=1e-9
        )
        assert math.fsum(f.added_s for f in wall.factors) == pytest.approx(
            wall.b_s - wall.a_s, rel=1e-9, abs=1e-9 * wall.a_s
        )
    if found.sections is not None:
        assert_adds_up(found.sections.whole, found.sections.parts)
    if not isinstance(found.work, str):
        assert_adds_up(found.work.whole, found.work.parts)


def assert_adds_up(whole: Contribution, parts: tuple[Contribution, ...]) -> None:
    assert whole.a_s is not None
    assert whole.b_s is not None
    scale = 1e-9 * max(abs(whole.a_s), abs(whole.b_s))
    assert whole.b_s - whole.a_s == pytest.approx(whole.added_s, abs=scale)
    assert math.fsum(part.added_s for part in parts) == pytest.approx(whole.added_s, abs=scale)
    if all(part.a_s is not None for part in parts):
        assert math.fsum(part.a_s or 0.0 for part in parts) == pytest.approx(whole.a_s, abs=scale)
        assert math.fsum(part.b_s or 0.0 for part in parts) == pytest.approx(whole.b_s, abs=scale)
