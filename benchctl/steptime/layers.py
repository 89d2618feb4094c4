"""Step time from measured tables of a model's layers."""

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil
from statistics import median
from typing import Final, NamedTuple

from benchctl.costs.shapes import ModelShape
from benchctl.errors import UsageError
from benchctl.units import US_PER_S


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
        low_y, high_y = self.ys[low], self.ys[high]
        if share < 0:
            return max(low_y + min(share * (high_y - low_y), 0.0), 0.0)
        if share > 1:
            return high_y + max((share - 1) * (high_y - low_y), 0.0)
        return low_y + share * (high_y - low_y)


@dataclass(frozen=True, slots=True)
class Surface:
    """Lines over y, side by side at places on x; between two of them time is linear in x as well."""

    lines: tuple[tuple[float, Line], ...]

    @classmethod
    def through(cls, points: Iterable[tuple[float, float, float]]) -> "Surface":
        """The surface through points (x, y, time). Raises UsageError without a point, or with two of one place."""
        of_x: dict[float, list[tuple[float, float]]] = {}
        for x, y, time_us in points:
            of_x.setdefault(x, []).append((y, time_us))
        if not of_x:
            Line.through(())
        return cls(tuple((x, Line.through(of_x[x])) for x in sorted(of_x)))

    def at(self, x: float, y: float) -> float:
        """The value at ``x`` and ``y``."""
        return Line.through((mark, line.at(y)) for mark, line in self._around(x)).at(x)

    def _around(self, x: float) -> tuple[tuple[float, Line], ...]:
        if len(self.lines) == 1:
            return self.lines
        low, high, _ = bracket(tuple(mark for mark, _ in self.lines), x)
        return self.lines[low], self.lines[high]


def bracket(xs: tuple[float, ...], x: float) -> tuple[int, int, float]:
    """Two neighbours of ``x`` among at least two places, and its share of the way between them.

    The share is below 0 or above 1 beyond the ends, where the outer two places are the neighbours.
    """
    high = min(max(bisect_left(xs, x), 1), len(xs) - 1)
    low = high - 1
    return low, high, (x - xs[low]) / (xs[high] - xs[low])


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


