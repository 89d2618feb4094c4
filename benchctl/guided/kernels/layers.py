"""The operations of ``operations.layers`` as Triton kernels: one launch each, two of attention split over keys.

Numbers that differ from pass to pass, and pointers into the packed input of a pass (``layout.pack``), whose
alignment does, are kept out of what Triton specialises on: a pass of a new size must not compile anything.

Attention reads as many cells as each row has, which it learns on the device: one recorded graph serves rows of any
length, and a long row is read by several programs at once instead of making all others read as far. Programs for
rows and columns that are padding end at once. What they would have written stays undefined; nothing else ever reads
it, because every other part of the model treats each token by itself.
"""

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchctl.guided.value_model.sizes import attention_chunks

_LEAST_IDS: Final = 64
"""As many candidates as servers usually allow, so that all of them use one program."""


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
    """See ``operations.add_norm``."""
    num_tokens, hidden = x.shape
    normed = torch.empty_like(x)
    block = triton.next_power_of_2(hidden)
    _add_norm[(num_tokens,)](
        x, x if delta is None else delta, weight, normed, epsilon, hidden, block, has_delta=delta is not None
    )
    return normed


@triton.jit
def _add_norm(x, delta, weight, normed, epsilon, hidden, block: tl.constexpr, has_delta: tl.constexpr):  # type: ignore[no-untyped-def]
    column = tl.arange(0, block)
    is_there = column < hidden
    at = tl.program_id(0).to(tl.int64) * hidden + column
    value = tl.load(x + at, mask=is_there, other=0.0).to(tl.float32)
    if has_delta:
        value += tl.load(delta + at, mask=is_there, other=0.0).to(tl.float32)
        rounded = value.to(x.dtype.element_ty)
        tl.store(x + at, rounded, mask=is_there)
        value = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / hidden + epsilon)
    factor = tl.load(weight + column, mask=is_there, other=0.0).to(tl.float32)
    tl.store(normed + at, (value * scale * factor).to(normed.dtype.element_ty), mask=is_there)


