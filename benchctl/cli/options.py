"""Options that several commands share, those of ``run``, values that are lists, words that a shell completes, and
what is refused before any work.

A command with many options gets them as one object: a frozen dataclass, whose fields are declared as parameters of
a command are.
"""

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeVar, get_type_hints

import typer

from benchctl.cli.screen import warn
from benchctl.costs.hardware import hardware_for
from benchctl.errors import ProfileError, UsageError
from benchctl.profile.bounds import MAX_BLOCKS, MAX_SEED
from benchctl.profile.engine_table import ENGINES
from benchctl.profile.files import preset_files, profile_files

if TYPE_CHECKING:
    from benchctl.measure.machine import Shortfall
    from benchctl.profile.model import Profile

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


def results_named(text: str) -> str:
    """The name of a profile as its latest result directory, with the variant behind it; other texts as they are."""
    name, colon, variant = text.partition(":")
    links = (RESULTS / name / link for link in ("latest", "latest-simulated"))
    latest = next((link for link in links if link.is_dir()), None)
    if latest is None or os.sep in text or Path(name).exists() or Path(text).exists():
        return text
    return f"{latest}{colon}{variant}"


def _latest_of(path: Path | None) -> Path | None:
    return None if path is None else Path(results_named(str(path)))


RESULTS_HELP: Final = "Result directory, finished or not; the name of a profile stands for its latest."
ResultsDir = Annotated[
    Path, typer.Argument(metavar="DIR", help=RESULTS_HELP, autocompletion=complete_results, callback=_latest_of)
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
    int | None,
    typer.Option(
        "--blocks", min=1, max=MAX_BLOCKS, help="Number of blocks: complete repetitions of the experiment."
    ),
]
Seed = Annotated[int | None, typer.Option("--seed", min=0, max=MAX_SEED, help="Seed of all random choices.")]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="DIR",
        help="The result directory itself, new or empty; by default <output-dir>/<profile>/<utc>-<hash8>.",
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


def refuse(message: str, *, is_plan: bool) -> None:
    """Raise UsageError; of a plan, which may be measured on another machine, it is a warning."""
    if not is_plan:
        raise UsageError(message)
    warn(f"not to be measured on this machine: {message}")


def refuse_certain(shortfalls: Iterable["Shortfall"], *, is_plan: bool = False) -> None:
    """Refuse what this machine certainly lacks, and warn of what it may lack."""
    for shortfall in shortfalls:
        if shortfall.is_certain:
            refuse(shortfall.message, is_plan=is_plan)
        else:
            warn(shortfall.message)


def check_names(profile: "Profile") -> None:
    """Check the names and numbers that only the analysis needs, before anything is measured."""
    from benchctl.analysis.metrics.latency import smallest_sample  # help needs no msgspec
    from benchctl.analysis.metrics.table import deciding_metrics
    from benchctl.profile.sizes import capacity_metric

    try:
        key = "primary_metrics"
        deciding_metrics(profile.primary_metrics)
        key = "hardware"
        hardware_for(profile.hardware)
    except UsageError as error:
        raise ProfileError(f"profile {profile.name}: {key}: {error}") from error
    if profile.slo is None or capacity_metric(profile) is None:
        return
    number, needed = profile.workload.num_prompts, smallest_sample(100 * profile.slo.share)
    if number < needed:
        raise ProfileError(
            f"profile {profile.name}: workload.num_prompts: is {number}, and a share of {profile.slo.share:g} "
            f"takes {needed} requests in the steady window of each load; raise it, or lower slo.share"
        )


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


