"""The weights of a dense model, drawn at random: fused as serving engines fuse them.

One product gives query, key and value of all heads, and one gives gate and up projection. Matrices are stored
``[outputs, inputs]``, as checkpoints store them.
"""

import math
from dataclasses import dataclass

import torch

from benchctl.micro.inside.dimensions import Dimensions

STANDARD_DEVIATION = 0.02
"""Of weights, as models are initialised; larger ones would overflow half precision."""


@dataclass(frozen=True)
class LayerWeights:
    """Weights of one layer."""

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    """``[(Hq + 2 Hkv) h, d]``: rows of all query heads, then of key heads, then of value heads."""
    qkv_bias: torch.Tensor | None
    head_norms: torch.Tensor | None
    """``[Hq + Hkv, h]``: the norm of queries repeated for each query head, that of keys for each key head."""
    output: torch.Tensor
    block_norm: torch.Tensor
    gate_up: torch.Tensor
    """``[2 ff, d]``: rows of the gate, then of the up projection."""
    down: torch.Tensor


@dataclass(frozen=True)
class ModelWeights:
    """All weights of one model on one device."""

    dimensions: Dimensions
    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: torch.Tensor
    """``[V, d]``; the embedding itself where both are tied."""

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    def num_params(self) -> int:
        """Parameters as counted in the tensors themselves.

        A tied embedding counts once, and so does a norm that is repeated for each head.
        """
        tensors = [self.embedding, self.final_norm]
        if self.head is not self.embedding:
            tensors.append(self.head)
        repeated = 0
        for layer in self.layers:
            present = [value for value in vars(layer).values() if value is not None]
            tensors += present
            if layer.head_norms is not None:
                repeated += layer.head_norms.numel() - 2 * self.dimensions.head_dim
        return sum(tensor.numel() for tensor in tensors) - repeated


def random_weights(dimensions: Dimensions, *, dtype: torch.dtype, device: torch.device, seed: int) -> ModelWeights:
    """Weights of a normal distribution; norms are drawn around 1, so that a pass that forgets one is seen.

    Those of equal seed on one kind of device are equal.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        empty = torch.empty(rows, columns, dtype=dtype, device=device)
        return empty.normal_(0.0, STANDARD_DEVIATION, generator=generator)

    def norm(width: int) -> torch.Tensor:
        return torch.empty(width, dtype=dtype, device=device).normal_(1.0, 0.1, generator=generator)

    def layer() -> LayerWeights:
        d, qkv_rows = dimensions, dimensions.qkv_heads * dimensions.head_dim
        return LayerWeights(
            attention_norm=norm(d.hidden),
            qkv=matrix(qkv_rows, d.hidden),
            qkv_bias=matrix(1, qkv_rows)[0] if d.qkv_bias else None,
            head_norms=repeated_norms(d, norm(d.head_dim), norm(d.head_dim)) if d.qk_norm else None,
            output=matrix(d.hidden, d.q_heads * d.head_dim),
            block_norm=norm(d.hidden),
            gate_up=matrix(2 * d.ffn, d.hidden),
            down=matrix(d.hidden, d.ffn),
        )

    embedding = matrix(dimensions.vocab, dimensions.hidden)
    layers = tuple(layer() for _ in range(dimensions.layers))
    head = embedding if dimensions.tied_embeddings else matrix(dimensions.vocab, dimensions.hidden)
    return ModelWeights(dimensions, embedding, layers, norm(dimensions.hidden), head)


def repeated_norms(dimensions: Dimensions, of_queries: torch.Tensor, of_keys: torch.Tensor) -> torch.Tensor:
    """One row for each query head, then for each key head."""
    rows = (of_queries.expand(dimensions.q_heads, -1), of_keys.expand(dimensions.kv_heads, -1))
    return torch.cat(rows).contiguous()


def rotation(
    dimensions: Dimensions, positions: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines ``[T, 1, h]`` (both halves) and sines ``[T, 1, h / 2]`` of rotary embeddings at ``positions``.

    The angle of pair i at position p is p θ^(-2i/h) (Su et al., arXiv 2104.09864); pair i are elements i and
    i + h/2 of a head, as in checkpoints of Llama and Qwen.
    """
    half = dimensions.head_dim // 2
    exponents = torch.arange(half, dtype=torch.float32, device=positions.device) * (2 / dimensions.head_dim)
    frequencies = torch.exp(-math.log(dimensions.rope_theta) * exponents)
    angles = positions.to(torch.float32)[:, None, None] * frequencies
    return torch.cat((angles.cos(), angles.cos()), dim=-1).to(dtype), angles.sin().to(dtype)
