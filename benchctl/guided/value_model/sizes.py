"""Sizes of a value model: its tensors, its passes, rounded so that few occur, and its memory; needs no torch."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count, takewhile
from typing import Any, Final, TypeAlias

from benchctl.units import GIB

EMBEDDING: Final = "embed_tokens.weight"


BackboneConfig: TypeAlias = Any
"""The ``config.json`` of a backbone, with the keys that shapes depend on as transformers names them.

A family may have ``attention_bias``, ``mlp_bias`` and a ``head_dim`` of its own beside the sizes of all.
"""


def backbone_shapes(config: BackboneConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a bare backbone."""
    return {
        EMBEDDING: (config.vocab_size, config.hidden_size),
        "norm.weight": (config.hidden_size,),
        **{
            f"layers.{layer}.{name}": shape
            for layer in range(config.num_hidden_layers)
            for name, shape in _layer_shapes(config).items()
        },
    }


def head_dim(config: BackboneConfig) -> int:
    """Dimensions of a head, which some families choose freely."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _layer_shapes(config: BackboneConfig) -> dict[str, tuple[int, ...]]:
    hidden, size, ffn = config.hidden_size, head_dim(config), config.intermediate_size
    query, key = config.num_attention_heads * size, config.num_key_value_heads * size
    # Qwen2 has three of four biases without saying so; others have all of them or none.
    is_qwen2 = config.model_type == "qwen2"
    attention_bias = bool(is_qwen2 or getattr(config, "attention_bias", False))
    mlp_bias = bool(getattr(config, "mlp_bias", False))
    head_norms = {"self_attn.q_norm": ((size,), False), "self_attn.k_norm": ((size,), False)}
    # The shape of each weight, and whether it has a bias.
    weights: dict[str, tuple[tuple[int, ...], bool]] = {
        "self_attn.q_proj": ((query, hidden), attention_bias),
        "self_attn.k_proj": ((key, hidden), attention_bias),
        "self_attn.v_proj": ((key, hidden), attention_bias),
        "self_attn.o_proj": ((hidden, query), attention_bias and not is_qwen2),
        **(head_norms if config.model_type == "qwen3" else {}),
        "mlp.gate_proj": ((ffn, hidden), mlp_bias),
        "mlp.up_proj": ((ffn, hidden), mlp_bias),
        "mlp.down_proj": ((hidden, ffn), mlp_bias),
        "input_layernorm": ((hidden,), False),
        "post_attention_layernorm": ((hidden,), False),
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (shape, has_bias) in weights.items():
        shapes[f"{name}.weight"] = shape
        if has_bias:
            shapes[f"{name}.bias"] = shape[:1]
    return shapes


def head_shapes(hidden: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a value head: hidden to hidden, hidden to one number."""
    return {
        "v_head.fc.weight": (hidden, hidden),
        "v_head.fc.bias": (hidden,),
        "v_head.summary.weight": (1, hidden),
        "v_head.summary.bias": (1,),
    }


MAX_LAG: Final = 8
"""Tokens that a row may lack before it is extended although nothing of it is scored. More of them, a new prompt
above all, go before in a pass of their own."""
MAX_PREFILL_TOKENS: Final = 4096
"""Tokens of a forward pass over prompts, in all rows."""
MAX_ROW_TOKENS: Final = 512
"""Of these, tokens of one row."""
PROMPT_ROWS: Final = 8
"""Rows of a recorded pass over prompts."""
_MOST_PROMPT_TOKENS: Final = 1024
"""Tokens of the largest such pass; for more, a GPU needs about as long as the host for launching it."""
PARTIAL_BYTES: Final = 4
"""Of a partial sum of attention, which is a float32."""
_MOST_PARTIAL_BYTES: Final = 1 << 26
"""Of all partial sums of a pass; one over prompts occupies a GPU without being split into so many."""
_TOKENS_BESIDE: Final = 2
_LAGGING_ROWS: Final = 4
"""The largest pass that is recorded beforehand has so many missing tokens in each row, and so many rows that lack
``MAX_LAG``."""


def padded_tokens(number: int) -> int:
    """``number`` or up to an eighth more."""
    # Numbers of so many bits are not rounded; of larger ones, so many leading bits remain
    return _rounded_up(number, 4)


