"""Layout of the tokens of one forward pass: each row's missing tokens, then its candidates.

All tokens lie flat one after another, row by row, so that a row which lags behind costs no other row any padding:

    [missing of row 0][candidates of row 0][missing of row 1][candidates of row 1] ... [padding]

The tokens of a row are its columns. Keys and values of column q are written behind the cached prefix of the row, at
cell ``cached + q``. A token sees the prefix, the row's missing tokens up to itself, and its own cell; so a
candidate sees no other one, and has the position after the prefix whatever its cell is. Cells of candidates are
overwritten by the next pass, except that of the candidate which the server drew: its keys and values are those
that the prefix needs, so they are moved to the end of the prefix instead of being computed again (``drawn``).

What each row has of both is data, so a pass in which other rows lag, or fewer are scored, does the same work as
long as the number of its tokens is rounded to the same size (``sizes``).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from benchctl.guided.value_model.sizes import (
    MAX_LAG,
    MAX_ROW_TOKENS,
    PROMPT_ROWS,
    padded_prompt_tokens,
    padded_tokens,
    rows_that_fit,
)

Integers = npt.NDArray[np.int64]

_NONE: Final = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of one forward pass; passes of equal sizes do the same work on other numbers."""

    tokens: int
    rows: int
    candidates: int
    """Columns of candidates in which the caller asks; 0 for a pass that only extends prefixes."""
    columns: int
    """Most tokens of a row."""
    span: int
    """Most cells of a row that attention looks at."""

    @property
    def part_sizes(self) -> list[int]:
        """Lengths of the parts that ``pack`` puts one after another."""
        return [self.tokens] * 6 + [self.rows] * 7


