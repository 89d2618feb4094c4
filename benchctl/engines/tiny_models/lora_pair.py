"""A base model and a LoRA adapter for it, in the files of the library PEFT, which engines load."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from benchctl.engines.tiny_models.make import make_directories, write_model
from benchctl.engines.tiny_models.recipe import Recipe, TensorSpec, tensor_specs
from benchctl.engines.tiny_models.safetensors_file import write_tensors

_EFFECT: Final = 0.5
"""Spread of what the adapter adds to an output, relative to what the model's own matrix gives: enough to change
tokens, and not so much that the model's own weights no longer matter."""


def make_lora_pair(directory: Path, base: Recipe, *, rank: int, replace: bool = False) -> tuple[Path, ...]:
    """Write ``directory/base`` and ``directory/adapter``, which adapts every linear layer; return their files.

    As ``make_model`` refuses.
    """
    directory = directory.expanduser().resolve()

    def write_base(partial: Path) -> None:
        write_model(partial, base)

    def write_adapter(partial: Path) -> None:
        config = _config(base, rank, directory / "base")
        (partial / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        write_tensors(partial / "adapter_model.safetensors", base, tuple(_adapter_specs(base, rank)))

    return make_directories({directory / "base": write_base, directory / "adapter": write_adapter}, replace=replace)


def num_adapter_params(base: Recipe, rank: int) -> int:
    """The weights of such an adapter."""
    return sum(spec.size for spec in _adapter_specs(base, rank))


def _config(base: Recipe, rank: int, base_directory: Path) -> dict[str, object]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base_directory),
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted({spec.name.split(".")[-2] for spec in _adapted(base)}),
    }


def _adapted(base: Recipe) -> Iterator[TensorSpec]:
    """The matrices of the model's layers."""
    return (spec for spec in tensor_specs(base) if spec.name.endswith("_proj.weight"))


def _adapter_specs(base: Recipe, rank: int) -> Iterator[TensorSpec]:
    """Two matrices for each adapted one, W + B A: A keeps the spread of a state, B brings the effect."""
    for spec in _adapted(base):
        rows, columns = spec.dims
        name = f"base_model.model.{spec.name.removesuffix('.weight')}"
        yield TensorSpec(f"{name}.lora_A.weight", (rank, columns), 1 / math.sqrt(columns))
        effect = _EFFECT * spec.scale * math.sqrt(columns / rank)
        yield TensorSpec(f"{name}.lora_B.weight", (rows, rank), effect)