def _rounded_up(number: int, bits: int) -> int:
    """The next number of which only so many leading bits are set."""
    grain = 1 << max(number.bit_length() - bits, 0)
    return -(-number // grain) * grain


def rows_that_fit(tokens: int, candidates: int) -> int:
    """Most rows of a pass: each has as many candidates, or lacks ``MAX_LAG`` tokens and is only extended."""
    return max(1, tokens // min(candidates, MAX_LAG)) if candidates else tokens


def recorded_sizes(max_rows: int, candidates: int) -> list[int]:
    """The sizes in tokens of all passes of up to ``max_rows`` rows in steady decode, in ascending order."""
    usual = max_rows * (candidates + _TOKENS_BESIDE) + _LAGGING_ROWS * MAX_LAG
    largest = padded_tokens(min(usual, max_rows * (candidates + MAX_LAG)))
    return _sizes(min(candidates, MAX_LAG), largest, padded_tokens)


def _sizes(least: int, most: int, padded: Callable[[int], int]) -> list[int]:
    """All sizes that numbers in this range are padded to, in ascending order."""
    sizes, size = [], least
    while size <= most:
        sizes.append(padded(size))
        size = sizes[-1] + 1
    return sizes


def padded_prompt_tokens(number: int) -> int:
    """``number`` or up to a quarter more."""
    # Leading bits that remain of the tokens of such a pass: up to a quarter is padding
    return _rounded_up(number, 3)


def recorded_prompt_sizes() -> list[int]:
    """The sizes in tokens of the recorded passes over prompts, in ascending order."""
    return _sizes(MAX_LAG + 1, _MOST_PROMPT_TOKENS, padded_prompt_tokens)


def spans(cells: int) -> list[int]:
    """Numbers of cells that attention looks at, in ascending order: each four times the one before, then all."""
    reaches = (256 * 4**power for power in count())
    return [*takewhile(lambda reach: reach < cells, reaches), cells]


def attention_chunks(cells: int, num_drawn: int) -> tuple[int, int]:
    """Cells that one program of attention reads, a power of two, and the number of such parts of ``cells``.

    ``num_drawn`` are the numbers that attention draws in the pass: tokens * heads * head_dim.
    """
    most = max(1, min(16, _MOST_PARTIAL_BYTES // (num_drawn * PARTIAL_BYTES)))
    least = -(-cells // most)
    # Cells that one program of attention reads at least, where there are as many
    chunk = max(512, 1 << (least - 1).bit_length())
    return chunk, -(-cells // chunk)


_CELLS_STEP: Final = 16


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
) -> ValueModelMemory:
    """The memory of a value model with this backbone, whose numbers have ``itemsize`` bytes.

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
        weights=weight_bytes(config, itemsize),
        # Keys and values, in one slot more for padding.
        prefixes=(max_slots + 1)
        * cells
        * config.num_hidden_layers
        * (2 * config.num_key_value_heads * head_dim(config) * itemsize),
        passes=passes,
        max_slots=max_slots,
        max_tokens=max_tokens,
    )


def cells_per_slot(max_tokens: int, max_candidates: int) -> int:
    """Cells of each slot: of the longest prefix and of the candidates behind it, rounded to a multiple of 16."""
    return -(-(max_tokens + max_candidates) // _CELLS_STEP) * _CELLS_STEP


def weight_bytes(config: BackboneConfig, itemsize: int) -> int:
    """Bytes of the weights of a value model with this backbone."""
    shapes = {**backbone_shapes(config), **head_shapes(config.hidden_size)}
    return sum(math.prod(shape) for shape in shapes.values()) * itemsize


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
    return int(tokens * (wide * itemsize + partial * PARTIAL_BYTES))


def gathered_bytes(config: BackboneConfig, itemsize: int, *, rows: int, columns: int, cells: int) -> int:
    """Bytes of one layer's attention as torch computes it: copies of keys and values, the mask and the scores."""
    heads, key_heads = config.num_attention_heads, config.num_key_value_heads
    return int(rows * cells * (2 * key_heads * head_dim(config) + 3 * columns * heads // key_heads) * itemsize)
