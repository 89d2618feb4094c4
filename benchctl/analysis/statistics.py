"""Is a change real? Ratios over blocks, their interval, their test, and the verdict against a margin.

The unit is one block, a fresh server per variant: never a request or a step, which share batches and clocks.

Paired: d_b = ln(B_b / A_b). Below 15 blocks a Student-t interval, because a percentile bootstrap of five blocks
that claims 95 % covers about 85 %; from 15 on the BCa bootstrap over blocks, never inside the t interval. Where
the order within the blocks varied, the effect of the place is estimated and taken out, so that a drift inside
the blocks neither shifts nor widens the interval; that costs one degree of freedom and is done from 6 blocks
on, whether or not there is a drift, because a rule that looks first is no longer a 95 % rule. The test is the
exact sign-flip test. Unpaired: the Hodges-Lehmann shift with the interval that inverts the Mann-Whitney test.

A margin m is a factor of 1 + m either way, so that swapping the two sides mirrors the verdict. In per cent
this is lopsided: a margin of 10 % reaches from -9.1 % to +10 %.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median, variance
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from benchctl.analysis.metric_table import Direction
from benchctl.analysis.rank_sum import PairwiseShifts, pairwise_shifts, rank_sum_p
from benchctl.analysis.screening import MIN_PAIRED_BLOCKS, MIN_UNPAIRED_BLOCKS
from benchctl.analysis.uncertainty import (
    BlockBootstrap,
    StudentT,
    Uncertainty,
    adjusted_means,
    t_quantile,
)

__all__ = [
    "MIN_PAIRED_BLOCKS",
    "MIN_UNPAIRED_BLOCKS",
    "PooledSlope",
    "RatioEstimate",
    "Verdict",
    "decision_alpha",
    "estimate_paired",
    "estimate_unpaired",
    "log_margin",
    "log_ratios",
    "sign_flip_p",
    "t_quantile",
    "verdict_of",
]

Verdict = Literal["regression", "improvement", "equivalent", "inconclusive", "changed"]
"""``changed`` is what leaves the margin for a metric of which neither direction is the better one."""
Method = Literal["t", "bca", "hodges-lehmann"]

MIN_BOOTSTRAP_BLOCKS: Final = 15
POWER: Final = 0.8
MAX_EXACT_BLOCKS: Final = 30
_SIGN_FLIPS: Final = 99_999
_LEAST_ALPHA: Final = 1e-12


@dataclass(frozen=True, slots=True)
class PooledSlope:
    """What one position later in a block adds, estimated from all runs of an experiment (``position_effect``).

    ``information`` is the sum of squares of the positions less what blocks and arms explain of them: the variance
    of the slope is that of a run divided by it.
    """

    log_per_position: float
    information: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioEstimate:
    """B over A. What one block cannot tell (interval, test, detectable effect) is None.

    Invariant: where they are known, ``ci_low <= ci_high``; with a t interval the ratio lies between them.
    ``num_blocks`` is that of the smaller side. ``place_effect`` is the log-ratio that one place later in the block
    adds, None where it was not taken out.
    """

    num_blocks: int
    is_paired: bool
    confidence: float
    log_ratio: float
    method: Method = "t"
    uncertainty: Uncertainty | None = None
    p_value: float | None = None
    place_effect: float | None = None

    @property
    def ratio(self) -> float:
        return math.exp(self.log_ratio)

    @property
    def standard_error(self) -> float | None:
        return None if self.uncertainty is None else self.uncertainty.standard_error

    @property
    def degrees_of_freedom(self) -> float | None:
        return None if self.uncertainty is None else self.uncertainty.degrees_of_freedom

    def interval_at(self, confidence: float) -> tuple[float, float] | None:
        """Bounds of the log-ratio at another confidence; None where the blocks cannot give it."""
        return None if self.uncertainty is None else self.uncertainty.interval(confidence)

    @property
    def log_interval(self) -> tuple[float, float] | None:
        return self.interval_at(self.confidence)

    @property
    def half_width(self) -> float | None:
        """Half the interval in logarithms."""
        interval = self.log_interval
        return None if interval is None else (interval[1] - interval[0]) / 2

    @property
    def ci_low(self) -> float | None:
        return None if self.log_interval is None else math.exp(self.log_interval[0])

    @property
    def ci_high(self) -> float | None:
        return None if self.log_interval is None else math.exp(self.log_interval[1])

    @property
    def detectable_frac(self) -> float | None:
        """Smallest change that these blocks would show four times in five.

        exp((t(1 - alpha / 2) + t(power)) * standard error) - 1.
        """
        if self.standard_error is None or self.degrees_of_freedom is None:
            return None
        upper = 1 - (1 - self.confidence) / 2
        both = t_quantile(upper, self.degrees_of_freedom) + t_quantile(POWER, self.degrees_of_freedom)
        return math.expm1(both * self.standard_error)


def log_ratios(a: Sequence[float], b: Sequence[float]) -> tuple[float, ...]:
    """d_b = ln(B_b / A_b) for each block. Both sides are positive and of one length."""
    return tuple(math.log(after) - math.log(before) for before, after in zip(a, b, strict=True))


def estimate_paired(
    differences: Sequence[float],
    confidence: float = 0.95,
    places: Sequence[float] | None = None,
    *,
    slope: PooledSlope | None = None,
) -> RatioEstimate:
    """Mean of the block log-ratios with its interval and the sign-flip test.

    ``places`` is, for each block, the place of B in it less the place of A. Where they vary over at least 6 blocks,
    the estimate is the intercept of d = mu + beta * places (analysis of covariance): the ratio at equal places,
    with n - 2 degrees of freedom and s^2 (1/n + mean(x)^2 / Sxx) as its variance. Without, it is the mean, with
    s^2 / n and n - 1.
    """
    n = len(differences)
    if n < 2:
        return RatioEstimate(num_blocks=n, is_paired=True, confidence=confidence, log_ratio=fmean(differences))
    d = np.asarray(differences, dtype=float)
    if slope is not None and places is not None:
        return _estimate_pooled(d, np.asarray(places, dtype=float), slope, confidence)
    x = _covariate(places, n)
    centre = float(adjusted_means(np.ones((1, n)), d, x)[0])
    own_slope, standard_error, df = _least_squares(d, x)
    is_bootstrapped = n >= MIN_BOOTSTRAP_BLOCKS
    uncertainty: Uncertainty = StudentT(centre, standard_error, df)
    if is_bootstrapped:
        drawn_places = None if x is None else tuple(x.tolist())
        uncertainty = BlockBootstrap(centre, tuple(d.tolist()), drawn_places, standard_error, df)
    return RatioEstimate(
        num_blocks=n,
        is_paired=True,
        confidence=confidence,
        log_ratio=centre,
        method="bca" if is_bootstrapped else "t",
        uncertainty=uncertainty,
        p_value=sign_flip_p(differences),
        place_effect=own_slope,
    )


def _estimate_pooled(
    d: NDArray[np.float64], x: NDArray[np.float64], slope: PooledSlope, confidence: float
) -> RatioEstimate:
    n = len(d)
    adjusted = d - slope.log_per_position * x
    squares = float(np.sum((x - x.mean()) ** 2))
    df = n - 1 - min(1.0, squares / 2 / slope.information)
    variance_of_block = float(np.sum((adjusted - adjusted.mean()) ** 2)) / df
    standard_error = math.sqrt(variance_of_block * (1 / n + float(x.mean()) ** 2 / (2 * slope.information)))
    centre = float(adjusted.mean())
    return RatioEstimate(
        num_blocks=n,
        is_paired=True,
        confidence=confidence,
        log_ratio=centre,
        method="t",
        uncertainty=StudentT(centre, standard_error, df),
        p_value=sign_flip_p(adjusted.tolist()),
        place_effect=slope.log_per_position,
    )


def _covariate(places: Sequence[float] | None, num_blocks: int) -> NDArray[np.float64] | None:
    """The places, where they can be taken out."""
    if places is None or num_blocks < MIN_PAIRED_BLOCKS or len(set(places)) < 2:
        return None
    return np.asarray(places, dtype=float)


def _least_squares(d: NDArray[np.float64], x: NDArray[np.float64] | None) -> tuple[float | None, float, float]:
    """Slope of d over x, standard error of the intercept at x = 0, degrees of freedom."""
    n, off_d = len(d), d - d.mean()
    if x is None:
        return None, math.sqrt(float(np.sum(off_d**2)) / (n - 1) / n), n - 1
    off_x = x - x.mean()
    squares = float(np.sum(off_x**2))
    slope = float(np.sum(off_x * off_d)) / squares
    residual = float(np.sum((off_d - slope * off_x) ** 2)) / (n - 2)
    return slope, math.sqrt(residual * (1 / n + float(x.mean()) ** 2 / squares)), n - 2


def estimate_unpaired(a: Sequence[float], b: Sequence[float], confidence: float = 0.95) -> RatioEstimate:
    """Hodges-Lehmann shift of the logarithms: the median of all differences, with the Mann-Whitney test.

    The standard error, which only plans use, is Welch's: se^2 = s_a^2 / n_a + s_b^2 / n_b.
    """
    log_a, log_b = [math.log(value) for value in a], [math.log(value) for value in b]
    n = min(len(a), len(b))
    if n < 2:
        log_ratio = fmean(log_b) - fmean(log_a)
        return RatioEstimate(num_blocks=n, is_paired=False, confidence=confidence, log_ratio=log_ratio)
    shifts = pairwise_shifts(log_a, log_b)
    parts = [(variance(values) / len(values), len(values)) for values in (log_a, log_b)]
    squared = sum(part for part, _ in parts)
    spread = sum(part**2 / (count - 1) for part, count in parts)
    df = squared**2 / spread if spread > 0 else float(len(a) + len(b) - 2)
    return RatioEstimate(
        num_blocks=n,
        is_paired=False,
        confidence=confidence,
        log_ratio=median(shifts),
        method="hodges-lehmann",
        uncertainty=PairwiseShifts(shifts, (len(a), len(b)), math.sqrt(squared), df),
        p_value=rank_sum_p(log_a, log_b),
    )


def sign_flip_p(differences: Sequence[float]) -> float:
    """Two-sided exact test that the differences are symmetric around 0: no distribution is assumed.

    The share of all 2^n choices of signs whose |sum| reaches the observed one; 2 / 2^n is the least possible. They
    are counted from the sums of either half of the blocks. Above 30 blocks the choices are drawn (99,999 of them,
    always the same) and the observed one is counted.
    """
    values = np.asarray(differences, dtype=float)
    observed = abs(math.fsum(differences)) - 1e-12 * float(np.sum(np.abs(values)))
    if len(values) <= MAX_EXACT_BLOCKS:
        half = (len(values) + 1) // 2
        left = values[0] + _signed_sums(
            values[1:half]
        )  # the first sign may stay: turning all leaves |sum| as it is
        right = np.sort(_signed_sums(values[half:]))
        above = len(right) - np.searchsorted(right, observed - left, side="left")
        below = np.searchsorted(right, -observed - left, side="right")
        return min(1.0, float(np.sum(above + below)) / (len(left) * len(right)))
    signs = np.random.default_rng(len(values)).choice([-1.0, 1.0], size=(_SIGN_FLIPS, len(values)))
    return float((1 + np.sum(np.abs(signs @ values) >= observed)) / (1 + _SIGN_FLIPS))


def _signed_sums(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The sums of all choices of signs."""
    sums = np.zeros(1)
    for value in values:
        sums = np.concatenate([sums + value, sums - value])
    return sums


