"""Measured tables of a model's layers, and lines through them, also beyond the measured points."""

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Final, NamedTuple

from benchctl.errors import UsageError

_MOST_CELLS: Final = 1_000_000
"""Far above measured grids, which have some ten thousand."""
SPREADS: Final = (0.05, 0.15, 0.4, 0.7, 1.0)
"""Upper ends of the classes of spread."""


def bracket(xs: Sequence[float], x: float) -> tuple[int, int, float]:
    """Two neighbours of ``x`` among at least two places, and its share of the way between them.

    The share is below 0 or above 1 beyond the ends, where the outer two places are the neighbours.
    """
    high = min(max(bisect_left(xs, x), 1), len(xs) - 1)
    low = high - 1
    return low, high, (x - xs[low]) / (xs[high] - xs[low])


@dataclass(frozen=True, slots=True)
class Line:
    """Points joined by straight lines, of which the outer two go on; ``xs`` ascends.

    Below the first point a line stays at its value or falls, above the last it stays or rises: the time of less
    work is not longer. One point alone makes a constant.
    """

    xs: tuple[float, ...]
    ys: tuple[float, ...]

    @classmethod
    def through(cls, points: Iterable[tuple[float, float]]) -> "Line":
        """The line through points in any order. Raises UsageError without a point, or with two of one place."""
        ordered = sorted(points)
        xs = tuple(x for x, _ in ordered)
        if not xs or len(set(xs)) < len(xs):
            raise UsageError(
                f"a measured line has {len(xs)} points at {len(set(xs))} places; it needs at least one point, and "
                "one for each place: remove repeated rows"
            )
        return cls(xs, tuple(y for _, y in ordered))

    def at(self, x: float) -> float:
        """The value at ``x``."""
        if len(self.xs) == 1:
            return self.ys[0]
        low, high, share = bracket(self.xs, x)
        rise = self.ys[high] - self.ys[low]
        if share < 0:
            return max(self.ys[low] + min(share * rise, 0.0), 0.0)
        if share > 1:
            return self.ys[high] + max((share - 1) * rise, 0.0)
        return self.ys[low] + share * rise


class AttentionCell(NamedTuple):
    """One point of the grid. Without a chunk ``history`` is 0, without rows ``context`` is 0."""

    chunk: float
    history: float
    rows: float
    context: float


class DecodeLine(NamedTuple):
    """Time in microseconds = ``intercept_us`` + ``slope_us`` x, for a mean context ``since`` <= x < ``until``."""

    intercept_us: float
    slope_us: float
    since: float
    until: float | None


class AttentionTable:
    """Time of one layer's attention in microseconds, anywhere on a measured grid and beyond it.

    The axes are the new tokens of prompts in a step (chunk), the history that they attend to, the number of
    decoding rows, and their mean context. Several chunks in one step are one chunk of all their tokens, with the
    history that gives the same number of attended positions: with c_i new tokens after k_i cached ones,

        chunk = sum c_i        history = sum c_i (k_i + c_i / 2) / chunk - chunk / 2

    A single chunk has its own history. Short prompts together attend to less than one prompt of their summed
    length, so their history is below 0; there, time falls along the line from history 0 to one of a chunk.

    Cells that were not measured (their key-value memory did not fit, say) are filled when the table is made: along
    contexts, then rows, then histories, then chunks, by the line through the cells that were.
    """

    def __init__(self, times_us: Mapping[AttentionCell, float]) -> None:
        """Raises UsageError when the cells are too few to fill the grid from, or have no common places."""
        axes = (
            {0.0} | {cell.chunk for cell in times_us},
            {cell.history for cell in times_us if cell.chunk} or {0.0},
            {0.0} | {cell.rows for cell in times_us},
            {cell.context for cell in times_us if cell.rows} or {0.0},
        )
        self._axes: Final = tuple(tuple(sorted(axis)) for axis in axes)
        sizes = [len(axis) for axis in self._axes]
        if math.prod(sizes) > _MOST_CELLS:
            raise UsageError(
                f"attention: {' x '.join(map(str, sizes))} values make {math.prod(sizes):,} cells of a grid, "
                f"over {_MOST_CELLS:,}; measure the same few values of each column with those of the others"
            )
        self._times_us: Final = self._filled(times_us)
        if (missing := math.prod(sizes) - len(self._times_us)) > 0:
            raise UsageError(
                f"attention: {missing} of {math.prod(sizes)} cells of the grid are neither measured nor on a line "
                "of two measured ones; measure at least two values of each column"
            )

    def _filled(self, times_us: Mapping[AttentionCell, float]) -> dict[tuple[float, ...], float]:
        """The time of every cell of the grid that is measured or on a line of two that are."""
        measured = {tuple(cell): time_us for cell, time_us in times_us.items()} | {(0.0, 0.0, 0.0, 0.0): 0.0}
        grid: dict[tuple[float, ...], float] = {}
        for chunk, history, rows, context in product(*self._axes):
            time_us = measured.get((chunk, history if chunk else 0.0, rows, context if rows else 0.0))
            if time_us is not None:
                grid[chunk, history, rows, context] = time_us
        for axis in (3, 2, 1, 0):
            lines: dict[tuple[float, ...], list[tuple[float, float]]] = {}
            for cell, time_us in grid.items():
                lines.setdefault((*cell[:axis], *cell[axis + 1 :]), []).append((cell[axis], time_us))
            for others, points in lines.items():
                if 2 <= len(points) < len(self._axes[axis]):
                    line = Line.through(points)
                    for mark in self._axes[axis]:
                        grid.setdefault((*others[:axis], mark, *others[axis:]), line.at(mark))
        return grid

    @property
    def has_prompts(self) -> bool:
        """True if prompts were measured; without them a chunk takes no time."""
        return len(self._axes[0]) > 1

    def at(self, chunk: float, history: float, rows: float, context: float) -> float:
        """Time of a step's attention in one layer, in microseconds; the class explains the arguments."""
        first = self._axes[1][0]
        if not chunk or history >= first:
            return self._between(chunk, history, rows, context)
        start_us = self._between(chunk, first, rows, context)
        slope = (self._between(chunk, first + chunk, rows, context) - start_us) / chunk
        least_us = self._between(0.0, first, rows, context) if rows else 0.0
        return max(start_us + (history - first) * slope, least_us)

    def decode_line(self, rows: float, context: float) -> DecodeLine:
        """Time of ``rows`` decoding rows over their mean context, on the piece that holds ``context``."""
        contexts = self._axes[3]
        if context < contexts[0] or len(contexts) == 1:
            time_us = self._between(0.0, 0.0, rows, contexts[0])
            return DecodeLine(time_us, 0.0, 0.0, contexts[0] if len(contexts) > 1 else None)
        low, high, share = bracket(contexts, context)
        if share == 1 and high + 1 < len(contexts):
            low, high = high, high + 1
        start, end = contexts[low], contexts[high]
        start_us, end_us = (self._between(0.0, 0.0, rows, mark) for mark in (start, end))
        slope = (end_us - start_us) / (end - start)
        until = end if high + 1 < len(contexts) else None
        return DecodeLine(start_us - slope * start, slope, start, until)

    def _between(self, chunk: float, history: float, rows: float, context: float) -> float:
        """Linear in each axis between the cells around a point, and on beyond the ends but below contexts."""
        chunks, histories, numbers, contexts = self._axes
        corners = product(
            _shares(chunks, chunk),
            _shares(histories, history if chunk else histories[0]),
            _shares(numbers, rows),
            _shares(contexts, max(context, contexts[0]) if rows else contexts[0]),
        )
        time_us = 0.0
        for (c, of_chunk), (h, of_history), (n, of_rows), (k, of_context) in corners:
            time_us += of_chunk * of_history * of_rows * of_context * self._times_us[c, h, n, k]
        return max(time_us, 0.0)


