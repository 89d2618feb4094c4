"""Creation of a model directory or of a pair of them: whole or not at all."""

import dataclasses
import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

from benchctl.engines.tiny_models.files import (
    train_tokenizer,
    write_gguf,
    write_model_files,
    write_safetensors,
    write_tensors,
)
from benchctl.engines.tiny_models.recipe import Recipe, TensorSpec, tensor_specs
from benchctl.errors import UsageError, require_packages

_OWN_SUFFIXES: Final = frozenset({".json", ".safetensors", ".gguf"})


def make_model(
    directory: Path, recipe: Recipe, *, weights: bool = True, gguf: bool = False, replace: bool = False
) -> tuple[Path, ...]:
    """Write the model directory that a recipe describes; return its files.

    ``gguf`` adds a file for llama.cpp, named like the directory. Without ``weights`` engines can load it only
    with random ones of their own. An existing directory is replaced only when asked for, and only when it
    holds nothing but the files of a model. Raises UsageError for that, and where nothing can be written;
    MissingPackageError, a UsageError, before anything is created.
    """
    name = directory.expanduser().resolve().name

    def write(partial: Path) -> None:
        write_model(partial, recipe, weights=weights, gguf=f"{name}.gguf" if gguf else None)

    return make_directories({directory: write}, packages=("gguf",) if gguf else (), replace=replace)


def write_model(directory: Path, recipe: Recipe, *, weights: bool = True, gguf: str | None = None) -> None:
    """Fill a directory with the files of a model; ``gguf`` is the name of one for llama.cpp."""
    tokenizer = train_tokenizer(recipe.shape.vocab)
    write_model_files(directory, recipe, tokenizer)
    if gguf is not None:
        write_gguf(directory / gguf, recipe, tokenizer)
    if weights:
        write_safetensors(directory, recipe)


def make_directories(
    writers: Mapping[Path, Callable[[Path], None]], *, packages: Sequence[str] = (), replace: bool
) -> tuple[Path, ...]:
    """Make directories that belong together, each filled by its writer in this order; return their files.

    All or none: after any failure, an interrupt included, the place is as it was. ``packages`` are needed beside
    ``tokenizers``. Refuses as ``make_model`` does.
    """
    require_packages(("tokenizers", *packages), "models cannot be made")
    directories = [directory.expanduser().resolve() for directory in writers]
    for directory in directories:
        refuse_what_must_stay(directory, replace=replace)
    try:
        with ExitStack() as stack:
            partials = [stack.enter_context(_replacing(directory)) for directory in directories]
            for partial, write in zip(partials, writers.values(), strict=True):
                write(partial)
    except OSError as error:
        raise UsageError(
            f"{error.filename or directories[0]}: cannot be written ({error.strerror or error}); make room, "
            "correct the permissions or name another directory"
        ) from error
    return tuple(path for directory in directories for path in sorted(directory.iterdir()))


def refuse_what_must_stay(directory: Path, *, replace: bool) -> None:
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
    foreign = [path.name for path in files if path.is_dir() or path.suffix not in _OWN_SUFFIXES]
    if foreign:
        raise UsageError(
            f"{directory}: holds {', '.join(foreign[:3])}, which no model directory of benchctl has; it is not "
            "replaced, so name another directory"
        )


@contextmanager
def _replacing(directory: Path) -> Iterator[Path]:
    """A temporary directory that replaces ``directory`` at the end, and leaves no trace after an error."""
    partial, old = (directory.with_name(f".{directory.name}.{word}") for word in ("partial", "old"))
    created = [parent for parent in directory.parents if not parent.exists()]
    try:
        for path in (partial, old):
            shutil.rmtree(path, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        if directory.exists():
            directory.replace(old)
        partial.replace(directory)
    finally:
        if old.exists() and not directory.exists():
            old.replace(directory)
        for path in (partial, old):
            shutil.rmtree(path, ignore_errors=True)
        _remove_empty(created)


def _remove_empty(directories: Iterable[Path]) -> None:
    """Remove the directories, the innermost first, up to the first that holds anything."""
    with suppress(OSError):
        for directory in directories:
            directory.rmdir()


HEAD_FILE = "value_head.safetensors"


def make_value_pair(
    directory: Path,
    base: Recipe,
    value: Recipe,
    *,
    constant: float | None = None,
    weights: bool = True,
    replace: bool = False,
) -> tuple[Path, ...]:
    """Write ``directory/base`` and ``directory/value``; return their files.

    Both have the tokenizer of ``base``, so ``value`` must have as many tokens; UsageError otherwise. With
    ``constant`` every token of every text has this value v, rounded to the type of the weights; otherwise the head
    is random as well, and values spread over (0, 1).
    """
    if value.shape.vocab != base.shape.vocab:
        raise UsageError(
            f"the base model has {base.shape.vocab} tokens and the value model {value.shape.vocab}; a pair has one "
            "tokenizer, so give both the same vocabulary"
        )
    head = head_specs(value, constant)
    # A value model has no use for logits, and its directory none for their weights.
    recipe = dataclasses.replace(value, shape=dataclasses.replace(value.shape, tied_embeddings=True))

    def write_base(partial: Path) -> None:
        write_model(partial, base, weights=weights)

    def write_value(partial: Path) -> None:
        write_model_files(partial, recipe, train_tokenizer(recipe.shape.vocab), is_value_model=True)
        if weights:
            write_safetensors(partial, recipe)
            write_tensors(partial / HEAD_FILE, recipe, head)

    return make_directories({directory / "base": write_base, directory / "value": write_value}, replace=replace)


def head_specs(recipe: Recipe, constant: float | None) -> tuple[TensorSpec, ...]:
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
