"""Prediction intervals as a table and as ``predictions.json``."""

from typing import TYPE_CHECKING, Any, Final

from benchctl.formats import percentage, short_number

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchctl.measure.capacity.prediction import ArmPrediction

_SHOWN: Final = ("wall_s", "output_throughput", "ttft_ms", "tpot_ms", "e2el_ms", "step_ms")


def print_predictions(predictions: "Sequence[ArmPrediction]") -> None:
    """Print a row for each arm; nothing without predictions."""
    from rich.table import Table

    from benchctl.cli.output.screen import wide_console

    if not predictions:
        return
    table = Table(box=None, pad_edge=False)
    for head in ("arm", *_SHOWN):
        table.add_column(head, justify="left" if head == "arm" else "right", no_wrap=True)
    for each in predictions:
        table.add_row(each.arm, *(_interval(each, name) for name in _SHOWN))
    first = predictions[0]
    print(f"\nPredicted, with the interval of {percentage(first.level)} of {first.num_draws} draws of the fit")
    wide_console().print(table)


def write_predictions(directory: "Path", predictions: "Sequence[ArmPrediction]") -> list[Any]:
    """Write ``predictions.json`` into the result directory; returns its content."""
    import msgspec

    from benchctl.records.jsonl import write_json_atomic

    content: list[Any] = msgspec.to_builtins(predictions)
    write_json_atomic(directory / "predictions.json", {"schema_version": 1, "predictions": content})
    return content


def _interval(prediction: "ArmPrediction", name: str) -> str:
    metric = prediction.metrics.get(name)
    if metric is None:
        return "-"
    return f"{short_number(metric.value)} [{short_number(metric.low)}, {short_number(metric.high)}]"
