"""Measured time of attention: a grid of four axes, and what lies between and beyond its points.

The axes are the new tokens of prompts in a step (chunk), the history that they attend to, the number of decoding
rows, and their mean context. Several chunks in one step are one chunk of all their tokens, with the history that
gives the same number of attended positions: with c_i new tokens after k_i cached ones,

    chunk = sum c_i        history = sum c_i (k_i + c_i / 2) / chunk - chunk / 2

A single chunk has its own history. Short prompts together attend to less than one prompt of their summed length, so
their history is below 0; there, time falls along the line from history 0 to a history of one chunk.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from benchctl.errors import UsageError
from benchctl.steptime.layers.line import Line, bracket

_MOST_CELLS: Final = 1_000_000
"""Far above measured grids, which have some ten thousand."""


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
    """Time of one layer's attention in microseconds, anywhere.

    Cells that were not measured (their key-value memory did not fit, say) are filled when the table is made: along
    contexts, then rows, then histories, then chunks, by the line through the cells that were.
    """

    def __init__(self, times_us: Mapping[AttentionCell, float]) -> None:
        """Raises UsageError when the cells are too few to fill the grid from."""
        self._chunks: Final = _axis({cell.chunk for cell in times_us} | {0.0})
        self._histories: Final = _axis(cell.history for cell in times_us if cell.chunk)
        self._rows: Final = _axis({cell.rows for cell in times_us} | {0.0})
        self._contexts: Final = _axis(cell.context for cell in times_us if cell.rows)
        self._check_size()
        self._times_us: Final = self._filled(times_us)

    def _check_size(self) -> None:
        """Raise UsageError for a grid that no measurement is meant to fill: rows without a common place."""
        marks = [len(axis) for axis in (self._chunks, self._histories, self._rows, self._contexts)]
        if math.prod(marks) > _MOST_CELLS:
            raise UsageError(
                f"attention: {' x '.join(map(str, marks))} values make {math.prod(marks):,} cells of a grid, "
                f"over {_MOST_CELLS:,}; measure the same few values of each column with those of the others"
            )

    @property
    def has_prompts(self) -> bool:
        """True if prompts were measured; without them a chunk takes no time."""
        return len(self._chunks) > 1

    def at(self, chunk: float, history: float, rows: float, context: float) -> float:
        """Time of a step's attention in one layer, in microseconds; the module explains the arguments."""
        if chunk and history < self._histories[0]:
            return self._below(chunk, history, rows, context)
        return self._between(chunk, history, rows, context)

    def decode_line(self, rows: float, context: float) -> DecodeLine:
        """Time of ``rows`` decoding rows over their mean context, on the piece that holds ``context``."""
        first = self._contexts[0]
        if context < first or len(self._contexts) == 1:
            time_us = self._between(0.0, 0.0, rows, first)
            return DecodeLine(time_us, 0.0, 0.0, first if len(self._contexts) > 1 else None)
        low, high, share = bracket(self._contexts, context)
        if share == 1 and high + 1 < len(self._contexts):
            low, high = high, high + 1
        start, end = self._contexts[low], self._contexts[high]
        start_us, end_us = (self._between(0.0, 0.0, rows, mark) for mark in (start, end))
        slope = (end_us - start_us) / (end - start)
        until = end if high + 1 < len(self._contexts) else None
        return DecodeLine(start_us - slope * start, slope, start, until)

    def _below(self, chunk: float, history: float, rows: float, context: float) -> float:
        first = self._histories[0]
        start_us = self._between(chunk, first, rows, context)
        slope = (self._between(chunk, first + chunk, rows, context) - start_us) / chunk
        least_us = self._between(0.0, first, rows, context) if rows else 0.0
        return max(start_us + (history - first) * slope, least_us)

    def _between(self, chunk: float, history: float, rows: float, context: float) -> float:
        time_us = 0.0
        times = self._times_us
        contexts = _shares(self._contexts, max(context, self._contexts[0])) if rows else ((0, 1.0),)
        histories = _shares(self._histories, history) if chunk else ((0, 1.0),)
        row_shares = _shares(self._rows, rows)
        for i, chunk_share in _shares(self._chunks, chunk):
            for j, history_share in histories:
                outer = chunk_share * history_share
                for k, row_share in row_shares:
                    for m, context_share in contexts:
                        time_us += outer * row_share * context_share * times[i][j][k][m]
        return max(time_us, 0.0)

    def _filled(self, times_us: Mapping[AttentionCell, float]) -> list[list[list[list[float]]]]:
        measured = {(cell.chunk, cell.history, cell.rows, cell.context): time for cell, time in times_us.items()}
        axes = (self._chunks, self._histories, self._rows, self._contexts)
        grid: dict[tuple[float, ...], float] = {}
        for chunk in self._chunks:
            for history in self._histories:
                for rows in self._rows:
                    for context in self._contexts:
                        key = (chunk, history if chunk else 0.0, rows, context if rows else 0.0)
                        time_us = measured.get(key) if chunk or rows else 0.0
                        if time_us is not None:
                            grid[chunk, history, rows, context] = time_us
        for axis in (3, 2, 1, 0):
            _fill_along(grid, axes, axis)
        size = 1
        for marks in axes:
            size *= len(marks)
        if len(grid) < size:
            raise UsageError(
                f"attention: {size - len(grid)} of {size} cells of the grid are neither measured nor on a line of "
                "two measured ones; measure at least two values of each column"
            )
        return [
            [[[grid[c, h, n, k] for k in self._contexts] for n in self._rows] for h in self._histories]
            for c in self._chunks
        ]


def _axis(marks: Iterable[float]) -> tuple[float, ...]:
    """The marks of an axis in order; a table without prompts or without rows has the mark 0 alone."""
    return tuple(sorted(set(marks))) or (0.0,)


def _shares(marks: tuple[float, ...], mark: float) -> tuple[tuple[int, float], ...]:
    """Indices and weights of the neighbours of a mark; beyond the ends the weights are outside of [0, 1]."""
    if len(marks) == 1:
        return ((0, 1.0),)
    low, high, share = bracket(marks, mark)
    if share == 1:
        return ((high, 1.0),)
    if share == 0:
        return ((low, 1.0),)
    return ((low, 1 - share), (high, share))


def _fill_along(grid: dict[tuple[float, ...], float], axes: tuple[tuple[float, ...], ...], axis: int) -> None:
    """Add the missing cells of every line of the grid along one axis that has two cells or more."""
    lines: dict[tuple[float, ...], list[tuple[float, float]]] = {}
    for key, time_us in grid.items():
        lines.setdefault((*key[:axis], *key[axis + 1 :]), []).append((key[axis], time_us))
    for others, points in lines.items():
        if 2 <= len(points) < len(axes[axis]):
            line = Line.through(points)
            for mark in axes[axis]:
                grid.setdefault((*others[:axis], mark, *others[axis:]), line.at(mark))
