"""A value model: a decoder-only backbone whose head gives one number for each position.

The number z is what the head gives before the sigmoid; v = sigmoid(z) grows with what is still to come. The
forward pass is written out here, over tokens that lie flat one after another, because it must attend to a cache
laid out for candidates and be recordable as a CUDA graph. It is that of Qwen2, Qwen3 and Llama, with their linear
maps on the same input merged into one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from benchctl.guided.operations import PLAIN, Operations
from benchctl.guided.value_model.checkpoint import Checkpoint, check_config, read_checkpoint
from benchctl.guided.value_model.sizes import backbone_shapes, head_dim, head_shapes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from benchctl.guided.value_model.layout import Layout, Shape
    from benchctl.guided.value_model.prefixes import PrefixCache


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueModelConfig:
    """Dimensions of a value model."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    ffn: int
    has_head_norm: bool
    """Queries and keys of each head are normalised."""
    norm_epsilon: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """A linear map of weights [N, K] and a bias [N]."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)

    @property
    def tensors(self) -> list[Tensor]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    attention_norm: Tensor
    qkv: Linear
    head_norm: Tensor | None
    """[heads + kv_heads, head_dim]: weights of the norms of queries and keys, where the family has them."""
    out: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class ValueModel:
    """The weights of a value model on one device, and its forward pass, computed with ``operations``."""

    def __init__(self, checkpoint: Checkpoint, operations: Operations = PLAIN) -> None:
        config, tensors = checkpoint.config, checkpoint.tensors
        self.config = dimensions(config)
        self.eos_ids = checkpoint.eos_ids
        self.operations = operations
        self._embedding = tensors["embed_tokens.weight"]
        self._norm = tensors["norm.weight"]
        self._layers = tuple(
            _layer(tensors, f"layers.{number}.", self.config) for number in range(self.config.layers)
        )
        self._fc = _linear(tensors, "v_head.fc")
        # The last sum decides on fine differences between candidates, so it is not rounded to bfloat16.
        kind = torch.promote_types(self.dtype, torch.float32)
        summary = _linear(tensors, "v_head.summary")
        self._summary = Linear(weight=summary.weight.to(kind), bias=summary.bias.to(kind))  # type: ignore[union-attr]
        self._frequencies, self._rotation_scale = _frequencies(config)

    @property
    def device(self) -> torch.device:
        return self._embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding.dtype

    @property
    def num_bytes(self) -> int:
        tensors = [self._embedding, self._norm, *self._fc.tensors, *self._summary.tensors]
        for layer in self._layers:
            tensors += [layer.attention_norm, layer.mlp_norm]
            tensors += [] if layer.head_norm is None else [layer.head_norm]
            for linear in (layer.qkv, layer.out, layer.gate_up, layer.down):
                tensors += linear.tensors
        return sum(tensor.nbytes for tensor in tensors)

    def rotations(self, num_positions: int) -> Tensor:
        """[num_positions, 2, head_dim]: what ``forward`` multiplies queries and keys with, for each position.

        Cosines, and sines with the sign of the half that they multiply: with x' the halves of x swapped,
        x * cos + x' * sin is x turned.
        """
        angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * self._frequencies
        cos, sin = angles.cos() * self._rotation_scale, angles.sin() * self._rotation_scale
        table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), dim=1)
        return table.to(self.device, self.dtype)

    def forward(self, layout: "Layout", shape: "Shape", rotations: Tensor, cache: "PrefixCache") -> Tensor:
        """Raw values z [T] of all tokens, in float32 at least; see ``hidden``."""
        inner = functional.silu(self._fc(self.hidden(layout, shape, rotations, cache)))
        return self._summary(inner.to(self._summary.weight.dtype))[:, 0]

    def hidden(self, layout: "Layout", shape: "Shape", rotations: Tensor, cache: "PrefixCache") -> Tensor:
        """Last hidden states [T, hidden], normalised, of all tokens, whose keys and values go into ``cache``.

        ``rotations`` [positions, 2, head_dim] are what the method of that name gives.
        """
        ops, epsilon = self.operations, self.config.norm_epsilon
        x, delta = functional.embedding(layout.tokens, self._embedding), None
        for number, layer in enumerate(self._layers):
            keys_values = cache.layer(number)
            qkv = layer.qkv(ops.add_norm(x, delta, layer.attention_norm, epsilon))
            query = ops.turn_and_store(
                qkv, rotations, layout.positions, layout.cells, keys_values, layer.head_norm, epsilon
            )
            drawn = ops.tree_attention(
                query, keys_values, layout.starts, layout.missing, layout.counts, layout.slots, layout.cached,
                layout.flat_columns, cache.memory.cells, shape.columns, shape.span,
            )  # fmt: skip
            gate_up = layer.gate_up(ops.add_norm(x, layer.out(drawn), layer.mlp_norm, epsilon))
            delta = layer.down(ops.gated(gate_up))
        return ops.add_norm(x, delta, self._norm, epsilon)


def load_value_model(
    path: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
) -> ValueModel:
    """Read the value model in a directory onto ``device``, in ``dtype`` or as it is stored.

    Raises CheckpointError for any other directory, with the names of missing and unknown tensors.
    """
    return ValueModel(read_checkpoint(Path(path), torch.device(device), dtype))


def random_value_model(
    config: "PreTrainedConfig", device: str | torch.device, dtype: torch.dtype, *, seed: int = 0
) -> ValueModel:
    """A value model of random weights made on ``device``: to measure what a size costs without its checkpoint."""
    check_config(config, "random value model")
    target = torch.device(device)
    # ``meta`` has shapes alone, and no generator.
    generator = None if target.type == "meta" else torch.Generator(target).manual_seed(seed)
    tensors = {}
    for name, shape in {**backbone_shapes(config), **head_shapes(config.hidden_size)}.items():
        tensor = torch.empty(shape, device=target, dtype=dtype)
        tensors[name] = tensor.fill_(1) if "norm" in name else tensor.normal_(0, 0.02, generator=generator)
    return ValueModel(Checkpoint(config=config, tensors=tensors, eos_ids=frozenset()))


def _frequencies(config: "PreTrainedConfig") -> tuple[Tensor, float]:
    """[head_dim / 2]: angle per position of each pair of dimensions; and the factor on cosines and sines."""
    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        size = head_dim(config)
        exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
        return 1 / config.rope_parameters["rope_theta"] ** exponents, 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: PLC0415 - takes seconds

    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return frequencies, float(scale)


def dimensions(config: "PreTrainedConfig") -> ValueModelConfig:
    """Those of a value model with this backbone."""
    heads = config.num_attention_heads
    return ValueModelConfig(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim(config),
        vocab=config.vocab_size,
        ffn=config.intermediate_size,
        has_head_norm="layers.0.self_attn.q_norm.weight" in backbone_shapes(config),
        norm_epsilon=config.rms_norm_eps,
    )


def _layer(tensors: Mapping[str, Tensor], prefix: str, dims: ValueModelConfig) -> _Layer:
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    head_norm = None
    if f"{attention}q_norm.weight" in tensors:
        query, key = tensors[f"{attention}q_norm.weight"], tensors[f"{attention}k_norm.weight"]
        head_norm = torch.cat((query.expand(dims.heads, -1), key.expand(dims.kv_heads, -1)))
    return _Layer(
        attention_norm=tensors[f"{prefix}input_layernorm.weight"],
        qkv=_linear(tensors, *(f"{attention}{part}_proj" for part in "qkv")),
        head_norm=head_norm,
        out=_linear(tensors, f"{attention}o_proj"),
        mlp_norm=tensors[f"{prefix}post_attention_layernorm.weight"],
        gate_up=_linear(tensors, f"{mlp}gate_proj", f"{mlp}up_proj"),
        down=_linear(tensors, f"{mlp}down_proj"),
    )


def _linear(tensors: Mapping[str, Tensor], *names: str) -> Linear:
    """One linear map, or several of the same input as one; either all of them have a bias or none."""
    weights = [tensors[f"{name}.weight"] for name in names]
    biases = [tensors[f"{name}.bias"] for name in names if f"{name}.bias" in tensors]
    return Linear(
        weight=weights[0] if len(weights) == 1 else torch.cat(weights), bias=torch.cat(biases) if biases else None
    )
