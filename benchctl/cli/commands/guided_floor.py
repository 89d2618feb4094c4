"""``benchctl steptime guided``: the least that a guided decode step can cost, before any measurement.

The table and the JSON document of ``benchctl steptime guided``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import typer

from benchctl.cli.options.lists import numbers
from benchctl.cli.options.step_time import JsonOption
from benchctl.cli.screen import print_json, wide_console
from benchctl.costs.guided_floor import GuidedFloor, Scoring, guided_floor
from benchctl.costs.hardware import Hardware, hardware_for
from benchctl.costs.model_shape import ModelShape
from benchctl.costs.shapes import shape_for
from benchctl.errors import UsageError
from benchctl.formats import four_digits, signed_three_digits
from benchctl.profile.choices import MAX_CONCURRENCY, MAX_CONTEXT
from benchctl.records.peaks import MEASURED, best_series, named_peaks, resolved_hardware
from benchctl.report.table import Table, table_of
from benchctl.units import MS_PER_S, US_PER_S

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
        for rows in sorted(set(numbers(batch, "--batch", int, least=1, most=MAX_CONCURRENCY)))
        for candidates in sorted(set(numbers(top_k, "--top-k", int, least=1, most=MAX_CONTEXT)))
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


def _launch_us(text: str | None, hardware: str) -> float | None:
    """Microseconds as stated, or as measured: of the device that ``hardware`` names so, or of this machine's."""
    if text is None:
        return None
    if text == MEASURED:
        word, _, name = hardware.partition(":")
        series = best_series(named_peaks(name if word == MEASURED and name else None), "launch")
        if series is None:
            raise UsageError("the peaks on file have no launch; measure one with 'benchctl micro roofline'")
        return series.median * US_PER_S
    (launch_us,) = numbers(text.partition(",")[0], "--launch-us", float)
    if not 0 <= launch_us <= _MAX_LAUNCH_US or "," in text:
        raise UsageError(
            f"--launch-us {text[:40]!r}: give microseconds from 0 to {_MAX_LAUNCH_US:.0f}, or {MEASURED}"
        )
    return launch_us


@dataclass(frozen=True, slots=True, kw_only=True)
class FloorAnswer:
    """The floors by batch and candidates, and what they are of."""

    base: ModelShape
    value_model: ModelShape
    hardware: Hardware
    context: int
    scoring: Scoring
    unscored_frac: float
    launch_us: float | None
    floors: Mapping[tuple[int, int], GuidedFloor]


def print_floors(answer: FloorAnswer) -> None:
    """The ratio with its parts for each batch and number of candidates, and what it does not contain."""
    console = wide_console()
    console.print(_table(answer))
    for line in _notes(answer):
        console.print(line)


def _table(answer: FloorAnswer) -> Table:

    causes = [*next(iter(answer.floors.values())).parts]
    title = (
        f"Floor of a guided step: {answer.base.name} guided by {answer.value_model.name} on "
        f"{answer.hardware.title}, context {answer.context}, scoring {answer.scoring}"
    )
    rows = []
    for (batch, candidates), floor in answer.floors.items():
        parts = (signed_three_digits(floor.parts[cause]) for cause in causes)
        times = (four_digits(time_s * MS_PER_S) for time_s in (floor.base_s, floor.step_s))
        rows.append((batch, candidates, *times, f"{floor.ratio:.3f}", *parts, four_digits(floor.value_tokens)))
    headings = ("batch", "top_k", "base ms", "guided ms", "ratio", *causes, "value tokens")
    return table_of(headings, rows, title=title)


def _notes(answer: FloorAnswer) -> Sequence[str]:
    origin = "measured peaks" if answer.hardware.measured_at else f"peaks: {answer.hardware.source}"
    meaning = "No server reaches them in either step, so this is a floor and no prediction"
    notes = [f"{origin}. {meaning}; the parts add up to the ratio less 1"]
    num_operations = max(floor.num_operations for floor in answer.floors.values())
    if answer.launch_us is None and num_operations:
        notes.append(
            f"launches cost nothing here, as in CUDA graphs; without graphs the host launches {num_operations} "
            "operations, which --launch-us prices"
        )
    return notes


def print_floors_json(answer: FloorAnswer) -> None:
    """The document: times in seconds, shares of the base step as numbers."""
    print_json(
        {
            "base": answer.base.name,
            "value_model": answer.value_model.name,
            "hardware": answer.hardware.name,
            "peak_flops_per_s": answer.hardware.peak_flops_per_s,
            "bandwidth_bytes_per_s": answer.hardware.bandwidth_bytes_per_s,
            "peak_source": answer.hardware.source,
            "context_tokens": answer.context,
            "scoring": answer.scoring,
            "unscored_frac": answer.unscored_frac,
            "launch_us": answer.launch_us,
            "rows": [_row(*key, floor) for key, floor in answer.floors.items()],
        }
    )


def _row(batch: int, candidates: int, floor: GuidedFloor) -> dict[str, Any]:
    return {
        "batch": batch,
        "top_k": candidates,
        "base_s": floor.base_s,
        "value_s": floor.value_s,
        "sampling_s": floor.sampling_s,
        "launches_s": floor.launches_s,
        "step_s": floor.step_s,
        "ratio": floor.ratio,
        "parts": dict(floor.parts),
        "value_tokens": floor.value_tokens,
        "num_operations": floor.num_operations,
    }
