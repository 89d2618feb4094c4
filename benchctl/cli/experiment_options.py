"""Options of the commands that take a profile."""

import os
from pathlib import Path
from typing import Annotated

import typer

from benchctl.cli.completion import complete_engine, complete_profile

RESULTS = Path(os.environ.get("BENCHCTL_RESULTS") or "results")
"""Parent of result directories where nothing else is named."""

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
Blocks = Annotated[int | None, typer.Option("--blocks", min=1, help="Number of blocks, the complete replicates.")]
Seed = Annotated[int | None, typer.Option("--seed", min=0, help="Seed of all random choices.")]
OutputDir = Annotated[Path, typer.Option("--output-dir", "-o", help="Parent of new result directories.")]
Label = Annotated[str | None, typer.Option("--label", help="Remark for the manifest.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="One line per run instead of bars, for CI.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]
