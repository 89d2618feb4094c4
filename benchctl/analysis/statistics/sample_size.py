"""How many blocks: what can so many show, and how many more would end a doubt?"""

import math
from bisect import bisect_left
from typing import Final

from benchctl.analysis.statistics.block_ratio import (
    DEFAULT_ESTIMATOR,
    MIN_PAIRED_BLOCKS,
    MIN_UNPAIRED_BLOCKS,
    POWER,
    Estimator,
    RatioEstimate,
)
from benchctl.analysis.statistics.intervals import t_quantile
from benchctl.analysis.statistics.margins import Margins, log_margin

MAX_BLOCKS_NEEDED: Final = 1000
ROBUST_WIDTH: Final = 1.06
"""By so much a robust interval is wider than that of t where all noise is normal: with it, a planned change is
found four times in five at 8 blocks."""
ASSUMED_LOG_SD: Final = 0.02
"""Scatter of block log-ratios where no A/A experiment is on file: an assumption, and said to be one."""


def minimum_detectable_effect(
    log_sd: float,
    num_blocks: int,
    *,
    num_tests: int = 1,
    margin_frac: float = 0.0,
    confidence: float = 0.95,
    estimator: Estimator = DEFAULT_ESTIMATOR,
) -> float | None:
    """Smallest change, as a fraction, that such an experiment calls by its name four times in five.

    exp(ln(1 + margin) + (t(1 - alpha / 2m) + t(power)) * sd / sqrt(n)) - 1 with n - 2 degrees of freedom, for m
    tests that have nothing in common, and a little more where the estimator is robust. None below 6 blocks, which
    give no verdict.
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
    estimator: Estimator = DEFAULT_ESTIMATOR,
) -> int | None:
    """The fewest blocks with which ``change_frac`` is detectable; None where a thousand do not suffice."""
    for n in range(MIN_PAIRED_BLOCKS, MAX_BLOCKS_NEEDED + 1):
        found = minimum_detectable_effect(
            log_sd, n, num_tests=num_tests, margin_frac=margin_frac, estimator=estimator
        )
        if found is not None and found <= change_frac:
            return n
    return None


def blocks_for_verdict(estimate: RatioEstimate, margins: Margins, confidence: float | None = None) -> int | None:
    """Blocks that would end an inconclusive comparison, if ratio and scatter stay as they are.

    The least n, from 6 on (4 unpaired), whose half t-interval is no wider than the distance of the ratio from the
    margin that it would have to clear; None when that is more than a thousand, when one block says nothing of the
    scatter, and when the ratio lies between equivalence and change margin, where no number of blocks decides.
    """
    se, df = estimate.standard_error, estimate.degrees_of_freedom
    if se is None or df is None:
        return None
    sd = se * math.sqrt(estimate.num_blocks)
    lost = estimate.num_blocks - df if estimate.is_paired else 1
    away = abs(estimate.log_ratio)
    distance = max(margins.log_equivalence - away, away - margins.log_change)
    if distance <= 0:
        return None
    upper = 1 - (1 - (estimate.confidence if confidence is None else confidence)) / 2

    def is_enough(n: int) -> bool:
        return t_quantile(upper, n - lost) * sd / math.sqrt(n) <= distance

    numbers = range(MIN_PAIRED_BLOCKS if estimate.is_paired else MIN_UNPAIRED_BLOCKS, MAX_BLOCKS_NEEDED + 1)
    least = bisect_left(numbers, True, key=is_enough)
    return numbers[least] if least < len(numbers) else None
