"""Creation of a model directory, or of a pair of them: whole or not at all."""

import dataclasses
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

from benchctl.engines.tiny_models.files import train_tokenizer, write_gguf, write_model_files, write_safetensors
from benchctl.engines.tiny_models.recipe import Recipe, TensorSpec, tensor_specs
from benchctl.errors import UsageError

Writers: TypeAlias = Mapping[Path, Callable[[Path], None]]
"""Directories that belong together, and what fills each."""

_ADAPTER_EFFECT: Final = 0.5
"""Spread of what an adapter adds to an output, relative to what the model's own matrix gives: enough to change
tokens, and not so much that the model's own weights no longer matter."""


def make_model(
    directory: Path, recipe: Recipe, *, weights: bool = True, gguf: bool = False, replace: bool = False
) -> tuple[Path, ...]:
    """Write the model directory that a recipe describes; return its files.

    ``gguf`` adds a file for llama.cpp, named like the directory. Without ``weights`` engines can load it only
    with random ones of their own. Refuses as ``make_directories`` does.
    """
    name = f"{directory.expanduser().resolve().name}.gguf" if gguf else None
    return make_directories(
        {directory: partial(write_model, recipe=recipe, weights=weights, gguf=name)}, replace=replace
    )


def make_draft_pair(directory: Path, base: Recipe, layers: int, *, replace: bool = False) -> tuple[Path, ...]:
    """Write ``directory/base`` and ``directory/draft``, its first ``layers`` layers; return their files.

    The two share what both have, so that many of the tokens that one draws are those of the other. Raises
    UsageError for more layers than the base has; refuses as ``make_directories`` does.
    """
    if layers > base.shape.layers:
        raise UsageError(f"a draft has the first layers of its base: {layers} layers of the {base.shape.layers}")
    draft = dataclasses.replace(base, shape=dataclasses.replace(base.shape, layers=layers))
    return make_directories(
        {
            directory / "base": partial(write_model, recipe=base),
            directory / "draft": partial(write_model, recipe=draft),
        },
        replace=replace,
    )


def make_value_pair(
    directory: Path,
    base: Recipe,
    value: Recipe,
    *,
    constant: float | None = None,
    weights: bool = True,
    replace: bool = False,
) -> tuple[Path, ...]:
    """Write ``directory/base`` and ``directory/value``, a value model with the same tokens; return their files.

    With ``constant`` every token of every text has this value v, rounded to the type of the weights; otherwise the
    head is random as well, and values spread over (0, 1). Refuses as ``make_directories`` does.
    """
    head = _head_specs(value, constant)
    # A value model has no use for logits, and its directory none for their weights.
    recipe = dataclasses.replace(value, shape=dataclasses.replace(value.shape, tied_embeddings=True))

    def write_value(target: Path) -> None:
        write_model_files(target, recipe, train_tokenizer(recipe.shape.vocab), is_value_model=True)
        if weights:
            write_safetensors(target / "model.safetensors", recipe, tensor_specs(recipe))
            write_safetensors(target / "value_head.safetensors", recipe, head)

    return make_directories(
        {
            directory / "base": partial(write_model, recipe=base, weights=weights),
            directory / "value": write_value,
        },
        replace=replace,
    )


def _head_specs(recipe: Recipe, constant: float | None) -> tuple[TensorSpec, ...]:
    """The tensors of a value head: hidden to hidden, SiLU, hidden to one number z with v = 1 / (1 + exp(-z)).

    Random ones make values differ from token to token: halving the spread of the last map leaves z within a few
    units of 0, where v is not yet 0 or 1.
    """
    hidden, scale = recipe.shape.hidden, recipe.initializer_range
    spread, raw = scale / 2, 0.0
    if constant is not None:
        if not 0 < constant < 1:
            raise UsageError(f"constant value {constant}: it must lie strictly between 0 (ends now) and 1 (never)")
        spread, raw = 0.0, math.log(constant / (1 - constant))
    return (
        TensorSpec("v_head.fc.weight", (hidden, hidden), scale),
        TensorSpec("v_head.fc.bias", (hidden,), scale),
        TensorSpec("v_head.summary.weight", (1, hidden), spread),
        TensorSpec("v_head.summary.bias", (1,), 0.0, center=raw),
    )


