"""Is a change real? Ratios over blocks, their interval, their exact test, and the verdict against a margin.

The unit is one block, a fresh server per variant: never a request or a step, which share batches and clocks.
Paired: d_b = ln(B_b / A_b), its mean and a Student-t interval over the n blocks. A t interval rather than a
bootstrap, because a percentile bootstrap of five blocks that claims 95 % covers about 85 %. Unpaired: Welch's
interval on the logarithms, for experiments that share no blocks.

A margin m is a factor of 1 + m either way, so that swapping the two sides mirrors the verdict. In per cent
this is lopsided: a margin of 10 % reaches from -9.1 % to +10 %.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev, variance
from typing import Final, Literal

import numpy as np
from scipy.special import stdtr, stdtrit

from benchctl.analysis.metric_table import Direction

Verdict = Literal["regression", "improvement", "equivalent", "inconclusive", "changed"]
"""``changed`` is what leaves the margin for a metric of which neither direction is the better one."""

POWER: Final = 0.8
MAX_EXACT_BLOCKS: Final = 20
MAX_BLOCKS_NEEDED: Final = 1000
_RESAMPLES: Final = 99_999


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioEstimate:
    """B over A. What one block cannot tell (interval, test, detectable effect) is None.

    Invariant: where they are known, ``ci_low <= ratio <= ci_high``. ``num_blocks`` is that of the smaller side.
    """

    num_blocks: int
    is_paired: bool
    confidence: float
    log_ratio: float
    standard_error: float | None = None
    degrees_of_freedom: float | None = None
    p_value: float | None = None

    @property
    def ratio(self) -> float:
        return math.exp(self.log_ratio)

    @property
    def half_width(self) -> float | None:
        """Half the interval in logarithms: t(1 - alpha / 2, df) * standard error."""
        if self.standard_error is None or self.degrees_of_freedom is None:
            return None
        return t_quantile(1 - (1 - self.confidence) / 2, self.degrees_of_freedom) * self.standard_error

    @property
    def log_interval(self) -> tuple[float, float] | None:
        half = self.half_width
        return None if half is None else (self.log_ratio - half, self.log_ratio + half)

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
        if self.half_width is None or self.standard_error is None or self.degrees_of_freedom is None:
            return None
        return math.expm1(self.half_width + t_quantile(POWER, self.degrees_of_freedom) * self.standard_error)


def t_quantile(probability: float, degrees_of_freedom: float) -> float:
    """Quantile of Student's t distribution."""
    return float(stdtrit(degrees_of_freedom, probability))


def log_ratios(a: Sequence[float], b: Sequence[float]) -> tuple[float, ...]:
    """d_b = ln(B_b / A_b) for each block. Both sides are positive and of one length."""
    return tuple(math.log(after) - math.log(before) for before, after in zip(a, b, strict=True))


def estimate_paired(differences: Sequence[float], confidence: float = 0.95) -> RatioEstimate:
    """Mean of the block log-ratios; standard error sd / sqrt(n); n - 1 degrees of freedom; sign-flip test."""
    n = len(differences)
    if n < 2:
        return RatioEstimate(num_blocks=n, is_paired=True, confidence=confidence, log_ratio=fmean(differences))
    return RatioEstimate(
        num_blocks=n,
        is_paired=True,
        confidence=confidence,
        log_ratio=fmean(differences),
        standard_error=stdev(differences) / math.sqrt(n),
        degrees_of_freedom=n - 1,
        p_value=sign_flip_p(differences),
    )


def estimate_unpaired(a: Sequence[float], b: Sequence[float], confidence: float = 0.95) -> RatioEstimate:
    """Difference of the mean logarithms, with Welch's standard error and degrees of freedom.

    se^2 = s_a^2 / n_a + s_b^2 / n_b; df = se^4 / ((s_a^2 / n_a)^2 / (n_a - 1) + (s_b^2 / n_b)^2 / (n_b - 1)).
    """
    log_a, log_b = [math.log(value) for value in a], [math.log(value) for value in b]
    log_ratio = fmean(log_b) - fmean(log_a)
    n = min(len(a), len(b))
    if n < 2:
        return RatioEstimate(num_blocks=n, is_paired=False, confidence=confidence, log_ratio=log_ratio)
    parts = [(variance(values) / len(values), len(values)) for values in (log_a, log_b)]
    squared = sum(part for part, _ in parts)
    spread = sum(part**2 / (count - 1) for part, count in parts)
    df = squared**2 / spread if spread > 0 else float(len(a) + len(b) - 2)
    return RatioEstimate(
        num_blocks=n,
        is_paired=False,
        confidence=confidence,
        log_ratio=log_ratio,
        standard_error=math.sqrt(squared),
        degrees_of_freedom=df,
        p_value=_welch_p(log_ratio, math.sqrt(squared), df),
    )


def _welch_p(difference: float, standard_error: float, degrees_of_freedom: float) -> float:
    if standard_error == 0:
        return 1.0 if difference == 0 else 0.0
    return float(2 * stdtr(degrees_of_freedom, -abs(difference) / standard_error))


def sign_flip_p(differences: Sequence[float]) -> float:
    """Two-sided exact test that the differences are symmetric around 0: no distribution is assumed.

    The share of all 2^n choices of signs whose |sum| reaches the observed one; 2 / 2^n is the least possible.
    Above 20 blocks the choices are drawn (99,999 of them, always the same) and the observed one is counted.
    """
    values = np.asarray(differences, dtype=float)
    observed = abs(math.fsum(differences)) * (1 - 1e-12)
    if len(values) <= MAX_EXACT_BLOCKS:
        sums = values[:1]  # the first sign may stay: turning all signs leaves |sum| as it is
        for value in values[1:]:
            sums = np.concatenate([sums + value, sums - value])
        return float(np.mean(np.abs(sums) >= observed))
    signs = np.random.default_rng(len(values)).choice([-1.0, 1.0], size=(_RESAMPLES, len(values)))
    return float((1 + np.sum(np.abs(signs @ values) >= observed)) / (1 + _RESAMPLES))


def log_margin(margin_frac: float) -> float:
    """A margin in logarithms: ln(1 + m)."""
    return math.log1p(margin_frac)


def verdict_of(estimate: RatioEstimate, margin_frac: float, direction: Direction) -> Verdict:
    """The interval against the margin, for the direction that is better.

    Wholly beyond the margin on the worse side: regression; on the better side: improvement; wholly inside:
    equivalent; anything else, and fewer than two blocks: inconclusive. "Not significant" is never "the same".
    """
    interval = estimate.log_interval
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


def blocks_for_verdict(estimate: RatioEstimate, margin_frac: float) -> int | None:
    """Blocks that would end an inconclusive comparison, if ratio and scatter stay as they are.

    The least n whose half interval is no wider than the distance of the ratio from the nearer margin; None when
    that is more than a thousand, or when one block says nothing of the scatter.
    """
    if estimate.standard_error is None:
        return None
    sd = estimate.standard_error * math.sqrt(estimate.num_blocks)
    distance = abs(abs(estimate.log_ratio) - log_margin(margin_frac))
    upper = 1 - (1 - estimate.confidence) / 2
    for n in range(2, MAX_BLOCKS_NEEDED + 1):
        if t_quantile(upper, n - 1) * sd / math.sqrt(n) <= distance:
            return n
    return None


def blocks_for_tests(num_tests: int, confidence: float = 0.95) -> int:
    """Blocks with which the sign-flip test can reach alpha / m in each of m tests: ceil(log2(2 m / alpha))."""
    return math.ceil(math.log2(2 * num_tests / (1 - confidence)))
