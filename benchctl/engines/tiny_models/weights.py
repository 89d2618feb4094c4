"""Random weights and their bytes; pure.

Each tensor has a stream of its own, named by seed and tensor, so that its values depend neither on the tensors
before it nor on how the file is cut into shards. They are drawn in blocks: a model larger than memory can be made.
"""

import hashlib
from collections.abc import Iterator
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from benchctl.engines.tiny_models.recipe import TensorSpec, WeightType

Array: TypeAlias = npt.NDArray[Any]

BLOCK_VALUES: Final = 1 << 22
"""Values drawn at a time: 16 MiB of float32."""


def stream_of(seed: int, name: str) -> np.random.Generator:
    """The stream of random numbers of this name and seed."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return np.random.default_rng(int.from_bytes(digest, "little"))


def draw_blocks(spec: TensorSpec, seed: int) -> Iterator[npt.NDArray[np.float32]]:
    """The values of one tensor in row-major order, flat, at most BLOCK_VALUES at a time."""
    stream = stream_of(seed, spec.name)
    for start in range(0, spec.size, BLOCK_VALUES):
        block = stream.standard_normal(min(BLOCK_VALUES, spec.size - start), dtype=np.float32)
        yield block * np.float32(spec.scale) + np.float32(spec.center)


def stored(values: npt.NDArray[np.float32], dtype: WeightType) -> Array:
    """The values as a checkpoint stores them; bfloat16, which numpy has not, as its 16 bits.

    Files are little-endian, as are the machines that engines run on.
    """
    if dtype == "bfloat16":
        return bfloat16_bits(values)
    return values.astype(np.float16 if dtype == "float16" else np.float32)


def bfloat16_bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The upper half of each finite float32, rounded to the nearest bfloat16, ties to an even last bit."""
    bits = values.view(np.uint32)
    last_kept_bit = (bits >> 16) & 1
    return ((bits + 0x7FFF + last_kept_bit) >> 16).astype(np.uint16)


def whole_tensor(spec: TensorSpec, seed: int, dtype: WeightType) -> Array:
    """One tensor in memory, as stored, in its dimensions."""
    return np.concatenate([stored(block, dtype) for block in draw_blocks(spec, seed)]).reshape(spec.dims)


def interleave_rotary_rows(weight: Array, heads: int) -> Array:
    """Rows of a query or key projection, in the order in which llama.cpp rotates those of the llama family.

    A rotation turns pairs of dimensions. Hugging Face pairs dimension i of a head with i + h/2, llama.cpp
    pairs neighbours; so row i goes to 2i and row i + h/2 to 2i + 1. (For the qwen family llama.cpp rotates as
    Hugging Face does.) ``weight`` has heads x h rows; scores do not change, since q and k move alike.
    """
    rows, *rest = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, *rest)
    return halves.swapaxes(1, 2).reshape(weight.shape)