@dataclass(frozen=True, slots=True)
class VerificationTable:
    """Attention of decoding rows alone, one table for each measured number of query tokens, 1 among them."""

    by_query_tokens: Mapping[float, AttentionTable]

    def added_us(self, query_tokens: float, rows: float, context: float) -> float:
        """Time beyond that of one query token, in one layer and microseconds; at least 0."""
        line = Line.through((q, table.at(0.0, 0.0, rows, context)) for q, table in self.by_query_tokens.items())
        fewer = [q for q in line.xs if q < query_tokens]
        return max(line.at(q) for q in (*fewer, query_tokens)) - line.at(1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyingRows:
    """The decoding rows of one step beside a chunk: their number, and the mean of their tokens before the step.

    The chunk is that of the prompts, with the positions that it attends to.
    """

    number: int
    before: float
    chunk_tokens: float
    chunk_positions: float


def arithmetic_us(attention: AttentionTable, rows: VerifyingRows, query_tokens: float) -> float:
    """Time of the query tokens of all rows and prompts as one chunk, in one layer and microseconds."""
    fewer = range(2, ceil(query_tokens))
    return max(_as_chunk_us(attention, rows, q) for q in (*fewer, query_tokens))


def _as_chunk_us(attention: AttentionTable, rows: VerifyingRows, query_tokens: float) -> float:
    tokens = rows.number * query_tokens
    chunk = rows.chunk_tokens + tokens
    positions = rows.chunk_positions + tokens * (rows.before + query_tokens / 2)
    return attention.at(chunk, positions / chunk - chunk / 2, 0.0, 0.0)


ONCE: Final = frozenset({"embedding", "final_layernorm"})
"""Layers that a forward pass runs once."""
TWICE: Final = frozenset({"layernorm"})
"""Layers that run before attention and again before the feed-forward block; any other runs once in each layer."""
MLP: Final = frozenset({"gate_up_proj", "act_fn", "down_proj"})
"""Layers in whose place some layers of a model have a block of experts."""
_BYTES: Final = 2
"""Bytes of an activation, bfloat16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Connection of the devices: latency of a hop and bandwidth in one direction."""

    latency_us: float
    bandwidth_bytes_per_s: float

    def hop_us(self, num_bytes: float) -> float:
        return self.latency_us + num_bytes / self.bandwidth_bytes_per_s * US_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTables:
    """Measured layers of one model on one kind of device, at one degree of tensor parallelism.

    ``dense`` has lines over tokens, ``per_sequence`` over rows, ``experts`` a surface over tokens and the distinct
    experts that these choose; times in microseconds. ``verification`` has decoding rows with several query tokens,
    None where they were not measured.
    """

    dense: Mapping[str, Line]
    per_sequence: Mapping[str, Line]
    attention: AttentionTable
    experts: Surface | None = None
    skew: SkewTable | None = None
    verification: VerificationTable | None = None
    tensor_parallel: int = 1
    link: Link | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """The prompts of one step, as one: their number, their new tokens, and what these attend to.

    ``positions`` is the sum of c (k + c / 2) over chunks of c tokens after k cached ones.
    """

    number: int = 0
    tokens: int = 0
    positions: float = 0.0

    @property
    def history(self) -> float:
        """Cached tokens before a single chunk that attends to as many positions."""
        return self.positions / self.tokens - self.tokens / 2 if self.tokens else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingRows:
    """The decoding rows of one step: their number, the sum of their contexts, and the least and the greatest."""

    number: int = 0
    context: int = 0
    shortest: int = 0
    longest: int = 0

    @property
    def mean(self) -> float:
        return self.context / self.number if self.number else 0.0


class LayerProfile:
    """The layers of a whole model. ``graph_sizes`` are the captured batch sizes in ascending order, or empty."""

    def __init__(self, tables: LayerTables, shape: ModelShape, graph_sizes: tuple[int, ...] = ()) -> None:
        """Raises UsageError when the link of several devices is unknown, or the time of a model's experts."""
        if tables.tensor_parallel > 1 and tables.link is None:
            raise UsageError(
                f"layer profile at tensor parallelism {tables.tensor_parallel} has no link between the devices; "
                "state link_bw and link_latency in its config.json"
            )
        if shape.moe is not None and tables.experts is None:
            raise UsageError(
                f"layer profile of {shape.name}, which has experts, without a moe.csv; measure their blocks, or "
                "name another model"
            )
        self.tables: Final = tables
        self.shape: Final = shape
        self.graph_sizes: Final = graph_sizes
        self._of_tokens_us: Final[dict[int, float]] = {}
        self._of_rows_us: Final[dict[int, float]] = {}

    def step_us(self, chunks: Chunks, decodes: DecodingRows, draft_tokens: int = 0) -> float:
        """Time of one step, in which the decoding rows have so many draft tokens besides their newest.

        Each of these is computed by every layer, has logits, and attends as ``verification.py`` says.
        """
        attention_us = self._attention_us(chunks, decodes)
        if draft_tokens:
            attention_us = self._verification_us(attention_us, chunks, decodes, draft_tokens)
        return (
            self.of_tokens_us(chunks.tokens + decodes.number + draft_tokens)
            + self.of_rows_us(chunks.number + decodes.number + draft_tokens)
            + self.shape.layers * attention_us
        )

    def share_of_longest(self, chunk: int, decodes: DecodingRows) -> float:
        """Part of the way of attention from the time of rows of the mean context to that of the longest."""
        if self.tables.skew is None or decodes.longest <= decodes.shortest:
            return 0.0
        spread = (decodes.mean - decodes.shortest) / (decodes.longest - decodes.shortest)
        return self.tables.skew.share(chunk, decodes.number, spread)

    def _attention_us(self, chunks: Chunks, decodes: DecodingRows) -> float:
        attention, batch = self.tables.attention, (chunks.tokens, chunks.history, decodes.number)
        time_us = attention.at(*batch, decodes.mean)
        if share := self.share_of_longest(chunks.tokens, decodes):
            time_us += share * (attention.at(*batch, decodes.longest) - time_us)
        return time_us

    def _verification_us(self, single_us: float, chunks: Chunks, decodes: DecodingRows, draft_tokens: int) -> float:
        """Attention of one layer with drafts; ``single_us`` is its time at one query token of each row."""
        query_tokens = 1 + draft_tokens / decodes.number
        if self.tables.verification is not None:
            return single_us + self.tables.verification.added_us(query_tokens, decodes.number, decodes.mean)
        rows = VerifyingRows(
            number=decodes.number,
            before=decodes.mean - query_tokens,
            chunk_tokens=chunks.tokens,
            chunk_positions=chunks.positions,
        )
        return max(single_us, arithmetic_us(self.tables.attention, rows, query_tokens))

    def of_tokens_us(self, tokens: int) -> float:
        """The part that depends on the number of tokens alone: projections, norms, experts, all-reduces."""
        index = bisect_left(self.graph_sizes, tokens)
        if index < len(self.graph_sizes):
            tokens = self.graph_sizes[index]
        time_us = self._of_tokens_us.get(tokens)
        if time_us is None:
            bytes_per_hop = tokens * self.shape.hidden * _BYTES / self.tables.tensor_parallel
            time_us = sum(self._times_run(name) * line.at(tokens) for name, line in self.tables.dense.items())
            time_us += self._experts_us(tokens) + (2 * self.shape.layers + 1) * 2 * self._hops_us(bytes_per_hop)
            self._of_tokens_us[tokens] = time_us
        return time_us

    def of_rows_us(self, rows: int) -> float:
        """The part that depends on the number of rows alone: logits and sampling."""
        time_us = self._of_rows_us.get(rows)
        if time_us is None:
            shard_bytes = rows * self.shape.vocab * _BYTES / self.tables.tensor_parallel
            time_us = sum(line.at(rows) for line in self.tables.per_sequence.values()) + self._hops_us(shard_bytes)
            self._of_rows_us[rows] = time_us
        return time_us

    def _experts_us(self, tokens: int) -> float:
        """All blocks of experts, with tokens that choose theirs uniformly."""
        moe, table = self.shape.moe, self.tables.experts
        if moe is None or table is None:
            return 0.0
        return moe.layers * table.at(tokens, moe.uniform_experts(float(tokens)))

    def _times_run(self, name: str) -> int:
        """Number of times that a forward pass runs a layer."""
        if name in ONCE:
            return 1
        if name in TWICE:
            return 2 * self.shape.layers
        with_experts = self.shape.moe.layers if self.shape.moe is not None and name in MLP else 0
        return self.shape.layers - with_experts

    def _hops_us(self, num_bytes: float) -> float:
        """Once around the ring: k - 1 hops of so many bytes; nothing on a single device."""
        link = self.tables.link
        return 0.0 if link is None else (self.tables.tensor_parallel - 1) * link.hop_us(num_bytes)


def captured_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """The batch sizes for which vLLM captures graphs by default: 1, 2, 4, every 8th to 256, every 16th to 512.

    None is above twice the number of sequences that a batch can have.
    """
    most = min(2 * max_num_seqs, 512)
    sizes = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
    return tuple(size for size in sizes if size <= most)
