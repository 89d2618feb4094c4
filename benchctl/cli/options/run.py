"""Options of ``run`` about what it measures, and the form in which it tells the outcome."""

from pathlib import Path
from typing import Annotated, Final

import typer

QUICK_BLOCKS: Final = 2

UntilPrecision = Annotated[
    str | None,
    typer.Option(
        "--until-precision",
        metavar="1%",
        help="End when every primary metric in every cell is known this precisely, at looks that are fixed in "
        "advance; --blocks is then the maximum.",
    ),
]
Quick = Annotated[bool, typer.Option("--quick", help=f"Screening with {QUICK_BLOCKS} blocks.")]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Print the ordered runs and an estimate; measure nothing. With --resume: the runs that are left.",
    ),
]
StepTimeModel = Annotated[
    Path | None,
    typer.Option(
        "--step-time-model",
        metavar="FILE",
        help="With --dry-run: predict with this model of 'benchctl steptime fit' instead of the profile's.",
    ),
]
ResumeDir = Annotated[
    Path | None,
    typer.Option(
        "--resume",
        metavar="DIR",
        help="Continue DIR: measure the runs that are not done. With --blocks N, add blocks until there are N; "
        "each addition is a look at the results and widens the intervals.",
    ),
]
MeasureNoise = Annotated[
    bool,
    typer.Option(
        "--aa",
        help="Measure the noise of this experiment instead: its baseline against itself, with the same server, "
        "model and workload.",
    ),
]
NoStoreNoise = Annotated[
    bool, typer.Option("--no-store-noise", help="Do not store the noise of an A/A experiment.")
]
KeepRawLogs = Annotated[
    bool,
    typer.Option(
        "--keep-raw-logs",
        help="Keep each server's log with its secrets, too: server.raw.log, which only you may read. Delete it "
        "before you share the results.",
    ),
]
AsJson = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print one JSON document at the end: directory, page, runs by state, verdicts, warnings; all else "
        "goes to stderr.",
    ),
]
