"""Attention over decoding rows of unequal contexts, from measured batches of two lengths.

The grid of attention has rows of equal contexts. A batch of unequal ones takes longer than rows of their mean,
since its longest row ends last, and less than rows that are all as long:

    time = time(mean) + share (time(longest) - time(mean))

The share is measured: for batches of so many rows, beside a chunk of so many tokens, and with a mean that lies so
far from the shortest on the way to the longest context (``spread``). It is the least-squares share of all measured
batches alike, between 0 and 1.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable
from statistics import median
from typing import Final, NamedTuple

from benchctl.steptime.layers.attention import AttentionTable

SPREADS: Final = (0.05, 0.15, 0.4, 0.7, 1.0)
"""Upper ends of the classes of spread."""
MOST_DEVIATION: Final = 0.25
"""Largest median deviation of a table's own controls from the grid of attention, as a share."""


class SkewedBatch(NamedTuple):
    """One measured batch, and its controls with all rows at the mean and at the longest context."""

    rows: float
    chunk: float
    shortest: float
    longest: float
    mean: float
    mean_us: float
    longest_us: float
    skewed_us: float


class SkewTable:
    """Shares by chunk, rows and spread; those of the nearest measured rows and chunk hold for all."""

    def __init__(self, batches: Iterable[SkewedBatch]) -> None:
        sums: dict[tuple[float, float, int], list[float]] = {}
        for batch in batches:
            gap_us = batch.longest_us - batch.mean_us
            spread = (batch.mean - batch.shortest) / max(batch.longest - batch.shortest, 1.0)
            total = sums.setdefault((batch.chunk, batch.rows, _class_of(spread)), [0.0, 0.0])
            total[0] += gap_us * (batch.skewed_us - batch.mean_us)
            total[1] += gap_us * gap_us
        self._shares: Final = {
            key: min(max(product / square, 0.0), 1.0) for key, (product, square) in sums.items() if square
        }
        self._chunks: Final = sorted({chunk for chunk, _, _ in self._shares})
        self._rows: Final = sorted({rows for _, rows, _ in self._shares})

    def share(self, chunk: float, rows: float, spread: float) -> float:
        """The share of a batch; 0 for a single row and for batches that nothing like them was measured for."""
        if rows < 2 or not self._shares:
            return 0.0
        key = (_nearest(self._chunks, chunk), _nearest(self._rows, rows), _class_of(spread))
        return self._shares.get(key, 0.0)


def fits(batches: Iterable[SkewedBatch], attention: AttentionTable) -> bool:
    """True if the controls of decoding rows alone agree with the grid: both are then of one kernel."""
    deviations = [
        abs(batch.mean_us / grid_us - 1) if grid_us else math.inf
        for batch in batches
        if not batch.chunk
        for grid_us in [attention.at(0.0, 0.0, batch.rows, batch.mean)]
    ]
    return bool(deviations) and median(deviations) <= MOST_DEVIATION


def _class_of(spread: float) -> int:
    return min(bisect_left(SPREADS, spread), len(SPREADS) - 1)


def _nearest(marks: list[float], mark: float) -> float:
    """The nearest by ratio; of two as near the lesser. No chunk at all is like none but itself."""
    if not mark:
        return marks[0] if marks[0] == 0 else math.nan
    positive = [each for each in marks if each]
    return min(positive, key=lambda each: abs(math.log(each / mark)), default=math.nan)
