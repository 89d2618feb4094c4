"""Creation of a model directory: whole or not at all."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from benchctl.engines.tiny_models.gguf_file import write_gguf
from benchctl.engines.tiny_models.hugging_face import write_model_files
from benchctl.engines.tiny_models.recipe import Recipe
from benchctl.engines.tiny_models.safetensors_file import write_safetensors
from benchctl.engines.tiny_models.tokenizer import train_tokenizer
from benchctl.errors import UsageError

_OWN_SUFFIXES: Final = frozenset({".json", ".safetensors", ".gguf"})


def make_model(
    directory: Path, recipe: Recipe, *, weights: bool = True, gguf: bool = False, replace: bool = False
) -> tuple[Path, ...]:
    """Write the model directory that a recipe describes; return its files.

    ``gguf`` adds a file for llama.cpp, named like the directory. Without ``weights`` engines can load it only
    with random ones of their own. An existing directory is replaced only when asked for, and only when it
    holds nothing but the files of a model. Raises UsageError for that, and where nothing can be written.
    """
    name = directory.expanduser().resolve().name

    def write(partial: Path) -> None:
        tokenizer = train_tokenizer(recipe.shape.vocab)
        write_model_files(partial, recipe, tokenizer)
        if gguf:
            write_gguf(partial / f"{name}.gguf", recipe, tokenizer)
        if weights:
            write_safetensors(partial, recipe)

    return make_directory(directory, write, replace=replace)


def make_directory(directory: Path, write: Callable[[Path], None], *, replace: bool) -> tuple[Path, ...]:
    """The files of a model directory that ``write`` fills; whole or not at all, and as ``make_model`` refuses."""
    directory = directory.expanduser().resolve()
    refuse_what_must_stay(directory, replace=replace)
    try:
        with _replacing(directory) as partial:
            write(partial)
    except OSError as error:
        raise UsageError(
            f"{error.filename or directory}: cannot be written ({error.strerror or error}); make room, correct the "
            "permissions or name another directory"
        ) from error
    return tuple(sorted(directory.iterdir()))


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
    """A temporary directory that replaces ``directory`` at the end, and is removed after an error."""
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        if directory.exists():
            shutil.rmtree(directory)
        partial.replace(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
