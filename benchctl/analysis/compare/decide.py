"""Correction for several tests: every deciding metric in every cell is a chance to be wrong.

Margins and verdicts: the interval of a ratio against the change that counts and the change that does not.
Number of blocks: the effect that a number can detect, and the number that an effect or a verdict takes.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal, TypeAlias

import numpy as np
import scipy  # loads scipy.special when it is called for the first time: 0.1 s
from numpy.typing import NDArray

from benchctl.analysis.metrics.table import Direction
from benchctl.analysis.statistics.components import MAX_BLOCKS_NEEDED
from benchctl.analysis.statistics.estimate import (
    DEFAULT_ESTIMATOR,
    MIN_PAIRED_BLOCKS,
    MIN_UNPAIRED_BLOCKS,
    Estimator,
    RatioEstimate,
)
from benchctl.analysis.statistics.intervals import POWER, Interval, t_quantile

_NUM_DIRECTIONS: Final = 4_000
_SEED: Final = 1993
"""Fixed, so that the level of a comparison is always the same."""


BlockScores: TypeAlias = Mapping[int, float]
"""One test: the contribution of each block to its estimate beyond the centre, its residual times its weight."""


def joint_level(tests: Sequence[BlockScores], alpha: float) -> float:
    """The level, from alpha / m to alpha, that m tests share.

    For scores of length 1, the cosine c of a random direction is a t statistic, t = c sqrt(n - 1) / sqrt(1 - c^2).
    The level belongs to the c that the largest of all tests exceeds in the share alpha of the directions.
    """
    if len(tests) < 2:
        return alpha
    blocks = sorted({block for test in tests for block in test})
    scores = np.array([[test.get(block, 0.0) for block in blocks] for test in tests])
    scale = np.sqrt(np.sum(scores**2, axis=1, keepdims=True))
    scores = np.divide(scores, scale, out=np.zeros_like(scores), where=scale > 0)
    cosines = np.max(np.abs(_directions(len(blocks)) @ scores.T), axis=1)
    cosine, df = float(np.quantile(cosines, 1 - alpha)), len(blocks) - 1
    level = 2 * float(scipy.special.stdtr(df, -cosine * math.sqrt(df / max(1 - cosine**2, 1e-12))))
    return min(max(level, alpha / len(tests)), alpha)


@lru_cache(maxsize=16)
def _directions(num_blocks: int) -> NDArray[np.float64]:
    """Unit vectors of blocks, a row each, uniformly distributed over all directions."""
    vectors = np.random.default_rng([_SEED, num_blocks]).normal(size=(_NUM_DIRECTIONS, num_blocks))
    directions: NDArray[np.float64] = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return directions


def holm_levels(p_values: Sequence[float], alpha: float) -> tuple[float, ...]:
    """The alpha of each test, in the order of ``p_values``.

    A test decides where its p-value does not exceed it. Tests after the first that fails get the level of that one.
    """
    levels, level, has_failed = [0.0] * len(p_values), 0.0, False
    for rank, index in enumerate(np.argsort(p_values, kind="stable")):
        if not has_failed:
            level = alpha / (len(p_values) - rank)
            has_failed = p_values[index] > level
        levels[index] = level
    return tuple(levels)


Verdict = Literal["regression", "improvement", "equivalent", "inconclusive", "changed"]
"""``changed`` is the verdict beyond the margin for a metric without a better direction."""

_LEAST_ALPHA: Final = 1e-12


@dataclass(frozen=True, slots=True)
class Margins:
    """Fractions. ``equivalence_frac`` exceeds ``change_frac`` only where the user named it."""

    change_frac: float
    """Beyond it a change is called."""
    equivalence_frac: float
    """Inside it two sides are called equivalent."""
    is_noise_floor: bool = False
    """The change margin is the noise floor of the metric, larger than the threshold."""

    @property
    def log_change(self) -> float:
        return math.log1p(self.change_frac)

    @property
    def log_equivalence(self) -> float:
        return math.log1p(self.equivalence_frac)

    @property
    def log_bands(self) -> tuple[float, ...]:
        """The margins that a chart shades around "equal", the wider first; one where both are the same."""
        return tuple(sorted({self.log_change, self.log_equivalence}, reverse=True))

    def leave_between(self, log_ratio: float) -> bool:
        """True for a ratio outside equivalence and inside the change margin, where no block helps."""
        return self.log_equivalence <= abs(log_ratio) <= self.log_change


def margins_of(threshold_frac: float, floor_frac: float = 0.0, equivalence_frac: float | None = None) -> Margins:
    """A change beyond the larger of threshold and floor; equivalence inside the threshold or the named margin."""
    return Margins(
        change_frac=max(threshold_frac, floor_frac),
        equivalence_frac=threshold_frac if equivalence_frac is None else equivalence_frac,
        is_noise_floor=floor_frac > threshold_frac,
    )


def verdict_of(interval: Interval | None, margins: Margins, direction: Direction) -> Verdict:
    """The interval of a log-ratio against the margins, for the direction that is better.

    Wholly inside the equivalence margin: equivalent, also where a named one reaches beyond the change margin.
    Wholly beyond the change margin on the worse side: regression; on the better side: improvement. Anything else,
    and no interval: inconclusive. "Not significant" is never "the same".
    """
    if interval is None:
        return "inconclusive"
    low, high = interval
    if -margins.log_equivalence <= low and high <= margins.log_equivalence:
        return "equivalent"
    if -margins.log_change <= high and low <= margins.log_change:
        return "inconclusive"
    if direction == "none":
        return "changed"
    return "regression" if (low > margins.log_change) == (direction == "lower") else "improvement"


def decision_alpha(estimate: RatioEstimate, margins: Margins) -> float:
    """The least alpha at which the interval of 1 - alpha decides: the p-value of the verdict.

    A wrong verdict needs an interval that misses the truth, so that this is a valid p-value of "the verdict is
    wrong" and several can be corrected together. 1 where nothing decides.
    """
    if verdict_of(estimate.interval_at(0.0), margins, "none") == "inconclusive":
        return 1.0
    low, high = math.log(_LEAST_ALPHA), 0.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        decides = verdict_of(estimate.interval_at(1 - math.exp(middle)), margins, "none") != "inconclusive"
        low, high = (low, middle) if decides else (middle, high)
    return math.exp(high)


ROBUST_WIDTH: Final = 1.06
"""Width of a robust interval relative to that of t, with normal noise: it gives a planned change of 8 blocks its
power of 0.8."""
ASSUMED_LOG_SD: Final = 0.02
"""Assumed scatter of block log-ratios where no A/A experiment is on file; reported as an assumption."""


def minimum_detectable_effect(
    log_sd: float,
    num_blocks: int,
    *,
    num_tests: float = 1,
    margin_frac: float = 0.0,
    estimator: Estimator = DEFAULT_ESTIMATOR,
) -> float:
    """Smallest change, as a fraction, that an experiment of at least 6 blocks detects with a power of 0.8.

    exp(ln(1 + margin) + (t(1 - 0.05 / 2m) + t(power)) * sd / sqrt(n)) - 1 with n - 2 degrees of freedom, for m
    independent tests, and a little more with the robust estimator.
    """
    df = num_blocks - 2
    width = t_quantile(1 - 0.05 / (2 * num_tests), df) + t_quantile(POWER, df)
    if estimator == "robust":
        width *= ROBUST_WIDTH
    return math.expm1(math.log1p(margin_frac) + width * log_sd / math.sqrt(num_blocks))


def blocks_to_detect(
    change_frac: float, log_sd: float, *, num_tests: float = 1, estimator: Estimator = DEFAULT_ESTIMATOR
) -> int | None:
    """The fewest blocks that detect ``change_frac``; None where a thousand do not suffice."""
    for n in range(MIN_PAIRED_BLOCKS, MAX_BLOCKS_NEEDED + 1):
        if minimum_detectable_effect(log_sd, n, num_tests=num_tests, estimator=estimator) <= change_frac:
            return n
    return None


def blocks_for_verdict(estimate: RatioEstimate, margins: Margins, confidence: float | None = None) -> int | None:
    """Number of blocks with which an inconclusive comparison would end, if ratio and scatter stay as they are.

    The least n, from 6 on (4 unpaired), whose half t-interval does not exceed the distance of the ratio from the
    margin that it has to clear. None where that is more than a thousand, where a single block has no scatter, and
    where the ratio is between equivalence and change margin, where no number of blocks decides.
    """
    away = abs(estimate.log_ratio)
    distance = max(margins.log_equivalence - away, away - margins.log_change)
    if estimate.uncertainty is None or distance <= 0:
        return None
    sd = estimate.uncertainty.standard_error * math.sqrt(estimate.num_blocks)
    df_lost = estimate.num_blocks - estimate.uncertainty.degrees_of_freedom if estimate.is_paired else 1
    upper = 1 - (1 - (estimate.confidence if confidence is None else confidence)) / 2

    def is_enough(n: int) -> bool:
        return t_quantile(upper, n - df_lost) * sd / math.sqrt(n) <= distance

    numbers = range(MIN_PAIRED_BLOCKS if estimate.is_paired else MIN_UNPAIRED_BLOCKS, MAX_BLOCKS_NEEDED + 1)
    least = bisect_left(numbers, True, key=is_enough)
    return numbers[least] if least < len(numbers) else None


def chance_of_verdict(estimate: RatioEstimate, margins: Margins, num_blocks: int, confidence: float) -> float:
    """Chance that ``num_blocks`` blocks in all, more than there are, end in a verdict at ``confidence``.

    Conditional power, averaged over the ratios that the blocks so far leave possible (D. J. Spiegelhalter, L. S.
    Freedman, P. R. Blackburn, *Monitoring clinical trials: conditional or predictive power?*, Controlled Clinical
    Trials 7, 1986, 8-17). From n to N blocks the centre moves by a t distribution of variance se^2 (1 - n / N), and
    it decides where the half-width, then t se sqrt(n / N), leaves it inside or beyond the margins. Zero for one
    block, which has no scatter.
    """
    if estimate.uncertainty is None:
        return 0.0
    df, part = estimate.uncertainty.degrees_of_freedom, estimate.num_blocks / num_blocks
    upper, df_then = 1 - (1 - confidence) / 2, df + num_blocks - estimate.num_blocks
    standard_error = estimate.uncertainty.standard_error
    half = t_quantile(upper, df_then) * standard_error * math.sqrt(part)
    spread = max(standard_error * math.sqrt(1 - part), 1e-300)  # without scatter the centre stays where it is
    inside, beyond = max(0.0, margins.log_equivalence - half), margins.log_change + half
    ends = np.array([-beyond, -inside, inside, beyond])
    low, from_inside, to_inside, high = scipy.special.stdtr(df, (ends - estimate.log_ratio) / spread).tolist()
    return float(low + (to_inside - from_inside) + (1 - high))
