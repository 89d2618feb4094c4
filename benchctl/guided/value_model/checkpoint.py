"""The directory of a value model: a backbone as Hugging Face stores it, and a value head of two layers.

The head is in ``value_head.safetensors`` or among the backbone's own shards. Every tensor must be known and
none may be missing: weights that were silently left out or drawn at random would still give values.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from benchctl.guided.params import CheckpointError
from benchctl.guided.value_model.sizes import EMBEDDING, backbone_shapes, head_shapes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

HEAD_FILE: Final = "value_head.safetensors"
_FAMILIES: Final = ("qwen2", "qwen3", "llama")
_FIXED_ROTATIONS: Final = ("default", "linear", "llama3", "yarn")
"""Rotations that depend on the position alone, not on the length of the sequence as well."""
_NAMES_SHOWN: Final = 5


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The content of a directory; tensors by the names of a bare backbone (``layers.0...``) and of the head."""

    config: "PreTrainedConfig"
    tensors: Mapping[str, Tensor]
    eos_ids: frozenset[int]


def read_checkpoint(directory: Path, device: torch.device, dtype: torch.dtype | None) -> Checkpoint:
    """Read all weights onto ``device``, converted to ``dtype``, or as they are stored if None.

    Raises CheckpointError that names the directory and the error in it.
    """
    config = read_config(directory)
    stored = _read_tensors(directory, device, dtype)
    if (vocabulary_head := stored.pop("lm_head.weight", None)) is not None:
        # Some tied checkpoints store the embedding by that name alone.
        stored.setdefault(EMBEDDING, vocabulary_head)
    expected = {**backbone_shapes(config), **head_shapes(config.hidden_size)}
    _check(directory, stored, expected)
    return Checkpoint(
        config=config, tensors={name: stored[name] for name in expected}, eos_ids=read_eos_ids(directory)
    )


def read_config(directory: Path) -> "PreTrainedConfig":
    """The configuration of the backbone, of a kind that can be computed here."""
    from transformers import AutoConfig  # noqa: PLC0415 - takes seconds

    document = _read_json(directory / "config.json")
    if document is None:
        raise CheckpointError(f"{directory}: has no config.json; name the directory of a value model")
    family = document.get("model_type")
    if family not in _FAMILIES:
        raise CheckpointError(
            f"{directory}/config.json: model_type is {family!r}; a value model has a backbone of "
            f"{', '.join(_FAMILIES)}"
        )
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(directory, local_files_only=True)
    except (OSError, TypeError, ValueError, KeyError) as error:
        raise CheckpointError(f"{directory}/config.json: describes no model ({error}); correct it") from error
    check_config(config, directory)
    return config


def check_config(config: "PreTrainedConfig", source: object) -> None:
    """Raise CheckpointError where the arithmetic of ``ValueModel`` would not be that of this backbone."""
    rotation = config.rope_parameters["rope_type"]
    problems = (
        (
            "sliding_attention" in (getattr(config, "layer_types", None) or ()),
            "has layers of sliding-window attention; only full attention is computed",
        ),
        (config.hidden_act != "silu", f"hidden_act is {config.hidden_act!r}; only 'silu' is computed"),
        (
            rotation not in _FIXED_ROTATIONS,
            (
                f"rope_type is {rotation!r}, which moves keys that are already cached; choose a model with one of "
                f"{', '.join(_FIXED_ROTATIONS)}"
            ),
        ),
    )
    if problem := next((problem for is_there, problem in problems if is_there), None):
        raise CheckpointError(f"{source}: {problem}")


def _read_tensors(directory: Path, device: torch.device, dtype: torch.dtype | None) -> dict[str, Tensor]:
    # A value model of random weights is made without this library.
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415

    tensors: dict[str, Tensor] = {}
    for path in _weight_files(directory):
        try:
            with safe_open(path, framework="pt", device=str(device)) as file:
                for stored_name in file.keys():  # noqa: SIM118 - an open file is no mapping
                    name = stored_name.removeprefix("model.")
                    if name in tensors:
                        raise CheckpointError(
                            f"{path}: {stored_name} is stored a second time; leave one of the two out"
                        )
                    tensor = file.get_tensor(stored_name)
                    tensors[name] = tensor if dtype is None else tensor.to(dtype)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: cannot be read as safetensors ({error}); fetch it again") from error
    return tensors


def _weight_files(directory: Path) -> list[Path]:
    index = _read_json(directory / "model.safetensors.index.json")
    file_of_tensor = index.get("weight_map") if index is not None else None
    names = sorted(set(file_of_tensor.values())) if isinstance(file_of_tensor, dict) else ["model.safetensors"]
    if (directory / HEAD_FILE).is_file() and HEAD_FILE not in names:
        names.append(HEAD_FILE)
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{directory}: has no {', '.join(missing[:_NAMES_SHOWN])}; name a complete directory with its weights"
        )
    return [directory / name for name in names]


def _check(directory: Path, stored: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    faults = []
    if missing := [name for name in expected if name not in stored]:
        faults.append(f"has no {_listed(missing)}")
    if extra := [name for name in stored if name not in expected]:
        faults.append(f"has {_listed(extra)}, which no such model has")
    faults += [
        f"{name} is {tuple(tensor.shape)} and must be {expected[name]}"
        for name, tensor in stored.items()
        if name in expected and tuple(tensor.shape) != expected[name]
    ][:_NAMES_SHOWN]
    if faults:
        raise CheckpointError(
            f"{directory}: {'; '.join(faults)}; name a value model whose config.json and weights belong together"
        )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more


def read_eos_ids(directory: Path) -> frozenset[int]:
    """Tokens that end a text: those of the configuration, of generation_config.json, and the tokenizer's own."""
    ids: list[object] = []
    for filename in ("config.json", "generation_config.json"):
        given = (_read_json(directory / filename) or {}).get("eos_token_id")
        ids += given if isinstance(given, list) else [given]
    token = (_read_json(directory / "tokenizer_config.json") or {}).get("eos_token")
    content = token.get("content") if isinstance(token, dict) else token
    added = (_read_json(directory / "tokenizer.json") or {}).get("added_tokens", [])
    ids += [entry.get("id") for entry in added if entry.get("content") == content]
    return frozenset(id_ for id_ in ids if isinstance(id_, int))


def _read_json(path: Path) -> dict[str, Any] | None:
    """The object in a file, or None where there is no such file."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON ({error}); fetch it again") from error
    if not isinstance(document, dict):
        raise CheckpointError(f"{path}: holds {type(document).__name__}, not an object; fetch it again")
    return document
