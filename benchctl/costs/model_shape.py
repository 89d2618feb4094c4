"""Model shapes: the dimensions of a decoder-only transformer, and their FLOPs and bytes per token.

Described are dense blocks and blocks with experts (``MoeShape``), all with a gate, under ordinary (multi-head,
grouped-query) or latent attention (``LatentShape``). ``shapes.py`` finds the shape of a model.

A multiply-add counts as two FLOPs. Norms, rotations, softmax, activations and biases are left out, as usual:
they are below one percent of the matrix products. Attention is that over the whole context: for a layer with a
sliding window or chunks it is an upper bound.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias, TypeVar

from benchctl.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Quantity = TypeVar("Quantity", float, "NDArray[np.float64]")
"""One batch, or many at once."""
Head: TypeAlias = Literal["lm_head", "value_head"]
Precision: TypeAlias = Literal["bfloat16", "fp8", "int8", "fp4"]
"""Arithmetic of matrix products."""
WeightFormat: TypeAlias = Literal["bfloat16", "fp8", "fp8-stored", "int8", "int8-stored", "int4", "fp4"]


class StoredWeights(NamedTuple):
    """Bytes of each weight with the scales of its group, and the precision of the products with these weights.

    A format that is only stored (``int4``) is widened to bfloat16 before it is multiplied; one that is also
    computed in (``fp8``, ``int8``) uses the device's faster peak, if it has one.
    """

    bytes_per_param: float
    precision: Precision = "bfloat16"


WEIGHT_FORMATS: Final[dict[WeightFormat, StoredWeights]] = {
    "bfloat16": StoredWeights(2.0),
    # One 32-bit scale for a block of 128 times 128; one for each row or tensor is less still.
    "fp8": StoredWeights(1.0 + 4 / 128**2, "fp8"),
    "fp8-stored": StoredWeights(1.0 + 4 / 128**2),
    "int8": StoredWeights(1.0, "int8"),
    "int8-stored": StoredWeights(1.0),
    # Groups of 128 with a 16-bit scale and a 4-bit zero.
    "int4": StoredWeights(0.5 + 2.5 / 128),
    # Groups of 16 with an 8-bit scale (NVFP4); those of MXFP4 have 32.
    "fp4": StoredWeights(0.5 + 1 / 16, "fp4"),
}


def at_least(quantity: Quantity, bound: float) -> Quantity:
    """The greater of a quantity and a bound, element by element."""
    if isinstance(quantity, float | int):
        return max(quantity, bound)
    return quantity.clip(min=bound)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentShape:
    """Multi-head latent attention: dimensions, weights, and the two ways to compute it.

    The cache holds one vector of r + R elements for each token, from which the keys and values of all heads follow
    by up-projection. An engine computes a prompt with keys and values projected up (*expanded*: heads of P + R and
    V) and a decoding token against the cached vectors themselves (*absorbed*: the query is projected down instead,
    and heads are r + R and r wide). Both need the same projections for each new token, H r (P + V); they differ in
    the work for each position attended to. Source: DeepSeek-V2 (arXiv 2405.04434) and the MLA backend of vLLM.

    ``kv_rank`` is r (``kv_lora_rank``), ``rope_dim`` R, ``nope_dim`` P and ``value_dim`` V of each head.
    ``q_rank`` is that of the query's own low-rank projection, or None for a full one: it must not be taken for
    the hidden size, which is 43 % off for DeepSeek-V2.
    """

    q_rank: int | None
    kv_rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int

    def replicated_params(self, hidden: int) -> int:
        """Weights that every device of a tensor-parallel group holds whole: the projections down.

        d (r + R), and d q of a low-rank query.
        """
        return hidden * (self.kv_rank + self.rope_dim + (self.q_rank or 0))

    def head_params(self, hidden: int, heads: int) -> int:
        """Weights that are divided by head: query, keys and values up, output.

        H (q (P + R) + r (P + V) + V d), with d for q without a low-rank query.
        """
        query = (self.q_rank or hidden) * (self.nope_dim + self.rope_dim)
        return heads * (query + self.kv_rank * (self.nope_dim + self.value_dim) + self.value_dim * hidden)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeShape:
    """The blocks with experts of a model: ``layers`` of its layers have them, the others are dense.

    ``shared_ffn`` is the width of all experts that every token passes, together; 0 without any.
    ``has_shared_gate`` and ``has_routing_bias`` add parameters that cost nothing. That routing takes a token's
    experts from some groups of them changes no count.

    Each of T tokens chooses k of N experts. The number of distinct experts, whose weights a forward pass has to
    read, is at most N and, with any token, at least k. ``linear_experts`` counts too many once k T is about N / 2.
    Tokens count, not requests: a prompt of 1,024 tokens reads nearly all experts.
    ``docs/design/step-time-model.md`` compares both rules with measured kernels.
    """

    layers: int
    experts: int
    experts_per_token: int
    expert_ffn: int
    shared_ffn: int = 0
    has_shared_gate: bool = False
    has_routing_bias: bool = False

    def expert_params(self, hidden: int) -> int:
        """Weights of one expert: gate, up and down projection, 3 d d_e."""
        return 3 * hidden * self.expert_ffn

    def shared_params(self, hidden: int) -> int:
        """Weights of the shared experts and the router of one layer: 3 d d_s + d N."""
        return 3 * hidden * self.shared_ffn + hidden * self.experts

    def params(self, hidden: int) -> int:
        """All weights of one layer's block."""
        gate_and_bias = hidden * self.has_shared_gate + self.experts * self.has_routing_bias
        return self.experts * self.expert_params(hidden) + self.shared_params(hidden) + gate_and_bias

    def linear_experts(self, tokens: Quantity) -> Quantity:
        """Distinct experts that tokens read if no two of them share one: min(N, k T)."""
        return self.experts - at_least(self.experts - tokens * self.experts_per_token, 0.0)

    def uniform_experts(self, tokens: Quantity) -> Quantity:
        """Expected distinct experts of independent, equally likely choices: N (1 - (1 - k / N)^T)."""
        unread_frac: Quantity = (1 - self.experts_per_token / self.experts) ** tokens
        return self.experts - self.experts * unread_frac


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
        if self.q_heads % self.kv_heads:
            raise UsageError(
                f"shape {self.name!r}: {self.q_heads} query heads do not divide among {self.kv_heads} key-value "
                "heads; kv_heads must divide q_heads"
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
        shared = self.moe.layers * self.moe.shared_params(self.hidden) if self.moe is not None else 0
        return self._attention_and_dense_params() + shared

    def projection_params(self) -> int:
        """Weights of all projections, every expert included; routers and their gates as well."""
        experts = self.moe.layers * self.moe.params(self.hidden) if self.moe is not None else 0
        return self._attention_and_dense_params() + experts

    def _attention_and_dense_params(self) -> int:
        return self.layers * self.attention_params() + self.dense_layers * 3 * self.hidden * self.ffn

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
        head = 0 if self.tied_embeddings else embedding
        if self.head == "value_head":
            head = (self.hidden + 1) ** 2
        biases = self.head_dim * (self.q_heads + 2 * self.kv_heads) if self.qkv_bias else 0
        norms = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        if self.latent is not None:
            norms += self.latent.kv_rank + (self.latent.q_rank or 0)
        return embedding + head + self.projection_params() + self.layers * (biases + norms) + self.hidden

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
