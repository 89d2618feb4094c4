"""Intervals of a log-ratio by Student's t, and statistics of two sides with the question as the unit."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from statistics import fmean, median, stdev
from typing import ClassVar, Final

import numpy as np
import scipy  # loads scipy.special when it is called for the first time: 0.1 s
from numpy.typing import NDArray

Interval = tuple[float, float]
POWER: Final = 0.8
"""Of a change that is called detectable."""


def t_quantile(probability: float, degrees_of_freedom: float) -> float:
    """Quantile of Student's t distribution."""
    return float(scipy.special.stdtrit(degrees_of_freedom, probability))


@dataclass(frozen=True, slots=True)
class StudentT:
    """centre ± t(1 - alpha / 2, df) * standard error."""

    method: ClassVar = "t"
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
        return 2 * float(scipy.special.stdtr(self.degrees_of_freedom, -abs(self.centre) / self.standard_error))


@dataclass(frozen=True, slots=True)
class PairwiseShifts:
    """Order statistics of all differences between two independent sides.

    The interval that inverts the Mann-Whitney test: between the k-th smallest and the k-th largest of the
    differences, k the largest with P(U < k) <= alpha / 2. J. L. Hodges, E. L. Lehmann, *Estimates of location based
    on rank tests*, Annals of Mathematical Statistics 34, 1963, 598-611. The standard error, used for planning only,
    is Welch's.
    """

    method: ClassVar = "hodges-lehmann"
    shifts: tuple[float, ...]
    """Sorted; every value of B less every value of A."""
    sizes: tuple[int, int]
    standard_error: float
    degrees_of_freedom: float

    def interval(self, confidence: float) -> Interval | None:
        """Bounds of the shift; None where there are too few blocks for that confidence."""
        k = bisect_right(_distribution_of_u(*self.sizes), (1 - confidence) / 2)
        return (self.shifts[k - 1], self.shifts[-k]) if k else None

    def p_value(self) -> float:
        """The Mann-Whitney test of "no shift": 2 P(U <= u), u the smaller number of shifts on one side of 0.

        A shift of exactly 0 counts on both sides, so that the interval excludes 0 just where p is at most alpha.
        """
        u = min(bisect_right(self.shifts, 0.0), len(self.shifts) - bisect_left(self.shifts, 0.0))
        return min(1.0, 2 * _distribution_of_u(*self.sizes)[u])


@lru_cache(maxsize=64)
def _distribution_of_u(num_a: int, num_b: int) -> list[float]:
    """P(U <= u) for u from 0, of two sides with the same distribution; normal for more than 2500 pairs.

    The number of orders with each U is a coefficient of the Gaussian binomial (a + b over a).
    """
    most = num_a * num_b
    # Product of the two numbers of blocks up to which the null distribution of U is enumerated
    if most > 2500:
        distances = np.arange(1, most + 2) - most / 2
        probabilities: list[float] = scipy.special.ndtr(
            distances / math.sqrt(most * (num_a + num_b + 1) / 12)
        ).tolist()
        return probabilities
    counts = [1] + [0] * most
    for i in range(1, num_a + 1):
        for u in range(most, num_b + i - 1, -1):
            counts[u] -= counts[u - num_b - i]
        for u in range(i, most + 1):
            counts[u] += counts[u - i]
    return [cumulated / math.comb(num_a + num_b, num_a) for cumulated in accumulate(counts)]


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
    p_value = 2 * float(scipy.special.stdtr(df, -abs(slope) / standard_error)) if standard_error > 0 else 0.0
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


