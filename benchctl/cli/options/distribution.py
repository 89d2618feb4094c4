"""Options of ``run`` that say where the blocks of an experiment are measured."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from benchctl.errors import UsageError


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
CheckNeighbours = Annotated[
    bool,
    typer.Option(
        "--check-neighbours",
        help="With --on local: first measure whether blocks that run at the same time disturb each other.",
    ),
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
    checks_neighbours: bool = False
    is_prepared_only: bool = False

    def __post_init__(self) -> None:
        for option, scheduler, is_given in (
            ("--parallel", "slurm or --on local", self.parallel is not None and self.on is None),
            ("--cluster", "slurm", self.cluster_file is not None and self.on is not Scheduler.SLURM),
            ("--detach", "slurm", self.is_detached and self.on is not Scheduler.SLURM),
            ("--check-neighbours", "local", self.checks_neighbours and self.on is not Scheduler.LOCAL),
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
