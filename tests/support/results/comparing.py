"""Comparisons of built results, what they say, and what every decomposition in them must satisfy."""

import math
from pathlib import Path
from typing import Any

import pytest

from benchctl.analysis.attribution.decomposition import Decomposition
from benchctl.analysis.attribution.estimate import Part
from benchctl.analysis.compare.compare import CompareOptions, compare_sides
from benchctl.analysis.compare.metric import MetricComparison
from benchctl.analysis.compare.result import Comparison
from benchctl.analysis.experiment.pairing import parse_side
from benchctl.records.directory import ResultDirectory


def compare(a: str | Path, b: str | Path, **options: Any) -> Comparison:
    """The comparison of two sides, as the command takes them."""
    return compare_sides(parse_side(str(a)), parse_side(str(b)), CompareOptions(**options))


def compare_arms(results: ResultDirectory, other: ResultDirectory | None = None, **options: Any) -> Comparison:
    """The guided runs of the last directory against the baseline of the first one."""
    return compare(f"{results.path}:baseline", f"{(other or results).path}:guided", **options)


def messages(comparison: Comparison, code: str) -> list[str]:
    """The warnings of one code."""
    return [warning.message for warning in comparison.warnings if warning.code == code]


def metric_of(comparison: Comparison, name: str, cell: int = 0) -> MetricComparison:
    """One metric of one cell."""
    return next(metric for metric in comparison.cells[cell].metrics if metric.metric.name == name)


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
