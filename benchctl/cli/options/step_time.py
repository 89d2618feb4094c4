"""Options that the commands of ``benchctl steptime`` share."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from benchctl.analysis.step_time.observed import StepSources, read_sources
from benchctl.cli.screen import drawable
from benchctl.errors import UsageError
from benchctl.interop.readers.step_table import TableDefaults
from benchctl.profile.choices import MAX_DEVICES
from benchctl.records.peaks import resolved_hardware
from benchctl.steptime.fitting.fit import FitOptions

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
