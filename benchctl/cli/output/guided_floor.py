"""The table and the JSON document of ``benchctl steptime guided``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchctl.cli.output.screen import print_json, wide_console

if TYPE_CHECKING:
    from rich.table import Table

    from benchctl.costs.guided_floor import GuidedFloor, Scoring
    from benchctl.costs.hardware import Hardware
    from benchctl.costs.model_shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class FloorAnswer:
    """The floors by batch and candidates, and what they are of."""

    base: "ModelShape"
    value_model: "ModelShape"
    hardware: "Hardware"
    context: int
    scoring: "Scoring"
    unscored_frac: float
    launch_us: float | None
    floors: "Mapping[tuple[int, int], GuidedFloor]"


def print_floors(answer: FloorAnswer) -> None:
    """The ratio with its parts for each batch and number of candidates, and what it does not contain."""
    console = wide_console()
    console.print(_table(answer))
    for line in _notes(answer):
        console.print(line)


def _table(answer: FloorAnswer) -> "Table":
    from benchctl.formats import four_digits, signed_three_digits
    from benchctl.report.text.plain_table import plain_table
    from benchctl.units import MS_PER_S

    causes = [*next(iter(answer.floors.values())).parts]
    title = (
        f"Floor of a guided step: {answer.base.name} guided by {answer.value_model.name} on "
        f"{answer.hardware.title}, context {answer.context}, scoring {answer.scoring}"
    )
    table = plain_table(title, [], ["batch", "top_k", "base ms", "guided ms", "ratio", *causes, "value tokens"])
    for (rows, candidates), floor in answer.floors.items():
        parts = (signed_three_digits(floor.parts[cause]) for cause in causes)
        times = (four_digits(time_s * MS_PER_S) for time_s in (floor.base_s, floor.step_s))
        table.add_row(
            str(rows), str(candidates), *times, f"{floor.ratio:.3f}", *parts, four_digits(floor.value_tokens)
        )
    return table


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


def _row(batch: int, candidates: int, floor: "GuidedFloor") -> dict[str, Any]:
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
