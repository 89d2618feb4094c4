"""The options of ``benchctl run``: what is measured, where its blocks are measured, and what is told of it."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

import typer

from benchctl.cli.options.options import (
    RESULTS,
    Blocks,
    EnginePreset,
    Label,
    Output,
    OutputDir,
    Overrides,
    ProfileName,
    Quiet,
    Seed,
    complete_profile,
    refuse_first,
)
from benchctl.measure.result_directory import Origin
from benchctl.records.schema import ResultWarning

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
            "--until-precision",
            metavar="1%",
            help="End when every primary metric in every cell is known this precisely, at looks that are fixed in "
            "advance; --blocks is then the maximum.",
        ),
    ] = None
    quick: Annotated[bool, typer.Option("--quick", help=f"Screening with {_QUICK_BLOCKS} blocks.")] = False
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
            "--step-time-model",
            metavar="FILE",
            help="With --dry-run: predict with this model of 'benchctl steptime fit' instead of the profile's.",
        ),
    ] = None
    resume: Annotated[
        Path | None,
        typer.Option(
            "--resume",
            metavar="DIR",
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
            "--on",
            help="Hand out whole blocks: to the nodes of a cluster (slurm), or to the GPUs or cores of this host "
            "(local, with --parallel).",
        ),
    ] = None
    parallel: Annotated[
        int | None,
        typer.Option(
            "--parallel", min=1, metavar="N", help="With --on: measure at most N blocks at the same time."
        ),
    ] = None
    cluster: Annotated[
        Path | None,
        typer.Option(
            "--cluster",
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
        int | None, typer.Option("--block", min=0, metavar="I", help="With --into: measure block I alone, from 0.")
    ] = None
    into: Annotated[
        Path | None,
        typer.Option(
            "--into", metavar="DIR", help="With --block: result directory of the experiment, on a shared disk."
        ),
    ] = None
    time_left: Annotated[
        float | None,
        typer.Option(
            "--time-left",
            min=0,
            metavar="SECONDS",
            help="With --block: begin no run that would not end in this time; Slurm is asked by itself.",
        ),
    ] = None
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
        is_of_block = self.block is not None or self.into is not None or self.time_left is not None
        is_unnamed = self.profile_name is None and not is_of_block
        is_given_new = self.measures_noise or self.label or self.output or self.output_dir != RESULTS
        changes = self.engine or self.overrides or self.until_precision or self.seed is not None
        belongs = "{0} belongs to --on {1}; add that, or leave {0} out"
        refuse_first(
            {
                f"--quick means --blocks {_QUICK_BLOCKS}; give one of the two": self.quick and self.blocks,
                "--json prints what was measured, and --dry-run measures nothing; leave one of them "
                "out": self.as_json and self.dry_run,
                belongs.format("--parallel", "slurm or --on local"): self.parallel and self.on is None,
                belongs.format("--cluster", "slurm"): self.cluster and self.on != "slurm",
                belongs.format("--detach", "slurm"): self.detach and self.on != "slurm",
                "--prepare measures nothing, and --on measures; give one of the two": self.prepare and self.on,
                "--on local needs --parallel N: the number of blocks at a time, such as one for each GPU": self.on
                == "local"
                and self.parallel is None,
                f"two profiles are named, {self.name!r} and --profile {self.profile!r}; give one of the "
                "two": self.name and self.profile and self.name != self.profile,
                "--block I and --into DIR belong together: the block, and the experiment that it is of": is_of_block
                and (self.block is None or self.into is None),
                f"--into {self.into} measures a block as it was planned: leave out the profile, --on and "
                "--prepare": is_of_block and (self.profile_name is not None or self.is_shared),
                f"--resume continues {self.resume} as it was begun: leave out --aa, --label, --output and "
                "--output-dir": self.resume and is_given_new,
                "--engine, --set, --blocks, --until-precision, --quick and --seed change a profile: name it, as in "
                "'benchctl run ci-smoke'": is_unnamed and (changes or (self.num_blocks and self.resume is None)),
                "name a profile, such as 'benchctl run ci-smoke'; 'benchctl profiles list' lists them": is_unnamed
                and self.resume is None,
                "--step-time-model predicts a plan: add --dry-run; 'compare' has the same "
                "option": self.step_time_model and not self.dry_run,
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
        """True where the blocks are claimed one by one, so that several processes write into one directory."""
        return self.on is not None or self.prepare

    @property
    def is_elsewhere(self) -> bool:
        """True where other machines measure, whose engines and devices this one need not have."""
        return self.on == "slurm" or self.prepare

    def origin(self, notes: tuple[ResultWarning, ...] = ()) -> Origin:
        """The directory of a new experiment; ``notes`` go into its manifest."""
        return Origin(
            output_root=self.output_dir,
            argv=("benchctl", *sys.argv[1:]),
            label=self.label,
            directory=self.output,
            is_elsewhere=self.is_elsewhere,
            notes=notes,
        )
