"""Memory of the prefixes that a value model keeps: one formula for what is allocated, allowed and said."""

import math
from typing import TYPE_CHECKING, Final

from benchctl.guided.value_model.checkpoint import backbone_shapes, head_shapes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_CELLS_STEP: Final = 16


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


def weight_bytes(config: "PreTrainedConfig", itemsize: int) -> int:
    """Bytes of the weights of a value model with this backbone."""
    shapes = {**backbone_shapes(config), **head_shapes(config.hidden_size)}
    return itemsize * sum(math.prod(shape) for shape in shapes.values())
