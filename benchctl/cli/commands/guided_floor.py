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
    str | None,
    typer.Option(
        "--launch-us",
        metavar="US",
        help="Time of the host for one launch, where passes are not replayed as CUDA graphs; 'measured' for that "
        "of the peaks on file.",
        show_default=False,
    ),
]

_MAX_LAUNCH_US = 1e6


def guided(
    base: _Base = "qwen2.5-7b",
    value_model: _ValueModel = "qwen2.5-1.5b",
    hardware: _Hardware = "h200-sxm",
    batch: _Batch = "1,8,64,256",
    top_k: _TopK = "2,3,4,5",
    context: _Context = 300,
    scoring: _Scoring = "reuse",
    unscored: _Unscored = 0.0,
    launch: _Launch = None,
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
    device, launch_us = hardware_for(resolved_hardware(hardware)), _launch_us(launch, hardware)
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


def _launch_us(text: str | None, hardware: str) -> float | None:
    """Microseconds as stated, or as measured: of the device that ``hardware`` names so, or of this machine's."""
    from benchctl.records.peaks import best_series
    from benchctl.records.stores.peaks_store import MEASURED, named_peaks, peaks_directory
    from benchctl.units import US_PER_S

    if text is None:
        return None
    if text == MEASURED:
        word, _, name = hardware.partition(":")
        series = best_series(named_peaks(peaks_directory(), name if word == MEASURED and name else None), "launch")
        if series is None:
            raise UsageError("the peaks on file have no launch; measure one with 'benchctl micro roofline'")
        return series.median * US_PER_S
    (launch_us,) = numbers(text.partition(",")[0], "--launch-us", float)
    if not 0 <= launch_us <= _MAX_LAUNCH_US or "," in text:
        raise UsageError(
            f"--launch-us {text[:40]!r}: give microseconds from 0 to {_MAX_LAUNCH_US:.0f}, or {MEASURED}"
        )
    return launch_us
