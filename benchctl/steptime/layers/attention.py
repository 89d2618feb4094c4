"""Measured time of attention: a grid of four axes, and what lies between and beyond its points.

The axes are the new tokens of prompts in a step (chunk), the history that they attend to, the number of decoding rows,
and their mean context. Several chunks in one step are one chunk of all their tokens, with the history that gives the
same number of attended positions: with c_i new tokens after k_i cached ones,

    chunk = sum c_i        history = sum c_i (k_i + c_i / 2) / chunk - chunk / 2

A single chunk has its own history. Short prompts together attend to less than one prompt of their summed length, so
their history is below 0; there, time falls along the line from history 0 to a history of one chunk.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

from benchctl.errors import UsageError
from benchctl.steptime.layers.line import Line, bracket


class AttentionCell(NamedTuple):
    """One point of the grid. Without a chunk ``history`` is 0, without rows ``context`` is 0."""

    chunk: float
    history: float
    rows: float
    context: float


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
        self._times_us: Final = self._filled(times_us)

    def at(self, chunk: float, history: float, rows: float, context: float) -> float:
        """Time of a step's attention in one layer, in microseconds; the arguments as the module describes them."""
        if chunk and history < self._histories[0]:
            return self._below(chunk, history, rows, context)
        return self._between(chunk, history, rows, context)

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
        for places in axes:
            size *= len(places)
        if len(grid) < size:
            raise UsageError(
                f"attention: {size - len(grid)} of {size} cells of the grid are neither measured nor on a line of two "
                "measured ones; measure at least two values of each column"
            )
        return [
            [[[grid[c, h, n, k] for k in self._contexts] for n in self._rows] for h in self._histories]
            for c in self._chunks
        ]


def _axis(places: Iterable[float]) -> tuple[float, ...]:
    """The places of an axis in order; a table without prompts or without rows has the place 0 alone."""
    return tuple(sorted(set(places))) or (0.0,)


def _shares(places: tuple[float, ...], place: float) -> tuple[tuple[int, float], ...]:
    """Indices and weights of the neighbours of a place; beyond the ends the weights are outside of [0, 1]."""
    if len(places) == 1:
        return ((0, 1.0),)
    low, high, share = bracket(places, place)
    if share == 1:
        return ((high, 1.0),)
    if share == 0:
        return ((low, 1.0),)
    return ((low, 1 - share), (high, share))


def _fill_along(grid: dict[tuple[float, ...], float], axes: tuple[tuple[float, ...], ...], axis: int) -> None:
    """Add the missing cells of every line of the grid along one axis that has two cells or more."""
    at_axis: Callable[[tuple[float, ...], float], tuple[float, ...]] = lambda key, place: (  # noqa: E731
        *key[:axis],
        place,
        *key[axis + 1 :],
    )
    lines: dict[tuple[float, ...], list[tuple[float, float]]] = {}
    for key, time_us in grid.items():
        lines.setdefault(at_axis(key, 0.0), []).append((key[axis], time_us))
    for key, points in lines.items():
        if 2 <= len(points) < len(axes[axis]):
            line = Line.through(points)
            for place in axes[axis]:
                grid.setdefault(at_axis(key, place), line.at(place))
