"""Weights as safetensors, written block by block.

The library of that name wants all tensors in memory at once and has no bfloat16 for numpy.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from benchctl.engines.tiny_models.recipe import BYTES_PER_WEIGHT, Recipe, TensorSpec, tensor_specs
from benchctl.engines.tiny_models.weights import draw_blocks, stored

Draw: TypeAlias = Callable[[TensorSpec, int], Iterator[npt.NDArray[np.float32]]]
"""Draws the values of a tensor from a seed, flat and in blocks."""

SHARD_BYTES: Final = 4_000_000_000
"""Largest file of weights, unless a single tensor is larger."""
_LENGTH_BYTES: Final = 8
_TYPE_NAMES: Final = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def write_safetensors(directory: Path, recipe: Recipe, *, shard_bytes: int = SHARD_BYTES) -> None:
    """Write ``model.safetensors``, or shards of at most ``shard_bytes`` with the index that lists them."""
    shards = _shards(recipe, shard_bytes)
    if len(shards) == 1:
        write_tensors(directory / "model.safetensors", recipe, shards[0])
        return
    file_of_tensor: dict[str, str] = {}
    for number, specs in enumerate(shards, start=1):
        filename = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_tensors(directory / filename, recipe, specs)
        file_of_tensor |= {spec.name: filename for spec in specs}
    num_bytes = sum(_num_bytes(spec, recipe) for specs in shards for spec in specs)
    index = {"metadata": {"total_size": num_bytes}, "weight_map": file_of_tensor}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _shards(recipe: Recipe, shard_bytes: int) -> list[list[TensorSpec]]:
    """Tensors in their order, as many to a file as fit; every file has at least one."""
    shards: list[list[TensorSpec]] = [[]]
    room = shard_bytes
    for spec in tensor_specs(recipe):
        num_bytes = _num_bytes(spec, recipe)
        if num_bytes > room and shards[-1]:
            shards.append([])
            room = shard_bytes
        shards[-1].append(spec)
        room -= num_bytes
    return shards


def write_tensors(path: Path, recipe: Recipe, specs: Sequence[TensorSpec], draw: Draw = draw_blocks) -> None:
    """Write one file of these tensors, in the type and from the seed of the recipe."""
    # Some loaders refuse a file that does not name the framework of its layout.
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for spec in specs:
        start, end = end, end + _num_bytes(spec, recipe)
        header[spec.name] = {
            "dtype": _TYPE_NAMES[recipe.dtype],
            "shape": spec.dims,
            "data_offsets": (start, end),
        }
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % _LENGTH_BYTES)  # so that the weights begin at a multiple of eight bytes
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(_LENGTH_BYTES, "little") + encoded)
        for spec in specs:
            for block in draw(spec, recipe.seed):
                file.write(stored(block, recipe.dtype).data)


def _num_bytes(spec: TensorSpec, recipe: Recipe) -> int:
    return spec.size * BYTES_PER_WEIGHT[recipe.dtype]