def gated(gate_up: Tensor) -> Tensor:
    """See ``operations.gated``."""
    num_tokens, width = gate_up.shape
    result = gate_up.new_empty((num_tokens, width // 2))
    block = min(triton.next_power_of_2(width // 2), 1024)
    _gated[(num_tokens, triton.cdiv(width // 2, block))](gate_up, result, width // 2, block)
    return result


@triton.jit
def _gated(gate_up, result, width, block: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    is_there = column < width
    gate = tl.load(gate_up + token * 2 * width + column, mask=is_there, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * 2 * width + width + column, mask=is_there, other=0.0).to(tl.float32)
    product = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(result + token * width + column, product.to(result.dtype.element_ty), mask=is_there)


def turn_and_store(
    qkv: Tensor,
    rotations: Tensor,
    positions: Tensor,
    cells: Tensor,
    cache: Tensor,
    norm: Tensor | None,
    epsilon: float,
) -> Tensor:
    """See ``operations.turn_and_store``."""
    kv_heads, size = cache.shape[2:]
    num_tokens, num_heads = qkv.shape[0], qkv.shape[1] // size
    heads = num_heads - 2 * kv_heads
    query = qkv.new_empty((num_tokens, heads, size))
    _turn_and_store[(num_tokens, num_heads)](
        qkv, rotations, positions, cells, cache, qkv if norm is None else norm, query, epsilon, heads, kv_heads,
        size, triton.next_power_of_2(size), has_norm=norm is not None,
    )  # fmt: skip
    return query


@triton.jit(do_not_specialize_on_alignment=("positions", "cells"))
def _turn_and_store(  # type: ignore[no-untyped-def]
    qkv, rotations, positions, cells, cache, norm, query, epsilon, heads, kv_heads, size, block: tl.constexpr,
    has_norm: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    element = tl.arange(0, block)
    is_there = element < size
    other = (element + size // 2) % size
    source = qkv + (token * (heads + 2 * kv_heads) + head) * size
    value = tl.load(source + element, mask=is_there, other=0.0)
    cell = tl.load(cells + token)
    if head >= heads + kv_heads:
        target = cache + (cell * 2 + 1) * kv_heads * size + (head - heads - kv_heads) * size
        tl.store(target + element, value, mask=is_there)
    else:
        turned = value.to(tl.float32)
        partner = tl.load(source + other, mask=is_there, other=0.0).to(tl.float32)
        if has_norm:
            scale = 1.0 / tl.sqrt(tl.sum(turned * turned, axis=0) / size + epsilon)
            turned *= scale * tl.load(norm + head * size + element, mask=is_there, other=0.0).to(tl.float32)
            partner *= scale * tl.load(norm + head * size + other, mask=is_there, other=0.0).to(tl.float32)
        turn = rotations + tl.load(positions + token) * 2 * size
        cos = tl.load(turn + element, mask=is_there, other=0.0).to(tl.float32)
        sin = tl.load(turn + size + element, mask=is_there, other=0.0).to(tl.float32)
        turned = (turned * cos + partner * sin).to(query.dtype.element_ty)
        if head < heads:
            tl.store(query + (token * heads + head) * size + element, turned, mask=is_there)
        else:
            target = cache + cell * 2 * kv_heads * size + (head - heads) * size
            tl.store(target + element, turned, mask=is_there)


def keep_drawn(
    cells: Tensor,
    ids: Tensor,
    unknown: Tensor,
    slots: Tensor,
    cached: Tensor,
    drawn: Tensor,
    cells_per_slot: int,
) -> None:
    """See ``operations.layers``."""
    layers, num_cells = cells.shape[:2]
    numbers = cells[0, 0].numel()
    _keep_drawn[(len(slots), layers)](
        cells, ids, unknown, slots, cached, drawn, cells_per_slot, num_cells, numbers, ids.shape[1],
        triton.next_power_of_2(numbers), max(_LEAST_IDS, triton.next_power_of_2(ids.shape[1])),
    )  # fmt: skip


@triton.jit(do_not_specialize=("num_ids",), do_not_specialize_on_alignment=("slots", "cached", "drawn"))
def _keep_drawn(  # type: ignore[no-untyped-def]
    cells, ids, unknown, slots, cached, drawn, cells_per_slot, num_cells, numbers, num_ids, block: tl.constexpr,
    block_ids: tl.constexpr,
):  # fmt: skip
    row, layer = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token = tl.load(drawn + row)
    if token >= 0:
        slot = tl.load(slots + row)
        element = tl.arange(0, block_ids)
        candidate = tl.load(ids + slot * num_ids + element, mask=element < num_ids, other=-1)
        is_it = candidate == token
        first = tl.min(tl.where(is_it, element, block_ids), axis=0)
        target = layer * num_cells + slot * cells_per_slot + tl.load(cached + row) - 1
        if first == block_ids:
            if layer == 0:
                tl.atomic_add(unknown, 1)
        elif first > 0:
            number = tl.arange(0, block)
            moved = tl.load(cells + (target + first) * numbers + number, mask=number < numbers)
            tl.store(cells + target * numbers + number, moved, mask=number < numbers)


_LEAST_TILE: Final = 16
"""Least size of a matrix product in Triton."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Sizes of one program, for which registers and shared memory suffice from compute capability 8.0 on."""

    queries: int
    keys: int
    size: int
    num_warps: int
    num_stages: int


def tiles(query_columns: int, head_dim: int, dtype: torch.dtype) -> Tiles:
    """Of rows with so many query columns; few different ones, because each is compiled by itself."""
    size = max(triton.next_power_of_2(head_dim), _LEAST_TILE)
    if dtype.itemsize > 2:  # no tensor cores: products are written out, and need registers
        return Tiles(queries=_LEAST_TILE, keys=2 * _LEAST_TILE, size=size, num_warps=4, num_stages=2)
    if query_columns <= _LEAST_TILE:
        return Tiles(queries=_LEAST_TILE, keys=64, size=size, num_warps=4, num_stages=3)
    return Tiles(queries=64, keys=64, size=size, num_warps=8 if size > 64 else 4, num_stages=3)


def tree_attention(
    query: Tensor,
    cache: Tensor,
    starts: Tensor,
    missing: Tensor,
    counts: Tensor,
    slots: Tensor,
    cached: Tensor,
    flat_columns: Tensor,
    cells_per_slot: int,
    columns: int,
    span: int,  # noqa: ARG001 - torch needs to know it
) -> Tensor:
    """See ``operations.tree_attention``; looks at as many cells as there are, whatever ``span`` says."""
    num_tokens, heads, size = query.shape
    kv_heads, num_rows = cache.shape[2], starts.shape[0]
    group = heads // kv_heads
    chunk, num_chunks = attention_chunks(cells_per_slot, query.numel())
    tile = tiles(columns * group, size, query.dtype)
    num_blocks = triton.cdiv(columns * group, tile.queries)
    result = torch.empty_like(query)
    if num_chunks == 1:
        partial = logs = result
    else:
        partial = query.new_empty((num_chunks, num_tokens, heads, size), dtype=torch.float32)
        logs = query.new_empty((num_chunks, num_tokens, heads), dtype=torch.float32)
    _tree_attention[(num_rows, kv_heads * num_blocks, num_chunks)](
        query, cache, starts, missing, counts, slots, cached, result, partial, logs, size**-0.5, cells_per_slot,
        num_tokens, heads, kv_heads, size, num_blocks, chunk, group, tile.queries, tile.keys, tile.size,
        is_split=num_chunks > 1, precision="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    if num_chunks > 1:
        _merge_chunks[(num_tokens, heads)](
            partial, logs, flat_columns, counts, cached, result, num_tokens, heads, size, columns, chunk, tile.size
        )
    return result.flatten(1)


@triton.jit(
    do_not_specialize=("num_tokens", "num_blocks"),
    do_not_specialize_on_alignment=("starts", "missing", "counts", "slots", "cached"),
)
def _tree_attention(  # type: ignore[no-untyped-def]
    query, cache, starts, missing, counts, slots, cached, result, partial, logs, scale, cells_per_slot, num_tokens,
    heads, kv_heads, size, num_blocks, chunk, group: tl.constexpr, block_queries: tl.constexpr,
    block_keys: tl.constexpr, block_size: tl.constexpr, is_split: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    row, number = tl.program_id(0), tl.program_id(2)
    head, block = tl.program_id(1) // num_blocks, tl.program_id(1) % num_blocks
    count, prefix = tl.load(counts + row).to(tl.int32), tl.load(cached + row).to(tl.int32)
    length = prefix + count
    first = number * chunk
    index = block * block_queries + tl.arange(0, block_queries)
    column = index // group
    if (block * block_queries < count * group) & (first < length):
        element = tl.arange(0, block_size)
        is_query = (column < count)[:, None] & (element < size)[None, :]
        token = tl.load(starts + row) + column
        of_query = (token * heads + head * group + index % group)[:, None] * size + element[None, :]
        queries = tl.load(query + of_query, mask=is_query, other=0.0)
        limit = (prefix + tl.minimum(column, tl.load(missing + row).to(tl.int32)))[:, None]
        own = (prefix + column)[:, None]
        keys_of_row = cache + tl.load(slots + row) * cells_per_slot * 2 * kv_heads * size + head * size
        largest = tl.full((block_queries,), float("-inf"), tl.float32)
        total = tl.zeros((block_queries,), tl.float32)
        drawn = tl.zeros((block_queries, block_size), tl.float32)
        for begin in range(first, tl.minimum(first + chunk, length), block_keys):
            cell = begin + tl.arange(0, block_keys)
            is_key = (cell < length)[:, None] & (element < size)[None, :]
            # Within one slot, which has fewer numbers than 32 bits count.
            of_key = cell[:, None] * (2 * kv_heads * size) + element[None, :]
            keys = tl.load(keys_of_row + of_key, mask=is_key, other=0.0)
            scores = tl.dot(queries, tl.trans(keys), input_precision=precision) * scale
            is_seen = (cell[None, :] < limit) | (cell[None, :] == own)
            scores = tl.where(is_seen & (cell < length)[None, :], scores, float("-inf"))
            larger = tl.maximum(largest, tl.max(scores, axis=1))
            # Where nothing was seen yet, all is minus infinity, and its difference from itself no number.
            base = tl.where(larger == float("-inf"), 0.0, larger)
            weights = tl.exp(scores - base[:, None])
            fading = tl.exp(largest - base)
            values = tl.load(keys_of_row + kv_heads * size + of_key, mask=is_key, other=0.0)
            total = total * fading + tl.sum(weights, axis=1)
            drawn = drawn * fading[:, None] + tl.dot(weights.to(values.dtype), values, input_precision=precision)
            largest = larger
        drawn = drawn / tl.where(total == 0.0, 1.0, total)[:, None]
        if is_split:
            of_part = number.to(tl.int64) * num_tokens * heads
            log = largest + tl.log(total)
            tl.store(logs + of_part + token * heads + head * group + index % group, log, mask=column < count)
            tl.store(partial + of_part * size + of_query, drawn, mask=is_query)
        else:
            tl.store(result + of_query, drawn.to(result.dtype.element_ty), mask=is_query)


@triton.jit(
    do_not_specialize=("num_tokens", "columns"), do_not_specialize_on_alignment=("flat_columns", "counts", "cached")
)
def _merge_chunks(  # type: ignore[no-untyped-def]
    partial,
    logs,
    flat_columns,
    counts,
    cached,
    result,
    num_tokens,
    heads,
    size,
    columns,
    chunk,
    block_size: tl.constexpr,
):
    """Weigh what a token drew from each chunk by the chunk's share of its weights."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(flat_columns + token) // columns
    length = tl.load(cached + row) + tl.load(counts + row)
    element = tl.arange(0, block_size)
    is_there = element < size
    largest = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    drawn = tl.zeros((block_size,), tl.float32)
    for number in range(tl.cdiv(length, chunk)):
        at = (number * num_tokens + token) * heads + head
        log = tl.load(logs + at)
        larger = tl.maximum(largest, log)
        base = tl.where(larger == float("-inf"), 0.0, larger)
        fading, weight = tl.exp(largest - base), tl.exp(log - base)
        part = tl.load(partial + at * size + element, mask=is_there, other=0.0)
        drawn = drawn * fading + part * weight
        total = total * fading + weight
        largest = larger
    merged = drawn / tl.where(total == 0.0, 1.0, total)
    tl.store(result + (token * heads + head) * size + element, merged.to(result.dtype.element_ty), mask=is_there)
