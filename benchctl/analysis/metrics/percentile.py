"""Percentiles, and the number of independent values that a tail percentile needs before it is shown.

The 95 % rule: even for the largest of n values to be an upper bound of the q-th quantile with confidence c,
1 - q^n >= c must hold, so n >= ln(1 - c) / ln(q). For c = 0.95 that is 29 for p90, 59 for p95, 299 for p99.
"""

import math
import sys
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

TAIL_CONFIDENCE: Final = 0.95
PERCENTS: Final = (50, 90, 95, 99)
_MANY: Final = 20_000
"""Up to this many values are sorted in Python, in less time than importing numpy takes."""
_RUN: Final = 20_000
"""Number of values that are sorted at once."""


class Ascending(Protocol):
    """Values by rank."""

    def __len__(self) -> int: ...
    def __getitem__(self, rank: int, /) -> float: ...


def smallest_sample(percent: float, confidence: float = TAIL_CONFIDENCE) -> int:
    """Values needed before a percentile above the median may be shown: ceil(ln(1 - c) / ln(percent / 100))."""
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
    return percentiles_of_sorted(_ordered(values), num_independent, percents)


def percentiles_of_sorted(
    ordered: Ascending, num_independent: int, percents: Sequence[int] = PERCENTS
) -> Mapping[int, float | None]:
    """``percentiles`` of values that ascend."""
    if not len(ordered):
        return dict.fromkeys(percents)
    return {
        percent: interpolated(ordered, percent / 100) if num_independent >= smallest_sample(percent) else None
        for percent in percents
    }


def standard_deviation(values: Sequence[float]) -> float | None:
    """Of the values themselves and not of what they are a sample of, as vLLM states it; None of none."""
    if not values:
        return None
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))


def _ordered(values: Sequence[float]) -> Ascending:
    if len(values) <= _MANY and "numpy" not in sys.modules:
        return sorted(values)
    import numpy as np  # noqa: PLC0415 - only where it is there or worth its time

    return np.sort(np.asarray(values if isinstance(values, array) else array("d", values)))


def interpolated(ordered: Ascending, fraction: float) -> float:
    """The value at rank (n - 1)·fraction of values that ascend, linearly between its neighbours."""
    rank = (len(ordered) - 1) * fraction
    below = math.floor(rank)
    low, high = float(ordered[below]), float(ordered[min(below + 1, len(ordered) - 1)])
    return low + (high - low) * (rank - below)


class SortedRuns:
    """Values by rank without a second copy: sorts ``values`` in place in runs, and finds a rank among the runs."""

    def __init__(self, values: "array[Any]", run: int = _RUN) -> None:
        self._values = values
        self._runs = [(start, min(start + run, len(values))) for start in range(0, len(values), run)]
        for start, end in self._runs:
            values[start:end] = array(values.typecode, sorted(values[start:end]))

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, rank: int) -> float:
        """The value with ``rank`` values before it, by bisection of the range of values."""
        if not -len(self) <= rank < len(self):
            raise IndexError(rank)
        num_needed = rank % len(self) + 1
        low: float = min(self._values[start] for start, _ in self._runs)
        high: float = max(self._values[end - 1] for _, end in self._runs)
        if self._num_up_to(low) >= num_needed:
            return low
        while low < (middle := low + (high - low) / 2) < high:
            if self._num_up_to(middle) >= num_needed:
                high = middle
            else:
                low = middle
        return high

    def _num_up_to(self, limit: float) -> int:
        return sum(bisect_right(self._values, limit, start, end) - start for start, end in self._runs)
