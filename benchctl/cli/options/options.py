"""Options that several commands share: where blocks are measured, lists with commas, completion, and step times."""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer

from benchctl.analysis.step_time.observed import StepSources, read_sources
from benchctl.cli.screen import drawable
from benchctl.errors import UsageError
from benchctl.interop.readers.step_table import TableDefaults
from benchctl.profile.choices import MAX_BLOCKS, MAX_DEVICES, MAX_SEED
from benchctl.profile.engine_options import ENGINES
from benchctl.profile.files import preset_files, profile_files
from benchctl.records.peaks import resolved_hardware
from benchctl.steptime.fitting.fit import FitOptions


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


Number = TypeVar("Number", int, float)
WordT = TypeVar("WordT", bound=str)
_MOST_CHARACTERS = 40


def numbers(
    text: str,
    option: str,
    kind: Callable[[str], Number],
    *,
    least: float | None = None,
    most: float | None = None,
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
    return values


def counts_of(text: str, option: str, least: int = 1) -> tuple[int, ...]:
    """Whole numbers from ``least`` up, each once."""
    return tuple(dict.fromkeys(numbers(text, option, int, least=least)))


def words_of(text: str, choices: Sequence[WordT], option: str) -> tuple[WordT, ...]:
    """Words of a list, each once. Raises UsageError for one that is not in ``choices``."""
    chosen = [next((word for word in choices if word == part.strip()), None) for part in text.split(",")]
    if None in chosen:
        raise UsageError(f"{option} is {text!r}; choose of {', '.join(choices)}, separated by commas")
    return tuple(dict.fromkeys(word for word in chosen if word is not None))


SourcesArgument = Annotated[
    list[Path],
    typer.Argument(
        metavar="SOURCE...", help="Result directories, and tables of steps (.csv, .jsonl).", show_default=False
    ),
]
FittedArgument = Annotated[
    Path, typer.Argument(metavar="MODEL", help="File that 'steptime fit -o' wrote.", show_default=False)
]
StructureOption = Annotated[
    Literal["overlap", "scaling-book", "no-overlap", "original", "roofline"],
    typer.Option(
        "--structure", help="Form of the model; 'original' is the published one, 'roofline' fits nothing."
    ),
]
ExpertsOption = Annotated[
    Literal["uniform", "linear", "measured"],
    typer.Option("--experts", help="Rule for the experts whose weights a step reads."),
]
ConstraintOption = Annotated[
    Literal["non-negative", "none"], typer.Option("--constraint", help="Bound of the coefficients.")
]
RidgeOption = Annotated[
    float | None,
    typer.Option(
        "--ridge",
        min=0,
        max=1e12,
        metavar="STRENGTH",
        help="Pull to typical values; by default as strong as the noise asks for, none for 'original'.",
        show_default=False,
    ),
]
HoldOutOption = Annotated[
    Literal["run", "model", "tensor-parallel"],
    typer.Option("--hold-out", help="Groups that are left out, one at a time, to judge the model."),
]
PictureOption = Annotated[
    Path | None,
    typer.Option(
        "--picture",
        metavar="FILE.png",
        help="Write predicted against measured.",
        show_default=False,
        callback=drawable,
    ),
]
ProfileOutOption = Annotated[
    Path | None,
    typer.Option("--profile-out", metavar="FILE", help="Write the runs to add as a profile.", show_default=False),
]
OutputOption = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="MODEL", help="Write the model here.", show_default=False)
]
ModelOption = Annotated[
    str | None, typer.Option("--model", help="Model of a table without that column.", show_default=False)
]
HardwareOption = Annotated[
    str | None,
    typer.Option(
        "--hardware", help="Device, where neither table nor result names it, or 'measured'.", show_default=False
    ),
]
TensorParallelOption = Annotated[
    int, typer.Option("--tp", min=1, max=MAX_DEVICES, help="Tensor-parallel size of a table without that column.")
]
ShapesOption = Annotated[
    list[str] | None,
    typer.Option("--shape", metavar="NAME=DIR", help="Shape of a model that a table names.", show_default=False),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]


def read_steps(
    sources: Sequence[Path], model: str | None, hardware: str | None, tp: int, shapes: list[str] | None
) -> StepSources:

    device = None if hardware is None else resolved_hardware(hardware)
    pairs = [text.partition("=") for text in shapes or ()]
    for text, (name, sign, path) in zip(shapes or (), pairs, strict=True):
        if not (name and sign and path):
            raise UsageError(f"--shape is {text!r}; write NAME=DIR, with the directory of a config.json")
    defaults = TableDefaults(
        model=model, hardware=device, tensor_parallel=tp, shapes={name: path for name, _, path in pairs}
    )
    return read_sources(sources, defaults)


def fit_options(structure: Any, experts: Any, constraint: Any, ridge: float | None) -> FitOptions:

    # The published form is fitted as published, as ``evaluate`` has it beside the others.
    return FitOptions(
        structure=structure,
        experts_read=experts,
        constraint=constraint,
        ridge=0.0 if ridge is None and structure == "original" else ridge,
    )
