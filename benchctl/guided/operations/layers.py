"""The parts of a layer beside its linear maps, computed by torch; shapes name T tokens, R rows, K candidates."""

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

LARGEST_FLOAT8: Final = 448.0
"""Of ``torch.float8_e4m3fn``."""


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
    """Add ``delta``, if any, to ``x`` [T, hidden], in place; returns the RMS norm times ``weight`` [hidden]."""
    if delta is not None:
        x += delta
    return functional.rms_norm(x, weight.shape, weight, epsilon)


def turn_and_store(
    qkv: Tensor,
    rotations: Tensor,
    positions: Tensor,
    cells: Tensor,
    cache: Tensor,
    norm: Tensor | None,
    epsilon: float,
) -> Tensor:
    """Queries [T, heads, head_dim], turned to their positions; turned keys, and values, go into ``cache``.

    ``qkv`` [T, (heads + 2 kv_heads) * head_dim]; ``rotations`` [positions, 2, head_dim], see
    ``ValueModel.rotations``; ``positions`` and ``cells`` [T]; ``cache`` [cells, 2, kv_heads, head_dim];
    ``norm`` [heads + kv_heads, head_dim] are weights of the norms of queries and keys, where the family has them.
    """
    kv_heads, size = cache.shape[2:]
    by_head = qkv.unflatten(-1, (-1, size))
    query_key, value = by_head[:, :-kv_heads], by_head[:, -kv_heads:]
    if norm is not None:
        query_key = functional.rms_norm(query_key, (size,), None, epsilon) * norm
    cos, sin = rotations.index_select(0, positions)[:, None].unbind(2)
    turned = torch.addcmul(query_key * cos, query_key.roll(size // 2, -1), sin)
    query, key = turned[:, :-kv_heads], turned[:, -kv_heads:]
    cache.index_copy_(0, cells, torch.stack((key, value), dim=1))
    return query.clone()


def tree_attention(
    query: Tensor,
    cache: Tensor,
    starts: Tensor,
    missing: Tensor,
    counts: Tensor,  # noqa: ARG001 - tells kernels where they may end
    slots: Tensor,
    cached: Tensor,
    flat_columns: Tensor,
    cells_per_slot: int,
    columns: int,
    span: int,
) -> Tensor:
    """[T, heads * head_dim]: what each token draws from its row's prefix, the missing tokens before it, and itself.

    ``query`` [T, heads, head_dim] and ``cache`` [cells, 2, kv_heads, head_dim], which holds the keys and values of
    these tokens already; ``columns`` are the most tokens of a row, and ``span`` the most cells; the others as in
    ``layout.Layout``. Query heads that share a key head become columns of their own, so that keys need not be
    repeated.
    """
    rows, kv_heads = starts.shape[0], cache.shape[2]
    group = query.shape[1] // kv_heads
    visible = visible_cells(missing, cached, columns, span)
    mask = torch.zeros_like(visible, dtype=query.dtype).masked_fill_(~visible, -torch.inf)
    mask = mask.repeat_interleave(group, dim=1)[:, None]
    column = torch.arange(columns, device=query.device)
    tokens = (starts[:, None] + column).clamp_max_(query.shape[0] - 1).flatten()
    by_slot = cache.unflatten(0, (-1, cells_per_slot))[:, :span]
    keys, values = by_slot.index_select(0, slots).permute(2, 0, 3, 1, 4)
    by_row = query.unflatten(1, (-1, group)).index_select(0, tokens).unflatten(0, (rows, columns))
    drawn = functional.scaled_dot_product_attention(by_row.permute(0, 2, 1, 3, 4).flatten(2, 3), keys, values, mask)
    by_column = drawn.unflatten(2, (columns, group)).permute(0, 2, 1, 3, 4)
    return by_column.flatten(0, 1).flatten(1).index_select(0, flat_columns)


def visible_cells(missing: Tensor, cached: Tensor, columns: int, span: int) -> Tensor:
    """bool [R, columns, span]: which cells each column of a row sees, of the row's slot."""
    column = torch.arange(columns, device=cached.device)
    cell = torch.arange(span, device=cached.device)
    at = cached[:, None] + column
    limit = cached[:, None] + torch.minimum(column, missing[:, None])
    return (cell < limit[..., None]) | (cell == at[..., None])


def gated(gate_up: Tensor) -> Tensor:
    """silu(gate) * up [T, ffn] of ``gate_up`` [T, 2 * ffn]."""
    gate, up = gate_up.chunk(2, -1)
    return functional.silu(gate) * up


def keep_drawn(
    cells: Tensor,
    ids: Tensor,
    unknown: Tensor,
    slots: Tensor,
    cached: Tensor,
    drawn: Tensor,
    cells_per_slot: int,
) -> None:
    """Move the drawn candidate of each row, in all layers, to the end of its prefix.

    ``cells`` [layers, slots * cells_per_slot, 2, kv_heads, head_dim]; ``ids`` [slots, most candidates] are the
    candidates behind each prefix, in the order of their cells; ``slots``, ``cached`` and ``drawn`` [R] as in
    ``layout.Layout``. ``unknown`` [] counts the drawn tokens that were none of these candidates.
    """
    is_moved = drawn >= 0
    matches = ids.index_select(0, slots) == drawn[:, None]
    unknown += (is_moved & ~matches.any(dim=1)).sum()
    # The drawn token is the last cached one, and its candidates began at its cell. Rows without one move the last
    # cell onto itself.
    target = torch.where(is_moved, slots * cells_per_slot + cached - 1, cells.shape[1] - 1)
    source = target + matches.to(torch.int8).argmax(dim=1) * is_moved
    cells.index_copy_(1, target, cells.index_select(1, source))


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` [T, K] in float8_e4m3fn, and the scale of each row [T, 1] in float32 that brings it back.

    The largest number of a row becomes the largest that the type has.
    """
    largest = x.abs().amax(dim=1, keepdim=True).float()
    # A product, because torch divides by a number otherwise on a GPU than elsewhere.
    scales = (largest * (1 / LARGEST_FLOAT8)).clamp_min_(torch.finfo(torch.float32).tiny)
    return (x.float() / scales).to(torch.float8_e4m3fn), scales
