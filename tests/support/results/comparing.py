"""Comparisons of built results, and what they say."""

from pathlib import Path
from typing import Any

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
