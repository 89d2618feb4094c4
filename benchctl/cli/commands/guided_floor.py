"""``benchctl steptime guided``: the least that a guided decode step can cost, before any measurement."""

from typing import Annotated, Literal

import typer

from benchctl.cli.options.step_time import JsonOption
from benchctl.cli.speculation.options import numbers
from benchctl.errors import UsageError
from benchctl.profile.sections.ranges import MAX_CONCURRENCY, MAX_CONTEXT

_Base = Annotated[
    str,
    typer.Option("--base", metavar="MODEL", help="A built-in model, or a directory with a config.json."),
]
_ValueModel = Annotated[str, typer.Option("--value-model", metavar="MODEL", help="Value model, named likewise.")]
_Hardware = Annotated[
    str,
    typer.Option(
        "--hardware", metavar="NAME", help="Device, name:TFLOP/s:GB/s, or 'measured' for the peaks on file."
    ),
]
_Batch = Annotated[str, typer.Option("--batch", metavar="B[,B...]", help="Rows of the step.")]
_TopK = Annotated[str, typer.Option("--top-k", metavar="K[,K...]", help="Candidates that are scored in each row.")]
_Context = Annotated[int, typer.Option("--context", min=0, max=MAX_CONTEXT, help="Tokens of a row in the cache.")]
_Scoring = Annotated[
    Literal["reuse", "recompute", "two-phase"],
    typer.Option(
        "--scoring",
        help="Whether keys and values of the drawn candidate are kept, computed again in the same pass, or in a "
        "pass of their own.",
    ),
]
_Unscored = Annotated[
    float, typer.Option("--unscored", min=0, max=1, help="Share of the rows that need no scores in a step.")
]
_Launch = Annotated[
    float | None,
    typer.Option(
        "--launch-us",
        min=0,
        max=1e6,
        metavar="US",
        help="Time of the host for one launch, where passes are not replayed as CUDA graphs; 'micro roofline' "
        "measures it.",
        show_default=False,
    ),
]


def guided(
    base: _Base = "qwen2.5-7b",
    value_model: _ValueModel = "qwen2.5-1.5b",
    hardware: _Hardware = "h200-sxm",
    batch: _Batch = "1,8,64,256",
    top_k: _TopK = "2,3,4,5",
    context: _Context = 300,
    scoring: _Scoring = "reuse",
    unscored: _Unscored = 0.0,
    launch_us: _Launch = None,
    as_json: JsonOption = False,
) -> None:
    """The least ratio of a guided decode step to an unguided one, by batch and top_k, and where it comes from.

    A floor at the device's peaks, not a prediction: servers stay behind them in both steps.
    """
    from benchctl.cli.output.guided_floor import FloorAnswer, print_floors, print_floors_json
    from benchctl.costs.guided_floor import guided_floor
    from benchctl.costs.hardware import hardware_for
    from benchctl.costs.shapes import shape_for
    from benchctl.records.stores.peaks_store import resolved_hardware
    from benchctl.units import US_PER_S

    base_shape, value_shape = shape_for(base), shape_for(value_model).as_value_model()
    device = hardware_for(resolved_hardware(hardware))
    floors = {
        (rows, candidates): guided_floor(
            base_shape,
            value_shape,
            device,
            batch=rows,
            candidates=candidates,
            context=context,
            scoring=scoring,
            unscored_frac=unscored,
            launch_s=None if launch_us is None else launch_us / US_PER_S,
        )
        for rows in _counts(batch, "--batch", MAX_CONCURRENCY)
        for candidates in _counts(top_k, "--top-k", MAX_CONTEXT)
    }
    answer = FloorAnswer(
        base=base_shape,
        value_model=value_shape,
        hardware=device,
        context=context,
        scoring=scoring,
        unscored_frac=unscored,
        launch_us=launch_us,
        floors=floors,
    )
    if as_json:
        print_floors_json(answer)
    else:
        print_floors(answer)


def _counts(text: str, option: str, most: int) -> list[int]:
    """Ascending numbers from 1 to ``most``."""
    values = sorted(set(numbers(text, option, int)))
    if not 1 <= values[0] <= values[-1] <= most:
        raise UsageError(f"{option} {text[:40]!r}: each must be from 1 to {most}")
    return values
