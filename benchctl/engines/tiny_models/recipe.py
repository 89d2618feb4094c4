"""The recipe of a model of random weights, the tensors that follow from it, and their values; pure.

Each tensor has a stream of its own, named by seed and tensor, so that its values do not depend on the tensors
before it: a model with fewer layers and the same seed is the beginning of the one with more. Memory holds one
tensor at a time.
"""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from benchctl.costs.shapes import ModelShape
from benchctl.errors import UsageError

Architecture: TypeAlias = Literal["qwen2", "qwen3", "llama"]
Array: TypeAlias = npt.NDArray[Any]
WeightType: TypeAlias = Literal["bfloat16", "float16", "float32"]

BYTES_PER_WEIGHT: Final[dict[WeightType, int]] = {"bfloat16": 2, "float16": 2, "float32": 4}
NORM_SPREAD: Final = 0.1
"""Standard deviation of norm weights around 1. Were all of them 1, an engine could mix them up unseen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything that decides the bytes of a model directory; ``context`` is its longest sequence in tokens.

    Raises UsageError where no engine could load the result, or where the shape is not of this architecture.
    """

    arch: Architecture
    shape: ModelShape
    context: int
    dtype: WeightType
    seed: int

    def __post_init__(self) -> None:
        shape = self.shape
        problems = (
            (shape.head != "lm_head", " has a value head; name the backbone that it was made from"),
            (
                shape.moe is not None or shape.latent is not None,
                " has experts or a latent attention, which no architecture here has; name a dense model",
            ),
            (
                shape.head_dim % 2 == 1,
                (
                    f": {shape.head_dim} dimensions per head cannot be rotated in pairs; choose hidden and heads "
                    "so that hidden / heads is even"
                ),
            ),
            (
                shape.head_dim * shape.q_heads != shape.hidden and self.arch == "qwen2",
                (
                    f": {shape.q_heads} heads of {shape.head_dim} are not the hidden size of {shape.hidden}, as "
                    "qwen2 needs; choose another arch"
                ),
            ),
        )
        if problem := next((problem for is_there, problem in problems if is_there), None):
            raise UsageError(f"shape {shape.name!r}{problem}")

    @property
    def name(self) -> str:
        """Name from its architecture, dimensions and seed, whatever its directory."""
        return f"random-{self.arch}-{self.shape.layers}x{self.shape.hidden}-seed{self.seed}"

    @property
    def initializer_range(self) -> float:
        """Standard deviation of all matrices: 0.2 at a hidden size of 128, and 0.2 sqrt(128 / hidden) in general.

        Trained models start from 0.02, which leaves a small random model almost nothing but its embedding: it
        repeats one token for ever. With this value a state of unit size gives logits that spread by 2.3 at any
        width, so that one token differs from the next and sampling has something to choose.
        """
        return 0.2 * math.sqrt(128 / self.shape.hidden)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a checkpoint by its Hugging Face name: normal values of mean ``center``, spread ``scale``."""

    name: str
    dims: tuple[int, ...]
    scale: float
    center: float = 0.0

    @property
    def size(self) -> int:
        return math.prod(self.dims)


def tensor_specs(recipe: Recipe) -> tuple[TensorSpec, ...]:
    """All tensors of the model, in the order of a forward pass."""
    shape, scale = recipe.shape, recipe.initializer_range
    embedding = (shape.vocab, shape.hidden)
    return (
        TensorSpec("model.embed_tokens.weight", embedding, scale),
        *(spec for layer in range(shape.layers) for spec in _layer_specs(recipe, f"model.layers.{layer}.")),
        _norm("model.norm.weight", shape.hidden),
        *(() if shape.tied_embeddings else (TensorSpec("lm_head.weight", embedding, scale),)),
    )


def _layer_specs(recipe: Recipe, prefix: str) -> Iterator[TensorSpec]:
    shape, scale = recipe.shape, recipe.initializer_range
    q_rows, kv_rows = shape.q_heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield _norm(f"{prefix}input_layernorm.weight", shape.hidden)
    for part, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
        yield TensorSpec(f"{prefix}self_attn.{part}_proj.weight", (rows, shape.hidden), scale)
        if shape.qkv_bias:
            yield TensorSpec(f"{prefix}self_attn.{part}_proj.bias", (rows,), scale)
        if recipe.arch == "qwen3" and part in "qk":
            yield _norm(f"{prefix}self_attn.{part}_norm.weight", shape.head_dim)
    yield TensorSpec(f"{prefix}self_attn.o_proj.weight", (shape.hidden, q_rows), scale)
    yield _norm(f"{prefix}post_attention_layernorm.weight", shape.hidden)
    yield TensorSpec(f"{prefix}mlp.gate_proj.weight", (shape.ffn, shape.hidden), scale)
    yield TensorSpec(f"{prefix}mlp.up_proj.weight", (shape.ffn, shape.hidden), scale)
    yield TensorSpec(f"{prefix}mlp.down_proj.weight", (shape.hidden, shape.ffn), scale)


def _norm(name: str, size: int) -> TensorSpec:
    return TensorSpec(name, (size,), NORM_SPREAD, center=1.0)


def stream_of(seed: int, name: str) -> np.random.Generator:
    """The stream of random numbers of this name and seed."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return np.random.default_rng(int.from_bytes(digest, "little"))


def bfloat16_bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The upper half of each finite float32, rounded to the nearest bfloat16, ties to an even last bit."""
    bits = values.view(np.uint32)
    last_kept_bit = (bits >> 16) & 1
    return ((bits + 0x7FFF + last_kept_bit) >> 16).astype(np.uint16)


def whole_tensor(spec: TensorSpec, seed: int, dtype: WeightType) -> Array:
    """One tensor as a checkpoint stores it, in its dimensions; bfloat16, which numpy has not, as its 16 bits.

    Files are little-endian, as are the machines that engines run on.
    """
    normal = stream_of(seed, spec.name).standard_normal(spec.dims, dtype=np.float32)
    values = normal * np.float32(spec.scale) + np.float32(spec.center)
    return bfloat16_bits(values) if dtype == "bfloat16" else values.astype(dtype)


def interleave_rotary_rows(weight: Array, heads: int) -> Array:
    """Rows of a query or key projection, in the order in which llama.cpp rotates those of the llama family.

    A rotation turns pairs of dimensions. Hugging Face pairs dimension i of a head with i + h/2, llama.cpp
    pairs neighbours; so row i goes to 2i and row i + h/2 to 2i + 1. (For the qwen family llama.cpp rotates as
    Hugging Face does.) ``weight`` has heads x h rows; scores do not change, since q and k move alike.
    """
    rows, *rest = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, *rest)
    return halves.swapaxes(1, 2).reshape(weight.shape)
