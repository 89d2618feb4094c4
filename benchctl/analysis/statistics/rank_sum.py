"""Two sides that share no blocks: the Mann-Whitney test, and the interval of the shift that inverts it."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Final

from scipy.special import ndtr, ndtri

from benchctl.analysis.statistics.intervals import Interval

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
