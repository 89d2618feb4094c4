"""Percentiles, and how many independent values a tail percentile needs before it may be shown.

The 95 % rule: even for the largest of n values to be an upper bound of the q-th quantile with confidence c,
1 - q^n >= c must hold, so n >= ln(1 - c) / ln(q). For c = 0.95 that is 29 for p90, 59 for p95, 299 for p99.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

TAIL_CONFIDENCE: Final = 0.95
PERCENTS: Final = (50, 90, 95, 99)


def smallest_sample(percent: float, confidence: float = TAIL_CONFIDENCE) -> int:
    """Values needed before a percentile above the median may be shown: ceil(ln(1 - c) / ln(percent / 100)).

    The median and what lies below it need one.
    """
    if percent <= 50:
        return 1
    return math.ceil(math.log(1 - confidence) / math.log(percent / 100))


def percentiles(
    values: Sequence[float], num_independent: int, percents: Sequence[int] = PERCENTS
) -> Mapping[int, float | None]:
    """Each percentile by linear interpolation between closest ranks, at rank (n - 1)·p (numpy's default).

    ``num_independent`` counts what the values come from (requests, not the gaps inside them): where it is
    smaller than ``smallest_sample``, the percentile is unknown.
    """
    if not values:
        return dict.fromkeys(percents)
    found = np.percentile(np.asarray(values, dtype=float), percents)
    return {
        percent: float(value) if num_independent >= smallest_sample(percent) else None
        for percent, value in zip(percents, found, strict=True)
    }
