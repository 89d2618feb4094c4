"""Number of blocks: the effect that a number can detect, and the number that an effect or a verdict takes."""

import math
from bisect import bisect_left
from typing import Final

from benchctl.analysis.statistics.block_ratio import DEFAULT_ESTIMATOR, POWER, Estimator, RatioEstimate
from benchctl.analysis.statistics.intervals import t_quantile
from benchctl.analysis.statistics.margins import Margins, log_margin
from benchctl.analysis.statistics.screening import MIN_PAIRED_BLOCKS, MIN_UNPAIRED_BLOCKS

MAX_BLOCKS_NEEDED: Final = 1000
ROBUST_WIDTH: Final = 1.06
"""Width of a robust interval relative to that of t, with normal noise: it gives a planned change of 8 blocks its
power of 0.8."""
ASSUMED_LOG_SD: Final = 0.02
"""Assumed scatter of block log-ratios where no A/A experiment is on file; reported as an assumption."""


def minimum_detectable_effect(
    log_sd: float,
    num_blocks: int,
    *,
    num_tests: int = 1,
    margin_frac: float = 0.0,
    confidence: float = 0.95,
    estimator: Estimator = DEFAULT_ESTIMATOR,
) -> float | None:
    """Smallest change, as a fraction, that an experiment detects with a power of 0.8.

    exp(ln(1 + margin) + (t(1 - alpha / 2m) + t(power)) * sd / sqrt(n)) - 1 with n - 2 degrees of freedom, for m
    independent tests, and a little more with the robust estimator. None below 6 blocks, which give no verdict.
    """
    if num_blocks < MIN_PAIRED_BLOCKS:
        return None
    df = num_blocks - 2
    both = t_quantile(1 - (1 - confidence) / (2 * num_tests), df) + t_quantile(POWER, df)
    width = ROBUST_WIDTH if estimator == "robust" else 1.0
    return math.expm1(log_margin(margin_frac) + width * both * log_sd / math.sqrt(num_blocks))


def blocks_to_detect(
    change_frac: float,
    log_sd: float,
    *,
    num_tests: int = 1,
    margin_frac: float = 0.0,
    confidence: float = 0.95,
    estimator: Estimator = DEFAULT_ESTIMATOR,
) -> int | None:
    """The fewest blocks that detect ``change_frac``; None where a thousand do not suffice."""
    for n in range(MIN_PAIRED_BLOCKS, MAX_BLOCKS_NEEDED + 1):
        effect = minimum_detectable_effect(
            log_sd, n, num_tests=num_tests, margin_frac=margin_frac, confidence=confidence, estimator=estimator
        )
        if effect is not None and effect <= change_frac:
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
    return blocks_for_distance(estimate, distance, estimate.confidence if confidence is None else confidence)


def blocks_for_distance(estimate: RatioEstimate, distance: float, confidence: float) -> int | None:
    """The least number of blocks, from 6 on (4 unpaired), whose half t-interval does not exceed ``distance``, a
    logarithm, if the scatter stays as it is.

    None for more than a thousand, for a distance that is not positive, and for a single block.
    """
    se, df = estimate.standard_error, estimate.degrees_of_freedom
    if se is None or df is None or distance <= 0:
        return None
    sd = se * math.sqrt(estimate.num_blocks)
    df_lost = estimate.num_blocks - df if estimate.is_paired else 1
    upper = 1 - (1 - confidence) / 2

    def is_enough(n: int) -> bool:
        return t_quantile(upper, n - df_lost) * sd / math.sqrt(n) <= distance

    numbers = range(MIN_PAIRED_BLOCKS if estimate.is_paired else MIN_UNPAIRED_BLOCKS, MAX_BLOCKS_NEEDED + 1)
    least = bisect_left(numbers, True, key=is_enough)
    return numbers[least] if least < len(numbers) else None
