"""Layout of the tokens of one forward pass: extensions of prefixes, then candidates, each seeing only its own
prefix.

All tokens are stored one after another, so that a row which lags behind costs no other row any padding:

    [missing tokens of all rows, padded to ``extension``] [``rows`` x ``candidates``]

Only attention looks at them by rows, in ``lag + candidates`` columns. Keys and values of column q are written
behind the cached prefix of the row, at cell ``cached + q``. A token sees the prefix, the extensions up to itself,
and its own cell; so a candidate sees no other one, and has the position after the prefix whatever its cell
is. Cells of candidates are overwritten by the next tokens: they never become part of the prefix.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Integers = npt.NDArray[np.int64]

MAX_LAG: Final = 8
"""Rows that lack more tokens than this are caught up in a forward pass of their own, before."""
_SPAN_STEP: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of one forward pass; passes of equal sizes do the same work on other numbers."""

    rows: int
    extension: int
    lag: int
    candidates: int
    span: int
    """Cells of each row that attention looks at."""
    is_direct: bool
    """True where rows are the slots from 0 on, so that their caches are read without a copy."""

    @property
    def columns(self) -> int:
        return self.lag + self.candidates

    @property
    def tokens(self) -> int:
        """Of the flat layout."""
        return self.extension + self.rows * self.candidates

    @property
    def part_sizes(self) -> list[int]:
        """Lengths of the parts that ``pack`` puts one after another."""
        return [self.extension] * 4 + [self.rows] * 4 + [self.rows * self.lag]


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a forward pass: rows by slot, the tokens that each lacks."""

    slots: Sequence[int]
    cached: Sequence[int]
    missing: Sequence[Sequence[int]]
    """Tokens that each row lacks; a row may lack none."""
    candidates: int


@dataclass(frozen=True, slots=True)
class Memory:
    """Division of the cache; one slot more than requests may have belongs to padding."""

    slots: int
    cells: int
    """Of each slot."""

    @property
    def spare_slot(self) -> int:
        return self.slots - 1


def rounded(number: int, step: int = 1) -> int:
    """``number`` or somewhat more: four sizes between a power of two and the next, multiples of ``step``."""
    grain = max(step, 1 << max(number.bit_length() - 3, 0))
    return -(-number // grain) * grain


def plan_shape(work: Work, memory: Memory, *, is_padded: bool) -> Shape:
    """Sizes for some work: exact, or rounded up so that few different ones occur."""
    counts = [len(tokens) for tokens in work.missing]
    lag, extension, rows = max(counts), sum(counts), len(counts)
    if is_padded:
        lag = 1 << (lag - 1).bit_length() if lag else 0
        extension, rows = rounded(extension), rounded(rows)
    num_direct = max(work.slots) + 1
    if is_padded:
        num_direct = min(rounded(num_direct), memory.slots)
    # Reading caches directly saves a copy of them; it is not worth many unnecessary rows.
    is_direct = num_direct <= rows + rows // 4
    span = max(work.cached) + lag + work.candidates
    return Shape(
        rows=num_direct if is_direct else rows,
        extension=extension,
        lag=lag,
        candidates=work.candidates,
        span=min(rounded(span, _SPAN_STEP), memory.cells),
        is_direct=is_direct,
    )


def pass_rows(work: Work, shape: Shape) -> Integers:
    """The row of the pass in which each row of the work is computed."""
    return np.asarray(work.slots if shape.is_direct else range(len(work.slots)), dtype=np.int64)


def pack(work: Work, shape: Shape, memory: Memory) -> Integers:
    """All input of the device in one vector, so that one copy transfers it.

    Rows that are padding have one cached token and write into the spare slot; so does padding of the extension.
    """
    slots = np.asarray(work.slots, dtype=np.int64)
    cached = np.asarray(work.cached, dtype=np.int64)
    counts = np.asarray([len(tokens) for tokens in work.missing], dtype=np.int64)
    row_of = pass_rows(work, shape)
    num_missing = int(counts.sum())

    # The missing tokens, flat: whose they are, and the how-manieth.
    owner = np.repeat(np.arange(len(slots)), counts)
    column = np.arange(num_missing) - np.repeat(np.cumsum(counts) - counts, counts)
    at = cached[owner] + column

    tokens = np.zeros(shape.extension, dtype=np.int64)
    tokens[:num_missing] = [token for row in work.missing for token in row]
    positions = np.zeros_like(tokens)
    positions[:num_missing] = at
    cells = np.full_like(tokens, memory.spare_slot * memory.cells)
    cells[:num_missing] = slots[owner] * memory.cells + at
    flat_columns = np.zeros_like(tokens)
    flat_columns[:num_missing] = row_of[owner] * shape.columns + column

    row_cached = np.ones(shape.rows, dtype=np.int64)
    row_cached[row_of] = cached
    row_missing = np.zeros(shape.rows, dtype=np.int64)
    row_missing[row_of] = counts
    row_slot = np.full(shape.rows, memory.spare_slot, dtype=np.int64)
    row_slot[row_of] = slots
    candidate_cell = row_slot * memory.cells + row_cached + shape.lag
    columns = np.zeros((shape.rows, shape.lag), dtype=np.int64)
    columns[row_of[owner], column] = np.arange(num_missing)
    return np.concatenate(
        [tokens, positions, cells, flat_columns, row_cached, row_missing, row_slot, candidate_cell, columns.ravel()]
    )


@dataclass(frozen=True, slots=True)
class Layout:
    """The same on the device; T tokens, R rows, Q columns, S cells."""

    tokens: Tensor
    """[T]"""
    positions: Tensor
    """[T]: for the rotation."""
    cells: Tensor
    """[T]: where keys and values go, counted over all slots."""
    columns: Tensor
    """[R * Q]: the token in each column of each row; any in columns that are padding."""
    flat_columns: Tensor
    """[T]: the column of each token."""
    slots: Tensor
    """[R]"""
    visible: Tensor
    """bool [R, Q, S]: which cells a column sees."""


def unpack(packed: Tensor, candidates: Tensor, shape: Shape) -> Layout:
    """From what ``pack`` gave, and ``candidates`` [R, K], both on the device; waits for nothing."""
    parts = packed.split(shape.part_sizes)
    tokens, positions, cells, flat_columns, cached, missing, slots, candidate_cell, columns = parts
    device = packed.device
    offsets = torch.arange(shape.columns, device=device)
    choice = torch.arange(shape.candidates, device=device)
    row = torch.arange(shape.rows, device=device)[:, None]

    at = cached[:, None] + offsets
    limit = cached[:, None] + torch.minimum(offsets, missing[:, None])
    cell = torch.arange(shape.span, device=device)
    visible = (cell < limit[..., None]) | (cell == at[..., None])

    after_prefix = (cached + missing)[:, None].expand(-1, shape.candidates)
    own_columns = row * shape.columns + shape.lag + choice
    own_tokens = shape.extension + row * shape.candidates + choice
    return Layout(
        tokens=torch.cat((tokens, candidates.flatten())),
        positions=torch.cat((positions, after_prefix.flatten())),
        cells=torch.cat((cells, (candidate_cell[:, None] + choice).flatten())),
        columns=torch.cat((columns.view(shape.rows, shape.lag), own_tokens), dim=1).flatten(),
        flat_columns=torch.cat((flat_columns, own_columns.flatten())),
        slots=slots,
        visible=visible,
    )