def _shares(marks: tuple[float, ...], mark: float) -> tuple[tuple[float, float], ...]:
    """The neighbours of a mark and their weights; beyond the ends the weights are outside of [0, 1]."""
    if len(marks) == 1:
        return ((marks[0], 1.0),)
    low, high, share = bracket(marks, mark)
    if share in {0, 1}:
        return ((marks[high if share else low], 1.0),)
    return ((marks[low], 1 - share), (marks[high], share))


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
    """Attention over decoding rows of unequal contexts, from measured batches of two lengths.

    The grid of attention has rows of equal contexts. A batch of unequal ones takes longer than rows of their mean,
    since its longest row ends last, and less than rows that are all as long:

        time = time(mean) + share (time(longest) - time(mean))

    The share is measured: for batches of so many rows, beside a chunk of so many tokens, and with a mean that lies
    so far from the shortest on the way to the longest context (``spread``). It is the least-squares share of all
    measured batches alike, between 0 and 1; that of the nearest measured rows and chunk holds for all.
    """

    def __init__(self, batches: Iterable[SkewedBatch]) -> None:
        sums: dict[tuple[float, float, int], tuple[float, float]] = {}
        for batch in batches:
            gap_us = batch.longest_us - batch.mean_us
            spread = (batch.mean - batch.shortest) / max(batch.longest - batch.shortest, 1.0)
            key = (batch.chunk, batch.rows, _class_of(spread))
            of_product, of_square = sums.get(key, (0.0, 0.0))
            sums[key] = (of_product + gap_us * (batch.skewed_us - batch.mean_us), of_square + gap_us * gap_us)
        self._shares: Final = {
            key: min(max(of_product / of_square, 0.0), 1.0)
            for key, (of_product, of_square) in sums.items()
            if of_square
        }
        self._chunks, self._rows = (sorted({key[axis] for key in self._shares}) for axis in (0, 1))

    def share(self, chunk: float, rows: float, spread: float) -> float:
        """The share of a batch; 0 for a single row and for batches that nothing like them was measured for."""
        if rows < 2 or not self._shares:
            return 0.0
        return self._shares.get((_nearest(self._chunks, chunk), _nearest(self._rows, rows), _class_of(spread)), 0.0)


def fits(batches: Iterable[SkewedBatch], attention: AttentionTable) -> bool:
    """True if the controls of decoding rows alone agree with the grid: both are then of one kernel."""
    deviations = [
        abs(batch.mean_us / grid_us - 1) if grid_us else math.inf
        for batch in batches
        if not batch.chunk
        for grid_us in [attention.at(0.0, 0.0, batch.rows, batch.mean)]
    ]
    # Largest median deviation of a skew table's own controls from the grid of attention, as a share
    return bool(deviations) and median(deviations) <= 0.25


def _class_of(spread: float) -> int:
    return min(bisect_left(SPREADS, spread), len(SPREADS) - 1)


def _nearest(marks: Sequence[float], mark: float) -> float:
    """The nearest by ratio; of two as near the lesser. No chunk at all is like none but itself."""
    if not mark:
        return 0.0
    return min((each for each in marks if each), key=lambda each: abs(math.log(each / mark)), default=math.nan)
