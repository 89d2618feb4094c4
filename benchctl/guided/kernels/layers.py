"""The operations of ``operations.layers`` as Triton kernels, one launch each; ``attention`` has that of attention.

Numbers that differ from pass to pass, and pointers into the packed input of a pass (``layout.pack``), whose
alignment does, are kept out of what Triton specialises on: a pass of a new size must not compile anything.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

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