def make_lora_pair(directory: Path, base: Recipe, *, rank: int, replace: bool = False) -> tuple[Path, ...]:
    """Write ``directory/base`` and ``directory/adapter``, a LoRA adapter of every linear layer in PEFT's files.

    Returns the files of both. Refuses as ``make_directories`` does.
    """
    directory = directory.expanduser().resolve()
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(directory / "base"),
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted({spec.name.split(".")[-2] for spec in _adapted(base)}),
    }

    def write_adapter(target: Path) -> None:
        (target / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        write_safetensors(target / "adapter_model.safetensors", base, tuple(adapter_specs(base, rank)))

    return make_directories(
        {directory / "base": partial(write_model, recipe=base), directory / "adapter": write_adapter},
        replace=replace,
    )


def adapter_specs(base: Recipe, rank: int) -> Iterator[TensorSpec]:
    """Two matrices for each adapted one, W + B A: A keeps the spread of a state, B brings the effect."""
    for spec in _adapted(base):
        rows, columns = spec.dims
        name = f"base_model.model.{spec.name.removesuffix('.weight')}"
        effect = _ADAPTER_EFFECT * spec.scale * math.sqrt(columns / rank)
        yield TensorSpec(f"{name}.lora_A.weight", (rank, columns), 1 / math.sqrt(columns))
        yield TensorSpec(f"{name}.lora_B.weight", (rows, rank), effect)


def _adapted(base: Recipe) -> Iterator[TensorSpec]:
    """The matrices of the model's layers."""
    return (spec for spec in tensor_specs(base) if spec.name.endswith("_proj.weight"))


def write_model(directory: Path, recipe: Recipe, *, weights: bool = True, gguf: str | None = None) -> None:
    """Fill a directory with the files of a model; ``gguf`` is the name of one for llama.cpp."""
    tokenizer = train_tokenizer(recipe.shape.vocab)
    write_model_files(directory, recipe, tokenizer)
    if gguf is not None:
        write_gguf(directory / gguf, recipe, tokenizer)
    if weights:
        write_safetensors(directory / "model.safetensors", recipe, tensor_specs(recipe))


def make_directories(writers: Writers, *, replace: bool) -> tuple[Path, ...]:
    """Make directories that belong together, each filled by its writer in this order; return their files.

    All or none: after any failure, an interrupt included, everything is as it was. An existing directory is
    replaced only when asked for, and only when it holds nothing but the files of a model. Raises UsageError for
    that, and where nothing can be written.
    """
    targets = {directory.expanduser().resolve(): write for directory, write in writers.items()}
    for directory in targets:
        _refuse_what_must_stay(directory, replace=replace)
    created = [parent for parent in next(iter(targets)).parents if not parent.exists()]
    partials = {directory: directory.with_name(f".{directory.name}.partial") for directory in targets}
    try:
        for directory, write in targets.items():
            shutil.rmtree(partials[directory], ignore_errors=True)
            partials[directory].mkdir(parents=True)
            write(partials[directory])
        for directory, finished in partials.items():
            if directory.exists():
                shutil.rmtree(directory)
            finished.replace(directory)
    except OSError as error:
        raise UsageError(
            f"{error.filename or next(iter(targets))}: cannot be written ({error.strerror or error}); make room, "
            "correct the permissions or name another directory"
        ) from error
    finally:
        for unfinished in partials.values():
            shutil.rmtree(unfinished, ignore_errors=True)
        with suppress(OSError):  # up to the first that holds anything
            for parent in created:
                parent.rmdir()
    return tuple(path for directory in targets for path in sorted(directory.iterdir()))


def _refuse_what_must_stay(directory: Path, *, replace: bool) -> None:
    """Raise UsageError for a directory that a model must not replace."""
    if not directory.exists():
        return
    if not directory.is_dir():
        raise UsageError(f"{directory}: is a file; name a directory that is to be made")
    files = sorted(directory.iterdir())
    if files and not replace:
        raise UsageError(
            f"{directory}: exists and is not empty; name another directory or add --force to replace it"
        )
    foreign = [
        path.name for path in files if path.is_dir() or path.suffix not in {".json", ".safetensors", ".gguf"}
    ]
    if foreign:
        raise UsageError(
            f"{directory}: holds {', '.join(foreign[:3])}, which no model directory of benchctl has; it is not "
            "replaced, so name another directory"
        )