@dataclass(frozen=True, slots=True, kw_only=True)
class RowWork:
    """The work of a forward pass for one row."""

    slot: int
    cached: int
    """Tokens of its prefix that are in the cache, the drawn one included."""
    missing: Sequence[int]
    """Tokens after these that the row lacks; it may lack none."""
    candidates_of: int | None = None
    """The line of the caller's candidates that is scored after these; None for a row that is only extended."""
    drawn: int | None = None
    """The candidate of the row's last pass that became the last cached token; None where there is none to move."""


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a forward pass; every row has a token at least."""

    rows: Sequence[RowWork]
    candidates: int

    @property
    def num_tokens(self) -> int:
        """Missing tokens and candidates, without padding."""
        return sum(self.columns(row) for row in self.rows)

    def columns(self, row: RowWork) -> int:
        return len(row.missing) + (0 if row.candidates_of is None else self.candidates)


@dataclass(frozen=True, slots=True)
class Memory:
    """Division of the cache; one slot more than requests may have belongs to padding."""

    slots: int
    cells: int
    """Of each slot."""

    @property
    def spare_slot(self) -> int:
        return self.slots - 1


def exact_shape(work: Work) -> Shape:
    """The sizes of some work as it is."""
    columns = max(work.columns(row) for row in work.rows)
    return Shape(
        tokens=work.num_tokens,
        rows=len(work.rows),
        candidates=work.candidates,
        columns=columns,
        span=max(row.cached + work.columns(row) for row in work.rows),
    )


def padded_shape(num_tokens: int, candidates: int, span: int) -> Shape:
    """Sizes rounded up so that few different ones occur, but for the span."""
    tokens = padded_tokens(num_tokens)
    return Shape(
        tokens=tokens,
        rows=rows_that_fit(tokens, candidates),
        candidates=candidates,
        columns=candidates + MAX_LAG,
        span=span,
    )


def prompt_shape(num_tokens: int, span: int) -> Shape:
    """The same of a pass that extends a few rows by many tokens, prompts above all, and scores none."""
    tokens = padded_prompt_tokens(num_tokens)
    return Shape(
        tokens=tokens, rows=PROMPT_ROWS, candidates=0, columns=min(tokens, MAX_ROW_TOKENS), span=span
    )  # fmt: skip


def pack(work: Work, shape: Shape, memory: Memory) -> Integers:
    """All input of the device in one vector, so that one copy transfers it.

    Tokens and rows that are padding belong to the spare slot. A padded row has one cached token and no others.
    """
    rows = work.rows
    num_missing = np.asarray([len(row.missing) for row in rows], dtype=np.int64)
    lines = np.asarray([_or_none(row.candidates_of) for row in rows], dtype=np.int64)
    counts = num_missing + (lines >= 0) * work.candidates
    starts = np.cumsum(counts) - counts
    slots = np.asarray([row.slot for row in rows], dtype=np.int64)
    first_cell = slots * memory.cells
    cached = np.asarray([row.cached for row in rows], dtype=np.int64)

    owner = np.repeat(np.arange(len(rows)), counts)
    column = np.arange(len(owner)) - starts[owner]
    rank = column - num_missing[owner]  # of a candidate; below 0 for a missing token
    is_candidate = rank >= 0

    tokens = _padded(shape.tokens, 0)
    flat = tokens[: len(owner)]
    flat[~is_candidate] = [token for row in rows for token in row.missing]
    positions = _padded(shape.tokens, 0)
    positions[: len(owner)] = cached[owner] + np.minimum(column, num_missing[owner])
    cells = _padded(shape.tokens, memory.spare_slot * memory.cells)
    cells[: len(owner)] = first_cell[owner] + cached[owner] + column
    candidate = _padded(shape.tokens, _NONE)
    candidate[: len(owner)] = np.where(is_candidate, lines[owner] * work.candidates + rank, _NONE)
    flat_columns = _padded(shape.tokens, 0)
    flat_columns[: len(owner)] = owner * shape.columns + column

    order = _padded(shape.tokens, 0)
    is_scored = lines >= 0
    first_candidate = (starts + num_missing)[is_scored][np.argsort(lines[is_scored])]
    in_order = (first_candidate[:, None] + np.arange(work.candidates)).ravel()
    order[: len(in_order)] = in_order

    row_parts = (
        (starts, shape.tokens),
        (num_missing, 0),
        (counts, 0),
        (slots, memory.spare_slot),
        (cached, 1),
        (lines, _NONE),
        (np.asarray([_or_none(row.drawn) for row in rows], dtype=np.int64), _NONE),
    )
    by_row = []
    for numbers, padding in row_parts:
        part = _padded(shape.rows, padding)
        part[: len(rows)] = numbers
        by_row.append(part)
    return np.concatenate([tokens, positions, cells, candidate, flat_columns, order, *by_row])


def _or_none(number: int | None) -> int:
    return _NONE if number is None else number


def _padded(size: int, padding: int) -> Integers:
    return np.full(size, padding, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Layout:
    """The same on the device; T tokens, R rows, K candidates."""

    tokens: Tensor
    """[T]"""
    positions: Tensor
    """[T]: for the rotation."""
    cells: Tensor
    """[T]: where keys and values go, counted over all slots."""
    flat_columns: Tensor
    """[T]: row * columns + column, of each token."""
    order: Tensor
    """[T]: the tokens of the caller's candidates in the caller's order, as many as there are; then anything."""
    starts: Tensor
    """[R]: the first token of each row."""
    missing: Tensor
    """[R]: how many of the row's tokens are missing ones."""
    counts: Tensor
    """[R]: tokens of each row; 0 in rows that are padding."""
    slots: Tensor
    """[R]"""
    cached: Tensor
    """[R]"""
    drawn: Tensor
    """[R]: the token that was drawn among the candidates of the row's last pass, -1 where none is to be moved."""
    candidates: Tensor
    """[R, K]: ids by row, -1 in rows without candidates."""


def unpack(packed: Tensor, candidates: Tensor, shape: Shape) -> Layout:
    """From what ``pack`` gave, and the ids of ``candidates`` [lines, K], both on the device; waits for nothing."""
    parts = packed.split(shape.part_sizes)
    tokens, positions, cells, candidate, flat_columns, order = parts[:6]
    starts, missing, counts, slots, cached, lines, drawn = parts[6:]
    if candidates.numel():
        ids = candidates.flatten().index_select(0, candidate.clamp_min(0))
        tokens = torch.where(candidate < 0, tokens, ids)
        by_row = candidates.index_select(0, lines.clamp_min(0)).masked_fill_((lines < 0)[:, None], _NONE)
    else:  # rows are extended and none is scored
        by_row = candidates.new_full((shape.rows, shape.candidates), _NONE)
    return Layout(
        tokens=tokens,
        positions=positions,
        cells=cells,
        flat_columns=flat_columns,
        order=order,
        starts=starts,
        missing=missing,
        counts=counts,
        slots=slots,
        cached=cached,
        drawn=drawn,
        candidates=by_row,
    )
