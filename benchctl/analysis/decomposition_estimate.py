"""Parts of a difference between two sides, each with its interval, that add up exactly.

A split takes one run of A and one of B and returns numbers that add up. Over the blocks its parts are averaged with
the same weights, those of ``estimate_paired`` for the wall time, so that they still add up. Sides
that share no blocks are held against each other in all pairs; the interval is then that of Welch on the two
projections of the average (W. Hoeffding, *A class of statistics with asymptotically normal distribution*, Annals of
Mathematical Statistics 19, 1948, 293-325), which for a plain difference is his interval of two means.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from benchctl.analysis.statistics import RatioEstimate, estimate_paired
from benchctl.analysis.uncertainty import Interval, StudentT

Run = TypeVar("Run")
_ROUNDING: Final = 1e-12
LEAST_TOLD: Final = 1e-9
"""A smaller difference is rounding, whatever its interval says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facing:
    """How the runs of two sides are held against each other. ``places`` as in ``estimate_paired``."""

    is_paired: bool
    confidence: float = 0.95
    places: tuple[int, ...] | None = None
    evidence: tuple[float, ...] | None = None
    """Log-ratio of the wall times of each block, which says to the robust estimator how much it counts; None: all
    count the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """A part of a difference of means over blocks, in seconds; the parts of one difference add up to it.

    ``a_s`` and ``b_s`` are the means of both sides, where the part is one that has a value on each: b_s - a_s is
    added_s. Where the order within blocks was taken out, one side is as measured and the other at its places: A is
    as measured, unless B alone lacks a part that A has, which then stays 0.
    """

    name: str
    added_s: float
    ci_low_s: float | None = None
    ci_high_s: float | None = None
    a_s: float | None = None
    b_s: float | None = None

    @property
    def is_told(self) -> bool:
        """Its interval excludes 0."""
        interval = None if self.ci_low_s is None or self.ci_high_s is None else (self.ci_low_s, self.ci_high_s)
        return excludes_zero(interval, self.added_s)

    def share_of(self, whole: "Contribution") -> float | None:
        """Its share of the whole difference; None where that cannot be told from 0."""
        return self.added_s / whole.added_s if whole.is_told else None


def excludes_zero(interval: Interval | None, value: float) -> bool:
    """Whether the interval of ``value`` lies wholly on one side of 0; rounding alone does not count."""
    return interval is not None and (interval[0] > 0 or interval[1] < 0) and abs(value) > LEAST_TOLD


def kept(
    a: Sequence[Run], b: Sequence[Run], facing: Facing, is_known: Callable[[Run], bool]
) -> tuple[list[Run], list[Run], Facing]:
    """The runs that are known: blocks known on both sides when paired, else those of each side."""
    if not facing.is_paired:
        return [run for run in a if is_known(run)], [run for run in b if is_known(run)], facing
    known = [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if is_known(x) and is_known(y)]
    places = None if facing.places is None else tuple(facing.places[i] for i in known)
    evidence = None if facing.evidence is None else tuple(facing.evidence[i] for i in known)
    return [a[i] for i in known], [b[i] for i in known], replace(facing, places=places, evidence=evidence)


def estimate_terms(
    a: Sequence[Run], b: Sequence[Run], split: Callable[[Run, Run], Sequence[float]], facing: Facing
) -> list[RatioEstimate]:
    """An estimate of each number that ``split`` returns; ``log_ratio`` holds it, whatever its unit is.

    Both sides have a run at least.
    """
    if facing.is_paired:
        by_block = [split(x, y) for x, y in zip(a, b, strict=True)]
        evidence = facing.evidence
        is_robust = evidence is not None and not any(math.isnan(log) for log in evidence)
        return [
            estimate_paired(
                values,
                facing.confidence,
                facing.places,
                estimator="robust" if is_robust else "mean",
                evidence=evidence,
            )
            for values in zip(*by_block, strict=True)
        ]
    pairs = np.array([[split(x, y) for y in b] for x in a], dtype=float)
    return [_of_all_pairs(pairs[:, :, term], facing.confidence) for term in range(pairs.shape[2])]


def _of_all_pairs(pairs: NDArray[np.float64], confidence: float) -> RatioEstimate:
    """Mean over all pairs; variance = var(means of rows) / n_a + var(means of columns) / n_b."""
    n_a, n_b = pairs.shape
    centre = float(pairs.mean())
    estimate = RatioEstimate(
        num_blocks=min(n_a, n_b), is_paired=False, confidence=confidence, log_ratio=centre, method="t"
    )
    if min(n_a, n_b) < 2:
        return estimate
    parts = [(float(pairs.mean(axis=1).var(ddof=1)) / n_a, n_a), (float(pairs.mean(axis=0).var(ddof=1)) / n_b, n_b)]
    squared = sum(part for part, _ in parts)
    spread = sum(part**2 / (count - 1) for part, count in parts)
    df = squared**2 / spread if spread > 0 else float(n_a + n_b - 2)
    return replace(estimate, uncertainty=StudentT(centre, float(np.sqrt(squared)), df))


def contributions(
    names: Sequence[str],
    a: Sequence[Run],
    b: Sequence[Run],
    split: Callable[[Run, Run], Sequence[float]],
    facing: Facing,
) -> tuple[Contribution, ...]:
    """The parts that ``split`` makes of a difference, in seconds."""
    estimates = estimate_terms(a, b, split, facing)
    return tuple(_contribution(name, estimate) for name, estimate in zip(names, estimates, strict=True))


def levels(
    names: Sequence[str],
    a: Sequence[Run],
    b: Sequence[Run],
    values: Callable[[Run], Sequence[float]],
    facing: Facing,
) -> tuple[Contribution, ...]:
    """The differences of values that each run has, in seconds, with the means of both sides."""

    def split(x: Run, y: Run) -> list[float]:
        return [after - before for before, after in zip(values(x), values(y), strict=True)]

    estimates = estimate_terms(a, b, split, facing)
    means_a, means_b = (np.mean([values(run) for run in side], axis=0) for side in (a, b))
    is_a_fixed = bool(np.any((means_a == 0) & (means_b != 0))) or not np.any((means_b == 0) & (means_a != 0))
    found = []
    for name, estimate, mean_a, mean_b in zip(names, estimates, means_a, means_b, strict=True):
        added, scale = estimate.log_ratio, float(max(abs(mean_a), abs(mean_b)))
        a_s, b_s = (mean_a, mean_a + added) if is_a_fixed else (mean_b - added, mean_b)
        part = replace(_contribution(name, estimate), a_s=_snapped(a_s, scale), b_s=_snapped(b_s, scale))
        found.append(part)
    return tuple(found)


def _snapped(level: float, scale: float) -> float:
    """0 for what only rounding keeps from it."""
    return 0.0 if abs(level) < _ROUNDING * scale else float(level)


def _contribution(name: str, estimate: RatioEstimate) -> Contribution:
    low, high = estimate.log_interval or (None, None)
    return Contribution(name=name, added_s=estimate.log_ratio, ci_low_s=low, ci_high_s=high)
