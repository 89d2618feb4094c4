"""Options of ``run`` that say where the blocks of an experiment are measured.

Words that a shell completes: names of profiles and engines, and result directories.
Options of the commands that take a profile.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from benchctl.errors import UsageError
from benchctl.profile.choices import MAX_BLOCKS, MAX_SEED
from benchctl.profile.engine_options import ENGINES
from benchctl.profile.files import preset_files, profile_files


class Scheduler(StrEnum):
    """The program that hands out blocks, where they are not measured one after the other in this process."""

    SLURM = "slurm"
    LOCAL = "local"


On = Annotated[
    Scheduler | None,
    typer.Option(
        "--on",
        help="Hand out whole blocks: to the nodes of a cluster (slurm), or to the GPUs or cores of this host "
        "(local, with --parallel).",
    ),
]
Parallel = Annotated[
    int | None,
    typer.Option("--parallel", min=1, metavar="N", help="With --on: measure at most N blocks at the same time."),
]
ClusterFile = Annotated[
    Path | None,
    typer.Option(
        "--cluster", metavar="FILE", help="With --on slurm: YAML file that replaces the profile's cluster section."
    ),
]
Detach = Annotated[
    bool,
    typer.Option("--detach", help="With --on slurm: submit and return; 'benchctl watch DIR' shows the progress."),
]
Prepare = Annotated[
    bool,
    typer.Option(
        "--prepare",
        help="Create the result directory and measure nothing: each of its blocks is then one task of any job "
        "system, 'benchctl run --block I --into DIR'.",
    ),
]
Block = Annotated[
    int | None, typer.Option("--block", min=0, metavar="I", help="With --into: measure block I alone, from 0.")
]
Into = Annotated[
    Path | None,
    typer.Option(
        "--into", metavar="DIR", help="With --block: result directory of the experiment, on a shared disk."
    ),
]
TimeLeft = Annotated[
    float | None,
    typer.Option(
        "--time-left",
        min=0,
        metavar="SECONDS",
        help="With --block: begin no run that would not end in this time; Slurm is asked by itself.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """The way in which blocks are handed out. Raises UsageError for options that do not go together."""

    on: Scheduler | None = None
    parallel: int | None = None
    cluster_file: Path | None = None
    is_detached: bool = False
    is_prepared_only: bool = False

    def __post_init__(self) -> None:
        for option, scheduler, is_given in (
            ("--parallel", "slurm or --on local", self.parallel is not None and self.on is None),
            ("--cluster", "slurm", self.cluster_file is not None and self.on is not Scheduler.SLURM),
            ("--detach", "slurm", self.is_detached and self.on is not Scheduler.SLURM),
        ):
            if is_given:
                raise UsageError(f"{option} belongs to --on {scheduler}; add that, or leave {option} out")
        if self.is_prepared_only and self.on is not None:
            raise UsageError("--prepare measures nothing, and --on measures; give one of the two")
        if self.on is Scheduler.LOCAL and self.parallel is None:
            raise UsageError(
                "--on local needs --parallel N: the number of blocks at a time, such as one for each GPU"
            )

    @property
    def is_shared(self) -> bool:
        """True where the blocks are claimed one by one, so that several processes write into one directory."""
        return self.on is not None or self.is_prepared_only

    @property
    def is_elsewhere(self) -> bool:
        """True where other machines measure, whose engines and devices this one need not have."""
        return self.on is Scheduler.SLURM or self.is_prepared_only


_MANIFEST = "manifest.json"


def complete_profile(incomplete: str) -> list[str]:
    """Names of profiles that begin so; the shell adds files by itself where there are none."""
    return _beginning(incomplete, profile_files())


def complete_engine(incomplete: str) -> list[str]:
    """Names of engine presets and kinds that begin so."""
    return _beginning(incomplete, sorted({*preset_files(), *ENGINES}))


def complete_results(incomplete: str) -> list[str]:
    """Result directories below the parent of results that begin so, ``latest`` of each experiment first."""
    directories = (path.parent for path in RESULTS.glob(f"*/*/{_MANIFEST}"))
    ordered = sorted(directories, key=lambda path: (path.name != "latest", str(path)))
    return _beginning(incomplete, map(str, ordered))


def _beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


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