def log_margin(margin_frac: float) -> float:
    """A margin in logarithms: ln(1 + m)."""
    return math.log1p(margin_frac)


def verdict_of(
    estimate: RatioEstimate, margin_frac: float, direction: Direction, confidence: float | None = None
) -> Verdict:
    """The interval against the margin, for the direction that is better; at another ``confidence`` where given.

    Wholly beyond the margin on the worse side: regression; on the better side: improvement; wholly inside:
    equivalent; anything else, and no interval: inconclusive. "Not significant" is never "the same".
    """
    interval = estimate.interval_at(estimate.confidence if confidence is None else confidence)
    if interval is None:
        return "inconclusive"
    low, high = interval
    margin = log_margin(margin_frac)
    if -margin <= low and high <= margin:
        return "equivalent"
    if -margin <= high and low <= margin:
        return "inconclusive"
    if direction == "none":
        return "changed"
    return "regression" if (low > margin) == (direction == "lower") else "improvement"


def decision_alpha(estimate: RatioEstimate, margin_frac: float) -> float:
    """The least alpha at which the interval of 1 - alpha decides: the p-value of the verdict.

    A wrong verdict needs an interval that misses the truth, so that this is a valid p-value of "the verdict is
    wrong" and several can be corrected together. 1 where nothing decides.
    """
    low, high = math.log(_LEAST_ALPHA), 0.0
    if verdict_of(estimate, margin_frac, "none", 0.0) == "inconclusive":
        return 1.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        decides = verdict_of(estimate, margin_frac, "none", 1 - math.exp(middle)) != "inconclusive"
        low, high = (low, middle) if decides else (middle, high)
    return math.exp(high)
