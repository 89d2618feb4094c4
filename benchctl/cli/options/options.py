"""Options that several commands share, the values of options that are lists, and words that a shell completes.

A command with many options gets them as one object: a frozen dataclass, whose fields are declared as parameters of
a command are.
"""

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar, get_type_hints

import typer

from benchctl.errors import UsageError
from benchctl.profile.choices import MAX_BLOCKS, MAX_SEED
from benchctl.profile.engine_options import ENGINES
from benchctl.profile.files import preset_files, profile_files

RESULTS: Final = Path(os.environ.get("BENCHCTL_RESULTS") or "results")
"""Parent of result directories where nothing else is named."""


def complete_profile(incomplete: str) -> list[str]:
    """Names of profiles that begin so; the shell adds files by itself where there are none."""
    return _beginning(incomplete, profile_files())


def complete_engine(incomplete: str) -> list[str]:
    """Names of engine presets and kinds that begin so."""
    return _beginning(incomplete, sorted({*preset_files(), *ENGINES}))


def complete_results(incomplete: str) -> list[str]:
    """Result directories below the parent of results that begin so, ``latest`` of each experiment first."""
    directories = (path.parent for path in RESULTS.glob("*/*/manifest.json"))
    ordered = sorted(directories, key=lambda path: (path.name != "latest", str(path)))
    return _beginning(incomplete, map(str, ordered))


def _beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


ProfileName = Annotated[
    str | None,
    typer.Option(
        "--profile",
        "-p",
        metavar="NAME|PATH",
        help="Profile of the experiment (not a torch profile).",
        autocompletion=complete_profile,
    ),
]
EnginePreset = Annotated[
    str | None,
    typer.Option(
        "--engine", help="Engine preset or kind instead of the profile's.", autocompletion=complete_engine
    ),
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="A.B=C", help="Override one setting; repeat as needed.")
]
Blocks = Annotated[
    int | None, typer.Option("--blocks", min=1, max=MAX_BLOCKS, help="Number of blocks, the complete replicates.")
]
Seed = Annotated[int | None, typer.Option("--seed", min=0, max=MAX_SEED, help="Seed of all random choices.")]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="DIR",
        help="The result directory itself, new or empty; by default <output-dir>/<profile>/<utc>-<hash8>.",
        show_default=False,
    ),
]
OutputDir = Annotated[Path, typer.Option("--output-dir", help="Parent of new result directories.")]
Label = Annotated[str | None, typer.Option("--label", help="Remark for the manifest.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="One line per run instead of bars, for CI.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the fields of each dataclass that it takes as parameters of its own, in their place."""
    signature, hints = inspect.signature(command), get_type_hints(command, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if isinstance(hint, type) and is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        own = inspect.signature(groups[name]).parameters.values() if name in groups else [parameter]
        parameters += [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own]

    @functools.wraps(command)
    def called(**values: Any) -> None:
        for name, group in groups.items():
            of_group = {field.name for field in fields(group)} & values.keys()
            values[name] = group(**{option: values.pop(option) for option in of_group})
        command(**values)

    called.__dict__["__signature__"] = signature.replace(parameters=parameters)
    called.__annotations__ = {each.name: each.annotation for each in parameters}
    return called


def refuse_first(messages: Mapping[str, object]) -> None:
    """Raise UsageError with the first of the messages whose condition is true."""
    for message, is_wrong in messages.items():
        if is_wrong:
            raise UsageError(message)


Number = TypeVar("Number", int, float)
WordT = TypeVar("WordT", bound=str)
_MOST_CHARACTERS: Final = 40


def numbers(
    text: str,
    option: str,
    kind: Callable[[str], Number],
    *,
    least: float | None = None,
    most: float | None = None,
    multiple_of: int = 0,
) -> list[Number]:
    """Numbers in their order, of a kind and from ``least`` to ``most``. Raises UsageError for anything else."""
    begin = f"{option} {text[:_MOST_CHARACTERS]!r}: "
    try:
        values = [kind(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"{begin}expected numbers separated by commas, such as 1,2,4") from None
    if not all(isfinite(value) for value in values):
        raise UsageError(f"{begin}each must be finite")
    if (least is not None and min(values) < least) or (most is not None and max(values) > most):
        raise UsageError(f"{begin}each must be from {least} {'up' if most is None else f'to {most}'}")
    if multiple_of and any(value % multiple_of for value in values):
        raise UsageError(f"{begin}write multiples of {multiple_of}")
    return values


def words_of(text: str, choices: Sequence[WordT], option: str) -> tuple[WordT, ...]:
    """Words of a list, each once. Raises UsageError for one that is not in ``choices``."""
    chosen = [next((word for word in choices if word == part.strip()), None) for part in text.split(",")]
    if None in chosen:
        raise UsageError(f"{option} is {text!r}; choose of {', '.join(choices)}, separated by commas")
    return tuple(dict.fromkeys(word for word in chosen if word is not None))
