"""Model shapes: the dimensions of a decoder-only transformer, and their FLOPs and bytes per token.

Described are dense blocks and blocks with experts (``experts.py``), all with a gate, under ordinary (multi-head,
grouped-query) or latent attention (``latent.py``). ``shapes.py`` finds the shape of a model.

A multiply-add counts as two FLOPs. Norms, rotations, softmax, activations and biases are left out, as usual:
they are below one percent of the matrix products. Attention is that over the whole context: for a layer with a
sliding window or chunks it is an upper bound.
"""

from dataclasses import dataclass, fields, replace
from typing import Literal, TypeAlias

from benchctl.costs.experts import MoeShape
from benchctl.costs.latent import LatentShape
from benchctl.costs.precision import WEIGHT_FORMATS, Precision, WeightFormat
from benchctl.errors import UsageError

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
