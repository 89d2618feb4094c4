"""Options of the commands that take a profile."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from benchctl.cli.options.completion import complete_engine, complete_profile
from benchctl.errors import UsageError
from benchctl.profile.sections.ranges import MAX_BLOCKS, MAX_SEED

RESULTS = Path(os.environ.get("BENCHCTL_RESULTS") or "results")
"""Parent of result directories where nothing else is named."""

ProfileArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[NAME]",
        help="Profile of the experiment, by the name in 'benchctl profiles list' or by its file.",
        autocompletion=complete_profile,
    ),
]
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
FormerOutputDir = Annotated[Path | None, typer.Option("--output-dir", hidden=True)]
"""The former name of ``--output`` where it named what the command writes."""
OutputDir = Annotated[Path, typer.Option("--output-dir", help="Parent of new result directories.")]
Label = Annotated[str | None, typer.Option("--label", help="Remark for the manifest.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="One line per run instead of bars, for CI.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """The directory of a new experiment, and the user's remark on it."""

    output: Path | None
    """The directory itself; None for a new one below ``output_dir``."""
    output_dir: Path
    label: str | None

    @property
    def path(self) -> Path:
        """The directory, or its parent where it has no name yet."""
        return self.output or self.output_dir


def chosen_profile(name: str | None, option: str | None) -> str | None:
    """The profile that the command line names. Raises UsageError where argument and ``--profile`` differ."""
    if name is not None and option is not None and name != option:
        raise UsageError(f"two profiles are named, {name!r} and --profile {option!r}; give one of the two")
    return option if name is None else name


def chosen_output(output: Path | None, former: Path | None) -> Path | None:
    """The destination of a command, by ``--output`` or its former name. Raises UsageError where both are given."""
    if output is not None and former is not None:
        raise UsageError(f"--output {output} and its former name both name the destination; give one of the two")
    return former if output is None else output
