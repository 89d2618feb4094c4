"""Many values by rank, without a second copy of them.

A load stores its values in eight or four bytes each. Sorting them all at once takes tens of bytes each in Python;
numpy alone takes more memory than a million values.
"""

from array import array
from bisect import bisect_right
from typing import Any, Final

_RUN: Final = 20_000
"""Number of values that are sorted at once."""


class SortedRuns:
    """Sorts ``values`` in place in runs, and finds the value of a rank among the runs."""

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