def pass_at(k: int, num_correct: int, num_samples: int) -> float:
    """Probability that one of k samples is correct: 1 - C(n - c, k) / C(n, k), for k <= n samples, c of them right.

    Unbiased, unlike 1 - (1 - c / n)^k: M. Chen et al., *Evaluating large language models trained on code*, 2021,
    section 2.1.
    """
    return 1 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def wilson_interval(num_correct: int, num_questions: int, confidence: float) -> Interval:
    """E. B. Wilson's interval of a share (JASA 22, 1927): the shares that a score test does not reject."""
    z, n = float(scipy.special.ndtri((1 + confidence) / 2)), num_questions
    centre = (2 * num_correct + z**2) / (2 * (n + z**2))
    half = z * math.sqrt(z**2 + 4 * num_correct * (1 - num_correct / n)) / (2 * (n + z**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def newcombe_interval(both: int, only_a: int, only_b: int, neither: int, confidence: float) -> Interval:
    """Interval of the difference of two paired shares, B - A, one answer per question.

    Wilson's limits of the two shares, squared and added, with their correlation phi: method 10 of R. G. Newcombe,
    *Improved confidence intervals for the difference between binomial proportions based on paired data*, Statistics
    in Medicine 17, 1998, 2635-2650. The arguments count questions that both sides, one, or neither got right.
    """
    n = both + only_a + only_b + neither
    share_a, share_b = (both + only_a) / n, (both + only_b) / n
    low_a, high_a = wilson_interval(both + only_a, n, confidence)
    low_b, high_b = wilson_interval(both + only_b, n, confidence)
    phi = _phi(both, only_a, only_b, neither)
    below, above = (
        math.sqrt(max(0.0, one**2 - 2 * phi * one * other + other**2))
        for one, other in ((share_b - low_b, high_a - share_a), (high_b - share_b, share_a - low_a))
    )
    return max(-1.0, share_b - share_a - below), min(1.0, share_b - share_a + above)


def _phi(both: int, only_a: int, only_b: int, neither: int) -> float:
    """Correlation of the two sides; a positive one is corrected for continuity, 0 where a margin is empty."""
    n = both + only_a + only_b + neither
    margins = (both + only_a) * (only_b + neither) * (both + only_b) * (only_a + neither)
    if margins == 0:
        return 0.0
    excess = both * neither - only_a * only_b
    return (max(excess - n / 2, 0) if excess > 0 else excess) / math.sqrt(margins)


def mean_interval(differences: Sequence[Fraction], confidence: float) -> Interval:
    """Student's t over the questions.

    Where all differences are equal it would claim certainty; the interval then has the width of the share of
    questions that may still differ: Wilson's limit for none of n.
    """
    n, values = len(differences), [float(value) for value in differences]
    mean = fmean(values)
    if len(set(differences)) == 1:
        half = wilson_interval(0, n, confidence)[1]
    else:
        half = t_quantile((1 + confidence) / 2, n - 1) * stdev(values) / math.sqrt(n)
    return max(-1.0, mean - half), min(1.0, mean + half)


def sign_flip_p(differences: Sequence[Fraction]) -> float:
    """Two-sided exact test that the differences of questions are symmetric around 0.

    The probability that |sum| reaches the observed one when each sign is a fair coin, enumerated over all possible
    sums. With one answer per question it is the exact test of McNemar (Psychometrika 12, 1947).
    """
    nonzero = [value for value in differences if value]
    if not nonzero:
        return 1.0
    scale = math.lcm(*(value.denominator for value in nonzero))
    steps = [abs(int(value * scale)) for value in nonzero]
    divisor = math.gcd(*steps)
    steps = [step // divisor for step in steps]
    observed, width = abs(int(sum(nonzero) * scale)) // divisor, sum(steps)
    # Up to so many, the distribution of a sum is enumerated; beyond, many questions get a normal approximation
    if width * len(steps) > (1 << 25):
        return math.erfc(observed / math.sqrt(sum(step**2 for step in steps)) / math.sqrt(2))
    chances = np.ones(1)
    for step in steps:
        chances = (np.pad(chances, (0, 2 * step)) + np.pad(chances, (2 * step, 0))) / 2
    return min(1.0, float(chances[: width - observed + 1].sum() + chances[width + observed :].sum()))


def minimum_detectable_difference(differences: Sequence[Fraction], confidence: float) -> float:
    """The smallest difference of shares that these questions detect with a power of 0.8.

    (z(1 - alpha / 2) + z(power)) * sqrt(mean d^2 / n): with one answer per question, mean d^2 is the share of
    questions on which the sides disagree. Without any, one is assumed.
    """
    n = len(differences)
    square = (float(sum(value**2 for value in differences)) or 1.0) / n
    return float(scipy.special.ndtri((1 + confidence) / 2) + scipy.special.ndtri(POWER)) * math.sqrt(square / n)
