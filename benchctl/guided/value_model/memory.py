"""Memory of a value model on a server: one formula for what is allocated, allowed, planned and said.

It needs no torch, so that the number is known where an experiment is planned.
"""

import math
from dataclasses import dataclass
from typing import Final

from benchctl.guided.value_model.sizes import (
    MAX_LAG,
    MAX_PREFILL_TOKENS,
    PARTIAL_BYTES,
    attention_chunks,
    recorded_sizes,
    rows_that_fit,
)
from benchctl.guided.value_model.tensor_shapes import (
    BackboneConfig,
    backbone_shapes,
    head_dim,
    head_shapes,
    is_quantizable,
)
from benchctl.units import GIB

_CELLS_STEP: Final = 16
_SCALE_BYTES: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueModelMemory:
    """Bytes that a value model takes on a server of ``max_slots`` sequences of up to ``max_tokens`` tokens."""

    weights: int
    prefixes: int
    passes: int
    """What its largest forward pass needs while it runs, and a recorded one keeps."""
    max_slots: int
    max_tokens: int

    def __str__(self) -> str:
        return (
            f"weights {self.weights / GIB:.2f} GiB, prefixes {self.prefixes / GIB:.2f} GiB for {self.max_slots:,} "
            f"sequences of {self.max_tokens:,} tokens"
        )


def value_model_memory(
    config: BackboneConfig,
    itemsize: int,
    *,
    max_slots: int,
    max_tokens: int,
    max_candidates: int,
    candidates: int | None = None,
    kernels: bool = True,
    quantization: str = "none",
) -> ValueModelMemory:
    """The memory of a value model with this backbone, whose numbers have ``itemsize`` bytes where not quantised.

    Slots are made for ``max_candidates``; passes score ``candidates`` in each row, by default as many. Without
    ``kernels`` they are computed by torch alone.
    """
    cells = cells_per_slot(max_tokens, max_candidates)
    candidates = max_candidates if candidates is None else candidates
    tokens = recorded_sizes(max_slots, candidates)[-1]
    passes = pass_bytes(config, itemsize, max(tokens, MAX_PREFILL_TOKENS), cells)
    if not kernels:
        rows = rows_that_fit(tokens, candidates)
        passes += gathered_bytes(config, itemsize, rows=rows, columns=candidates + MAX_LAG, cells=cells)
    return ValueModelMemory(
        weights=weight_bytes(config, itemsize, quantization),
        prefixes=prefix_bytes(
            max_slots=max_slots,
            max_tokens=max_tokens,
            max_candidates=max_candidates,
            layers=config.num_hidden_layers,
            kv_heads=config.num_key_value_heads,
            head_dim=head_dim(config),
            itemsize=itemsize,
        ),
        passes=passes,
        max_slots=max_slots,
        max_tokens=max_tokens,
    )


def cells_per_slot(max_tokens: int, max_candidates: int) -> int:
    """Cells of each slot: of the longest prefix and of the candidates behind it, rounded to a multiple of 16."""
    return -(-(max_tokens + max_candidates) // _CELLS_STEP) * _CELLS_STEP


def prefix_bytes(
    *,
    max_slots: int,
    max_tokens: int,
    max_candidates: int,
    layers: int,
    kv_heads: int,
    head_dim: int,
    itemsize: int,
) -> int:
    """Bytes that the keys and values of ``max_slots`` prefixes take, one slot more for padding included."""
    cells = (max_slots + 1) * cells_per_slot(max_tokens, max_candidates)
    return cells * layers * 2 * kv_heads * head_dim * itemsize


def weight_bytes(config: BackboneConfig, itemsize: int, quantization: str = "none") -> int:
    """Bytes of the weights of a value model with this backbone; ``fp8`` has a byte each and a scale per channel."""
    shapes = {**backbone_shapes(config), **head_shapes(config.hidden_size)}
    return sum(
        math.prod(shape) + shape[0] * _SCALE_BYTES
        if quantization == "fp8" and is_quantizable(name)
        else math.prod(shape) * itemsize
        for name, shape in shapes.items()
    )


def pass_bytes(config: BackboneConfig, itemsize: int, tokens: int, cells: int) -> int:
    """Bytes of the intermediate results of one layer, in a forward pass of so many tokens over slots of ``cells``.

    For each token: the residual and three results as wide as it, gate and up projection and their product, queries
    before and after the rotation, keys and values, and the partial sums of attention, one for each chunk of cells.
    Memory is used again from layer to layer; that the parts of one layer never all live at once is left as slack.
    """
    heads, key_heads, size = config.num_attention_heads, config.num_key_value_heads, head_dim(config)
    wide = 4 * config.hidden_size + 3 * config.intermediate_size + 2 * (heads + key_heads) * size
    _, num_chunks = attention_chunks(cells, tokens * heads * size)
    partial = num_chunks * heads * (size + 1) if num_chunks > 1 else 0
    return tokens * (wide * itemsize + partial * PARTIAL_BYTES)


def gathered_bytes(config: BackboneConfig, itemsize: int, *, rows: int, columns: int, cells: int) -> int:
    """Bytes of one layer's attention as torch computes it: copies of keys and values, the mask and the scores."""
    heads, key_heads = config.num_attention_heads, config.num_key_value_heads
    return rows * cells * (2 * key_heads * head_dim(config) + 3 * columns * heads // key_heads) * itemsize
