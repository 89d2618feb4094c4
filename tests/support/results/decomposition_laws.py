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
        assert math.fsum(f.log_ratio for f in wall.factors) == pytest.approx(wall.total.log_ratio, abs=1e-9)
        assert math.fsum(f.added_s for f in wall.factors) == pytest.approx(
            wall.b_s - wall.a_s, rel=1e-9, abs=1e-9 * wall.a_s
        )
    if wall.phases is not None:
        assert_adds_up(wall.phases.whole, wall.phases.parts)
    if found.latency is not None:
        assert_adds_up(found.latency.whole, found.latency.parts)
    if found.sections is not None:
        assert_adds_up(found.sections.whole, found.sections.sections)
    if found.batches is not None:
        split = found.batches
        assert_adds_up(split.whole, (split.batches, split.same_batch))
        scale = 1e-9 * split.whole.a_s
        assert math.fsum(b.batches_s for b in split.bins) == pytest.approx(split.batches.added_s, abs=scale)
        assert math.fsum(b.same_batch_s for b in split.bins) == pytest.approx(split.same_batch.added_s, abs=scale)
        for share in ("a_share", "b_share"):
            assert math.fsum(getattr(b, share) for b in split.bins) == pytest.approx(1)
    if found.work is not None:
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
