"""The dimensions of a dense model and of one forward pass, and the memory that both need.

What does not fit is refused before anything is allocated.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
MARGIN_FRAC = 0.05
"""Memory beside what is counted: workspaces of libraries, and pieces that the allocator cannot use."""
PAGE_TOKENS = 16
"""Tokens of one page of a paged cache."""


class WorkerError(Exception):
    """A measurement that cannot be made; the worker goes on to live.

    ``kind`` says what it lacks: ``settings`` that describe a measurement, ``torch``, the ``device``, ``memory``, a
    graph that can be captured (``capture``), ``outputs`` that are finite and agree.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Dimensions:
    """Blocks of Llama, Qwen2 (with biases of query, key and value) or Qwen3 (with norms of queries and keys)."""

    layers: int
    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Dimensions":
        """From the fields of a message; others are ignored."""
        return cls(**{field.name: values[field.name] for field in fields(cls) if field.name in values})

    @property
    def qkv_heads(self) -> int:
        """Heads of query, key and value together: rows of one product."""
        return self.q_heads + 2 * self.kv_heads

    def num_params(self) -> int:
        """Parameters, with an embedding that is tied to the head counted once."""
        attention = self.hidden * self.head_dim * (self.qkv_heads + self.q_heads)
        biases = self.head_dim * self.qkv_heads if self.qkv_bias else 0
        norms = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        embeddings = self.vocab * self.hidden * (1 if self.tied_embeddings else 2)
        return embeddings + self.layers * (attention + 3 * self.hidden * self.ffn + biases + norms) + self.hidden

    def kv_elements_per_token(self) -> int:
        return self.layers * 2 * self.kv_heads * self.head_dim


@dataclass(frozen=True)
class PassPoint:
    """One forward pass: see ``benchctl.profile.choices.ForwardPoint``, whose fields these are."""

    phase: Literal["decode", "prefill"]
    batch_size: int
    new_tokens: int = 1
    context_tokens: int = 0

    @property
    def total_new_tokens(self) -> int:
        return self.batch_size * self.new_tokens

    @property
    def total_tokens(self) -> int:
        """Tokens of one sequence after the pass."""
        return self.context_tokens + self.new_tokens

    def __str__(self) -> str:
        return (
            f"{self.phase} of {self.batch_size} sequences with {self.new_tokens} new and {self.context_tokens} "
            "cached tokens each"
        )


@dataclass(frozen=True)
class KvPlan:
    """Layout of the cache of one pass: pages of ``page_tokens`` for each sequence, or one page that holds all."""

    sequences: int
    pages: int
    """Pages of one sequence."""
    page_tokens: int

    @property
    def is_paged(self) -> bool:
        return self.pages > 1


def kv_plan(layout: Literal["contiguous", "paged"], point: PassPoint, page_tokens: int = PAGE_TOKENS) -> KvPlan:
    """The cache of all tokens of a pass; a paged one is rounded up to whole pages."""
    if layout == "contiguous":
        return KvPlan(point.batch_size, 1, point.total_tokens)
    return KvPlan(point.batch_size, -(-point.total_tokens // page_tokens), page_tokens)


def pass_bytes(dimensions: Dimensions, point: PassPoint, plan: KvPlan, dtype: str) -> tuple[int, int]:
    """Bytes of the cache of one pass, and of its buffers.

    The buffers are what ``model.ForwardPass`` allocates, with the results of operators that allocate their own
    (two norms, attention and its activation), one layer's gathered pages, and the mask of a prompt that
    continues: n (c + n) booleans, widened to an element each by kernels that add it.
    """
    element = ELEMENT_BYTES[dtype]
    cache = plan.sequences * plan.pages * plan.page_tokens * dimensions.kv_elements_per_token() * element
    widths = 4 * dimensions.hidden + dimensions.head_dim * (dimensions.qkv_heads * 2 + dimensions.q_heads)
    per_token = widths + 4 * dimensions.ffn
    gathered = cache // dimensions.layers if plan.is_paged else 0
    is_masked = point.new_tokens > 1 and point.context_tokens > 0
    mask = point.new_tokens * point.total_tokens * (1 + element) if is_masked else 0
    logits = point.batch_size * dimensions.vocab * 2
    return cache, (point.total_new_tokens * per_token + logits) * element + gathered + mask