_QUICK_BLOCKS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Raises UsageError for options that do not go together."""

    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help="Profile of the experiment, by the name in 'benchctl profiles list' or by its file.",
            autocompletion=complete_profile,
        ),
    ] = None
    profile: ProfileName = None
    engine: EnginePreset = None
    overrides: Overrides = None
    blocks: Blocks = None
    until_precision: Annotated[
        str | None,
        typer.Option(
            metavar="1%",
            help="End when every primary metric in every cell is known this precisely, at looks that are fixed in "
            "advance; --blocks is then the maximum.",
        ),
    ] = None
    until_verdict: Annotated[
        bool,
        typer.Option(
            "--until-verdict",
            help="End when every primary metric in every cell has its verdict, or when none is likely by the last "
            "block, at looks that are fixed in advance; --blocks is then the maximum.",
        ),
    ] = False
    quick: Annotated[
        bool, typer.Option("--quick", help=f"Try it with {_QUICK_BLOCKS} blocks, too few for a verdict.")
    ] = False
    seed: Seed = None
    output: Output = None
    output_dir: OutputDir = RESULTS
    label: Label = None
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Print the ordered runs and an estimate; measure nothing. With --resume: the runs that are left.",
        ),
    ] = False
    step_time_model: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="With --dry-run: predict with this model of 'benchctl steptime fit' instead of the profile's.",
        ),
    ] = None
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            callback=_latest_of,
            help="Continue DIR: measure the runs that are not done. With --blocks N, add blocks until there are N; "
            "each addition is a look at the results and widens the intervals.",
        ),
    ] = None
    measures_noise: Annotated[
        bool,
        typer.Option(
            "--aa",
            help="Measure the noise of this experiment instead: its baseline against itself, with the same server, "
            "model and workload.",
        ),
    ] = False
    no_store_noise: Annotated[
        bool, typer.Option("--no-store-noise", help="Do not store the noise of an A/A experiment.")
    ] = False
    keep_raw_logs: Annotated[
        bool,
        typer.Option(
            "--keep-raw-logs",
            help="Keep each server's log with its secrets, too: server.raw.log, which only you may read. Delete it "
            "before you share the results.",
        ),
    ] = False
    on: Annotated[
        Literal["slurm", "local"] | None,
        typer.Option(
            help="Hand out whole blocks: to the nodes of a cluster (slurm), or to the GPUs or cores of this host "
            "(local, with --parallel).",
        ),
    ] = None
    parallel: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="With --on: measure at most N blocks at the same time."),
    ] = None
    cluster: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="With --on slurm: YAML file that replaces the profile's cluster section.",
        ),
    ] = None
    detach: Annotated[
        bool,
        typer.Option(
            "--detach", help="With --on slurm: submit and return; 'benchctl watch DIR' shows the progress."
        ),
    ] = False
    prepare: Annotated[
        bool,
        typer.Option(
            "--prepare",
            help="Create the result directory and measure nothing: each of its blocks is then one task of any job "
            "system, 'benchctl run --block I --into DIR'.",
        ),
    ] = False
    block: Annotated[
        int | None, typer.Option(min=0, metavar="I", help="With --into: measure block I alone, from 0.")
    ] = None
    into: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="With --block: result directory of the experiment, on a shared disk."),
    ] = None
    take_over: Annotated[
        bool,
        typer.Option(
            "--take-over",
            help="With --block or --resume: measure a block whose process died without recording its end.",
        ),
    ] = False
    quiet: Quiet = False
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print one JSON document at the end: directory, page, runs by state, verdicts, warnings; all else "
            "goes to stderr.",
        ),
    ] = False

    def __post_init__(self) -> None:
        is_of_block = self.block is not None or self.into is not None
        is_unnamed = self.profile_name is None and not is_of_block
        is_given_new = self.measures_noise or self.label or self.output or self.output_dir != RESULTS
        is_ended_by_rule = self.until_precision or self.until_verdict
        changes = self.engine or self.overrides or is_ended_by_rule or self.seed is not None
        belongs = "{0} belongs to --on {1}; add that, or leave {0} out"
        refuse_first(
            {
                f"--quick means --blocks {_QUICK_BLOCKS}; give one of the two": self.quick and self.blocks,
                "--json prints what was measured, and --dry-run measures nothing; leave one of them out": (
                    self.as_json and self.dry_run
                ),
                belongs.format("--parallel", "slurm or --on local"): self.parallel and self.on is None,
                belongs.format("--cluster", "slurm"): self.cluster and self.on != "slurm",
                belongs.format("--detach", "slurm"): self.detach and self.on != "slurm",
                "--prepare measures nothing, and --on measures; give one of the two": self.prepare and self.on,
                "--on local needs --parallel N: the number of blocks at a time, such as one for each GPU": (
                    self.on == "local" and self.parallel is None
                ),
                f"two profiles are named, {self.name!r} and --profile {self.profile!r}; give one of the two": (
                    self.name and self.profile and self.name != self.profile
                ),
                "--take-over belongs to --block or --resume; add that, or leave it out": (
                    self.take_over and self.block is None and self.resume is None
                ),
                "--block I and --into DIR belong together: the block, and the experiment that it is of": (
                    is_of_block and (self.block is None or self.into is None)
                ),
                f"--into {self.into} measures a block as it was planned: leave out the profile, --on and "
                "--prepare": is_of_block and (self.profile_name is not None or self.is_shared),
                f"--resume continues {self.resume} as it was begun: leave out --aa, --label, --output and "
                "--output-dir": self.resume and is_given_new,
                "--until-precision and --until-verdict are two rules; give one of them": (
                    self.until_precision and self.until_verdict
                ),
                "--engine, --set, --blocks, --until-precision, --until-verdict, --quick and --seed change a "
                "profile: name it, as in 'benchctl run ci-smoke'": is_unnamed
                and (changes or (self.num_blocks and self.resume is None)),
                "name a profile, such as 'benchctl run ci-smoke'; 'benchctl profiles list' lists them": (
                    is_unnamed and self.resume is None
                ),
                "--step-time-model predicts a plan: add --dry-run; 'compare' has the same option": (
                    self.step_time_model and not self.dry_run
                ),
            }
        )

    @property
    def profile_name(self) -> str | None:
        return self.profile if self.name is None else self.name

    @property
    def num_blocks(self) -> int | None:
        return _QUICK_BLOCKS if self.quick else self.blocks

    @property
    def is_quiet(self) -> bool:
        """No bars."""
        return self.quiet or self.as_json

    @property
    def is_shared(self) -> bool:
        """True where the blocks are handed out, so that each has a directory of its own."""
        return self.on is not None or self.prepare

    @property
    def is_elsewhere(self) -> bool:
        """True where other machines measure, whose engines and devices this one need not have."""
        return self.on == "slurm" or self.prepare
