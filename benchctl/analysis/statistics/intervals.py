"""Intervals of a log-ratio: Student's t, and that of sides without common blocks.

Effects of the order of an experiment: position in the block, drift over the blocks, outlier blocks.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from statistics import median
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri, stdtr, stdtrit

Interval = tuple[float, float]


class Uncertainty(Protocol):
    """Precision of a log-ratio, from the blocks."""

    @property
    def standard_error(self) -> float: ...

    @property
    def degrees_of_freedom(self) -> float: ...

    def interval(self, confidence: float) -> Interval | None:
        """Bounds of the log-ratio; None where there are too few blocks for that confidence."""

    def p_value(self) -> float:
        """The least alpha at which the interval of 1 - alpha excludes 0: the test that the interval inverts."""


def t_quantile(probability: float, degrees_of_freedom: float) -> float:
    """Quantile of Student's t distribution."""
    return float(stdtrit(degrees_of_freedom, probability))


@dataclass(frozen=True, slots=True)
class StudentT:
    """centre ± t(1 - alpha / 2, df) * standard error."""

    centre: float
    standard_error: float
    degrees_of_freedom: float

    def interval(self, confidence: float) -> Interval | None:
        half = t_quantile(1 - (1 - confidence) / 2, self.degrees_of_freedom) * self.standard_error
        return self.centre - half, self.centre + half

    def p_value(self) -> float:
        """Two-sided t-test of the centre."""
        if self.standard_error == 0:
            return float(self.centre == 0)
        return 2 * float(stdtr(self.degrees_of_freedom, -abs(self.centre) / self.standard_error))


MAX_EXACT_PAIRS: Final = 2500
"""Product of the two numbers of blocks up to which the null distribution of U is enumerated."""


@dataclass(frozen=True, slots=True)
class PairwiseShifts:
    """Order statistics of all differences between two independent sides.

    The interval that inverts the Mann-Whitney test: between the k-th smallest and the k-th largest of the
    differences, k the largest with P(U < k) <= alpha / 2. J. L. Hodges, E. L. Lehmann, *Estimates of location based
    on rank tests*, Annals of Mathematical Statistics 34, 1963, 598-611. The standard error, used for planning only,
    is Welch's.
    """

    shifts: tuple[float, ...]
    """Sorted; every value of B less every value of A."""
    sizes: tuple[int, int]
    standard_error: float
    degrees_of_freedom: float

    def interval(self, confidence: float) -> Interval | None:
        k = _rank_below(self.sizes, (1 - confidence) / 2)
        return None if k is None else (self.shifts[k - 1], self.shifts[-k])

    def p_value(self) -> float:
        """The Mann-Whitney test of "no shift": 2 P(U <= u), u the smaller number of shifts on one side of 0.

        A shift of exactly 0 counts on both sides, so that the interval excludes 0 just where p is at most alpha.
        """
        u = min(bisect_right(self.shifts, 0.0), len(self.shifts) - bisect_left(self.shifts, 0.0))
        return min(1.0, 2 * _probability_up_to(self.sizes, u))


@lru_cache(maxsize=4096)
def _rank_below(sizes: tuple[int, int], tail: float) -> int | None:
    """The largest k with P(U < k) <= tail; None where not even k = 1 is that improbable."""
    num_a, num_b = sizes
    if num_a * num_b > MAX_EXACT_PAIRS:
        centre, sd = num_a * num_b / 2, math.sqrt(num_a * num_b * (num_a + num_b + 1) / 12)
        k = math.floor(centre + float(ndtri(tail)) * sd)
        return k if k >= 1 else None
    counts = _u_counts(num_a, num_b)
    allowed = tail * math.comb(num_a + num_b, num_a)
    k = sum(cumulated <= allowed for cumulated in accumulate(counts))
    return k or None


def _probability_up_to(sizes: tuple[int, int], u: int) -> float:
    """P(U <= u) of two sides with the same distribution."""
    num_a, num_b = sizes
    if num_a * num_b > MAX_EXACT_PAIRS:
        centre, sd = num_a * num_b / 2, math.sqrt(num_a * num_b * (num_a + num_b + 1) / 12)
        return float(ndtr((u + 1 - centre) / sd))
    return sum(_u_counts(num_a, num_b)[: u + 1]) / math.comb(num_a + num_b, num_a)


@lru_cache(maxsize=64)
def _u_counts(num_a: int, num_b: int) -> tuple[int, ...]:
    """Orders of the two sides for each value of U: coefficients of the Gaussian binomial (a + b over a)."""
    counts = [1] + [0] * (num_a * num_b)
    for i in range(1, num_a + 1):
        for u in range(len(counts) - 1, num_b + i - 1, -1):
            counts[u] -= counts[u - num_b - i]
        for u in range(i, len(counts)):
            counts[u] += counts[u - i]
    return tuple(counts)


def pairwise_shifts(a: Sequence[float], b: Sequence[float]) -> tuple[float, ...]:
    """Every value of ``b`` less every value of ``a``, sorted."""
    return tuple(sorted(after - before for after in b for before in a))


OUTLIER_SCORE: Final = 3.5
"""Modified z-score beyond which a block is an outlier: B. Iglewicz, D. C. Hoaglin, *How to Detect and Handle
Outliers*, ASQC Quality Press 1993."""
_MIN_POINTS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Slope:
    """Slope of a straight line through log values, with the two-sided p-value of a slope of 0."""

    log_per_unit: float
    standard_error: float
    p_value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderEffects:
    """Slopes of log values; None where a slope cannot be estimated."""

    position: Slope | None
    """Added to a run by each position later in its block."""
    ratio_drift: Slope | None
    """Added to the ratio by each block."""
    machine_drift: Slope | None
    """Added to both sides alike by each block."""


def order_effects(
    a: Sequence[float], b: Sequence[float], blocks: Sequence[int], positions: Sequence[float] | None
) -> OrderEffects:
    """The slopes of both sides' log values by block; ``positions`` holds the position of B minus that of A."""
    before, after = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    return OrderEffects(
        position=None if positions is None else _slope(positions, after - before),
        ratio_drift=_slope(blocks, after - before),
        machine_drift=_slope(blocks, (before + after) / 2),
    )


def _slope(x: Sequence[float], y: NDArray[np.float64]) -> Slope | None:
    """Least squares: slope Sxy / Sxx, standard error sqrt(residuals / (n - 2) / Sxx), test against t(n - 2)."""
    if len(x) < _MIN_POINTS or len(set(x)) < 2 or float(np.ptp(y)) == 0:
        return None
    off_x, off_y = np.asarray(x, dtype=float), y - y.mean()
    off_x -= off_x.mean()
    squares, df = float(off_x @ off_x), len(x) - 2
    slope = float(off_x @ off_y) / squares
    residual = off_y - slope * off_x
    standard_error = math.sqrt(float(residual @ residual) / df / squares)
    p_value = 2 * float(stdtr(df, -abs(slope) / standard_error)) if standard_error > 0 else 0.0
    return Slope(log_per_unit=slope, standard_error=standard_error, p_value=p_value)


def outlier_indices(differences: Sequence[float]) -> tuple[int, ...]:
    """Indices whose modified z-score 0.6745 |d - median| / MAD exceeds 3.5. Outliers are marked, never dropped."""
    if len(differences) < _MIN_POINTS:
        return ()
    centre = median(differences)
    spread = median(abs(d - centre) for d in differences)
    if spread == 0:
        return ()
    return tuple(i for i, d in enumerate(differences) if 0.6745 * abs(d - centre) / spread > OUTLIER_SCORE)
