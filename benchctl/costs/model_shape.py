"""Model shapes: the dimensions of a decoder-only transformer, and their FLOPs and bytes per token."""

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, TypeVar

from benchctl.errors import UsageError

Precision: TypeAlias = Literal["bfloat16", "fp8", "int8", "fp4"]
"""Arithmetic of matrix products."""

WeightFormat: TypeAlias = Literal["bfloat16", "fp8", "fp8-stored", "int8", "int8-stored", "int4", "fp4"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeights:
    """``bytes_per_param`` with scales; ``precision`` of the products with these weights."""

    bytes_per_param: float
    precision: Precision = "bfloat16"


WEIGHT_FORMATS: Final[dict[WeightFormat, StoredWeights]] = {
    "bfloat16": StoredWeights(bytes_per_param=2.0),
    # One 32-bit scale for a block of 128 times 128; one for each row or tensor is less still.
    "fp8": StoredWeights(bytes_per_param=1.0 + 4 / 128**2, precision="fp8"),
    "fp8-stored": StoredWeights(bytes_per_param=1.0 + 4 / 128**2),
    "int8": StoredWeights(bytes_per_param=1.0, precision="int8"),
    "int8-stored": StoredWeights(bytes_per_param=1.0),
    # Groups of 128 with a 16-bit scale and a 4-bit zero.
    "int4": StoredWeights(bytes_per_param=0.5 + 2.5 / 128),
    # Groups of 16 with an 8-bit scale (NVFP4); those of MXFP4 have 32.
    "fp4": StoredWeights(bytes_per_param=0.5 + 1 / 16, precision="fp4"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentShape:
    """Dimensions of a latent attention.

    ``kv_rank`` is r (``kv_lora_rank``), ``rope_dim`` R, ``nope_dim`` P and ``value_dim`` V of each head.
    ``q_rank`` is that of the query's own low-rank projection, or None for a full one: it must not be taken for
    the hidden size, which is 43 % off for DeepSeek-V2.
    """

    q_rank: int | None
    kv_rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if (type(value) is not int or value < 1) and not (name == "q_rank" and value is None):
                raise UsageError(f"latent attention: {name} is {value!r}; it must be a positive whole number")

    def replicated_params(self, hidden: int) -> int:
        """Weights that every device of a tensor-parallel group holds whole: the projections down.

        d (r + R), and d q of a low-rank query.
        """
        return hidden * (self.kv_rank + self.rope_dim) + (hidden * self.q_rank if self.q_rank else 0)

    def head_params(self, hidden: int, heads: int) -> int:
        """Weights that are divided by head: query, keys and values up, output.

        H (q (P + R) + r (P + V) + V d), with d for q without a low-rank query.
        """
        query = (self.q_rank or hidden) * (self.nope_dim + self.rope_dim)
        return heads * (query + self.kv_rank * (self.nope_dim + self.value_dim) + self.value_dim * hidden)

    def norm_params(self) -> int:
        """Norms of the low-rank vectors."""
        return self.kv_rank + (self.q_rank or 0)

    def cache_elements(self) -> int:
        """Elements that the cache holds for one token of one layer: r + R, on every device."""
        return self.kv_rank + self.rope_dim

    def expanded_flops(self, heads: int) -> int:
        """FLOPs for one token and one position with keys and values projected up: 2 H (P + R + V)."""
        return 2 * heads * (self.nope_dim + self.rope_dim + self.value_dim)

    def absorbed_flops(self, heads: int) -> int:
        """FLOPs for one token and one position against the cached vectors: 2 H (r + R) + 2 H r."""
        return 2 * heads * (2 * self.kv_rank + self.rope_dim)

    def expansion_flops(self, heads: int) -> int:
        """FLOPs to project one cached token's keys and values up: 2 H r (P + V)."""
        return 2 * heads * self.kv_rank * (self.nope_dim + self.value_dim)


if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Quantity = TypeVar("Quantity", float, "NDArray[np.float64]")
"""One batch, or many at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeShape:
    """The blocks with experts of a model: ``layers`` of its layers have them, the others are dense.

    ``shared_ffn`` is the width of all experts that every token passes, together; 0 without any. ``groups`` and
    ``groups_per_token`` are those of group-limited routing: a token's experts come from so many of the groups.
    ``has_shared_gate`` and ``has_routing_bias`` add parameters that cost nothing.
    """

    layers: int
    experts: int
    experts_per_token: int
    expert_ffn: int
    shared_ffn: int = 0
    groups: int = 1
    groups_per_token: int = 1
    has_shared_gate: bool = False
    has_routing_bias: bool = False

    def __post_init__(self) -> None:
        for name in ("layers", "experts", "experts_per_token", "expert_ffn", "groups", "groups_per_token"):
            if type(value := getattr(self, name)) is not int or value < 1:
                raise UsageError(f"experts: {name} is {value!r}; it must be a positive whole number")
        if self.experts_per_token > self.experts:
            raise UsageError(
                f"experts: each token chooses {self.experts_per_token} of {self.experts}; it cannot choose more "
                "than there are"
            )

    def expert_params(self, hidden: int) -> int:
        """Weights of one expert: gate, up and down projection, 3 d d_e."""
        return 3 * hidden * self.expert_ffn

    def shared_params(self, hidden: int) -> int:
        """Weights of the shared experts and the router of one layer: 3 d d_s + d N."""
        return 3 * hidden * self.shared_ffn + hidden * self.experts

    def active_params(self, hidden: int) -> int:
        """Weights of one layer that a token is multiplied with: k experts, the shared ones and the router."""
        return self.experts_per_token * self.expert_params(hidden) + self.shared_params(hidden)

    def params(self, hidden: int) -> int:
        """All weights of one layer's block."""
        gate = hidden if self.has_shared_gate else 0
        bias = self.experts if self.has_routing_bias else 0
        return self.experts * self.expert_params(hidden) + self.shared_params(hidden) + gate + bias

    def linear_experts(self, tokens: Quantity) -> Quantity:
        """Distinct experts that tokens read if no two of them share one: min(N, k T)."""
        return at_most(tokens * self.experts_per_token, self.experts)

    def uniform_experts(self, tokens: Quantity) -> Quantity:
        """Expected distinct experts of independent, equally likely choices: N (1 - (1 - k / N)^T)."""
        unread_frac: Quantity = (1 - self.experts_per_token / self.experts) ** tokens
        return self.experts - self.experts * unread_frac


def at_most(quantity: Quantity, bound: float) -> Quantity:
    """The lesser of a quantity and a bound, element by element."""
    if isinstance(quantity, float | int):
        return min(quantity, bound)
    return quantity.clip(max=bound)


def at_least(quantity: Quantity, bound: float) -> Quantity:
    """The greater of a quantity and a bound, element by element."""
    if isinstance(quantity, float | int):
        return max(quantity, bound)
    return quantity.clip(min=bound)


Head: TypeAlias = Literal["lm_head", "value_head"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Dimensions of one model.

    ``head_dim`` is a dimension of its own: ``hidden / q_heads`` is wrong for models that choose it freely.
    ``head`` follows the last hidden state: a projection on the vocabulary, or a value head of two
    layers (hidden to hidden, hidden to one number). ``ffn`` is the width of dense blocks; ``moe`` describes the
    layers with experts, ``latent`` a latent attention, with which ``head_dim`` is the width of an expanded key.
    ``weight_format`` is that of the projections; embedding and head are not quantised.
    """

    name: str
    layers: int
    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied_embeddings: bool = False
    head: Head = "lm_head"
    qkv_bias: bool = False
    qk_norm: bool = False
    """Norms of queries and keys, head by head."""
    moe: MoeShape | None = None
    latent: LatentShape | None = None
    weight_format: WeightFormat = "bfloat16"

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is int and (type(value) is not int or value < 1):
                raise UsageError(
                    f"shape {self.name!r}: {field.name} is {value!r}; it must be a positive whole number"
                )
        if self.q_heads % self.kv_heads:
            raise UsageError(
                f"shape {self.name!r}: {self.q_heads} query heads do not divide among {self.kv_heads} key-value "
                "heads; kv_heads must divide q_heads"
            )
        if self.moe is not None and self.moe.layers > self.layers:
            raise UsageError(
                f"shape {self.name!r}: {self.moe.layers} of {self.layers} layers have experts; there cannot be more"
            )

    @property
    def dense_layers(self) -> int:
        """Layers without experts."""
        return self.layers - (self.moe.layers if self.moe is not None else 0)

    def attention_params(self) -> int:
        """Weights of one layer's attention: 2 d h (Hq + Hkv), or those of a latent attention."""
        if self.latent is not None:
            return self.latent.replicated_params(self.hidden) + self.latent.head_params(self.hidden, self.q_heads)
        return 2 * self.hidden * self.head_dim * (self.q_heads + self.kv_heads)

    def static_params(self) -> int:
        """Weights of projections that any pass reads: attention, dense blocks, shared experts and routers."""
        dense = self.dense_layers * 3 * self.hidden * self.ffn
        shared = self.moe.layers * self.moe.shared_params(self.hidden) if self.moe is not None else 0
        return self.layers * self.attention_params() + dense + shared

    def expert_params(self) -> int:
        """Weights of one routed expert in every layer that has experts; 0 for a dense model."""
        return self.moe.layers * self.moe.expert_params(self.hidden) if self.moe is not None else 0

    def active_params(self) -> int:
        """Weights of projections that one token is multiplied with."""
        chosen = self.moe.experts_per_token if self.moe is not None else 0
        return self.static_params() + chosen * self.expert_params()

    def linear_flops_per_token(self) -> int:
        """FLOPs of all projections for one token: two for each weight that it is multiplied with.

        A dense model has L (4 d Hq h + 4 d Hkv h + 6 d ff): query and output, key and value, and gate, up and down
        projection. With experts, only the k chosen and the shared ones count, and the router.
        """
        return 2 * self.active_params()

    def attention_flops_per_position(self) -> int:
        """FLOPs of scores and weighted sum for one token and one position that it attends to: L 4 Hq h.

        For a latent attention those of a prompt, with keys and values projected up.
        """
        if self.latent is not None:
            return self.layers * self.latent.expanded_flops(self.q_heads)
        return self.layers * 4 * self.q_heads * self.head_dim

    def decode_attention_flops_per_position(self) -> int:
        """As ``attention_flops_per_position`` for a decoding token, which a latent attention absorbs."""
        if self.latent is not None:
            return self.layers * self.latent.absorbed_flops(self.q_heads)
        return self.attention_flops_per_position()

    def lm_head_flops(self) -> int:
        """FLOPs of one position's logits: 2 d V."""
        return 2 * self.hidden * self.vocab

    def value_head_flops(self) -> int:
        """FLOPs of one value: 2 d d + 2 d, a hidden layer of the model's width and one output."""
        return 2 * self.hidden * self.hidden + 2 * self.hidden

    def head_flops(self) -> int:
        """FLOPs of the head that this model has, for one position."""
        return self.lm_head_flops() if self.head == "lm_head" else self.value_head_flops()

    def num_params(self) -> int:
        """Parameters: embedding, an untied vocabulary head or the value head, projections, biases, norms.

        A tied embedding is counted once. A value model keeps its embedding and no vocabulary head.
        """
        embedding = self.vocab * self.hidden
        untied = embedding if self.head == "lm_head" and not self.tied_embeddings else 0
        value_head = (self.hidden + 1) ** 2 if self.head == "value_head" else 0
        return embedding + untied + value_head + self.projection_params() + self._small_params()

    def projection_params(self) -> int:
        """Weights of all projections, every expert included; routers and their gates as well."""
        dense = self.dense_layers * 3 * self.hidden * self.ffn
        experts = self.moe.layers * self.moe.params(self.hidden) if self.moe is not None else 0
        return self.layers * self.attention_params() + dense + experts

    def _small_params(self) -> int:
        """Biases and norms."""
        biases = self.head_dim * (self.q_heads + 2 * self.kv_heads) if self.qkv_bias else 0
        norms = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        latent_norms = self.latent.norm_params() if self.latent is not None else 0
        return self.layers * (biases + norms + latent_norms) + self.hidden

    def weight_bytes(self, bytes_per_param: float | None = None) -> int:
        """Memory that all parameters occupy: projections in their format, everything else in 2 bytes.

        ``bytes_per_param`` replaces both.
        """
        if bytes_per_param is not None:
            return round(self.num_params() * bytes_per_param)
        projections = self.projection_params()
        return round(projections * self.param_bytes() + (self.num_params() - projections) * 2)

    def param_bytes(self) -> float:
        """Bytes of one weight of a projection as stored."""
        return WEIGHT_FORMATS[self.weight_format].bytes_per_param

    @property
    def precision(self) -> Precision:
        """Arithmetic of the products with these weights."""
        return WEIGHT_FORMATS[self.weight_format].precision

    def kv_bytes_per_token(self, bytes_per_element: float = 2) -> int:
        """Key-value cache of one token: a key and a value for each layer and key-value head, or r + R."""
        elements = self.latent.cache_elements() if self.latent is not None else 2 * self.kv_heads * self.head_dim
        return round(self.layers * elements * bytes_per_element)

    def as_value_model(self) -> "ModelShape":
        """The same backbone with a value head instead of the projection on the vocabulary."""
        return replace(self, head="value_head")
