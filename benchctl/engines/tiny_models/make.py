"""Creation of a model directory: whole or not at all."""

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

from benchctl.engines.tiny_models.gguf_file import write_gguf
from benchctl.engines.tiny_models.hugging_face import write_model_files
from benchctl.engines.tiny_models.recipe import Recipe
from benchctl.engines.tiny_models.safetensors_file import write_safetensors
from benchctl.engines.tiny_models.tokenizer import train_tokenizer
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
