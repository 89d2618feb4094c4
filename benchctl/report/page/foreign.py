"""Result files of other tools on the page: the files, and the latencies of their requests if these are known.

Long lists of numbers in a figure as typed arrays in base64, which plotly.js reads and which take less room.
"""

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchctl.analysis.compare.metric import MetricComparison
from benchctl.analysis.compare.result import CellComparison, Comparison
from benchctl.analysis.metrics.latency import PERCENTS
from benchctl.analysis.summary.analyzed import (
    LATENCY_NAMES,
    PercentileLevel,
    Sorted,
    level_of_blocks,
    percentile_name,
)
from benchctl.formats import NOT_AVAILABLE, page_number
from benchctl.interop.readers.run import ForeignRun
from benchctl.report.charts.figure import Chart
from benchctl.report.page.charts.latencies import draw_distributions, named_arms
from benchctl.report.tables.times import percentile_table
from benchctl.untrusted.text import visible_line


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignSides:
    """The runs of both sides of an unpaired comparison, each under its name."""

    a_name: str
    b_name: str
    a: tuple[ForeignRun, ...]
    b: tuple[ForeignRun, ...]

    @property
    def sides(self) -> tuple[tuple[str, tuple[ForeignRun, ...]], ...]:
        return (self.a_name, self.a), (self.b_name, self.b)

    @property
    def subject(self) -> str:
        """Tools, models and numbers of runs in one line."""
        runs = (*self.a, *self.b)
        tools = ", ".join(sorted({run.source for run in runs}))
        models = ", ".join(dict.fromkeys(str(model) for run in runs if (model := run.settings.get("model_id"))))
        return f"result files of {tools} · {models or 'unknown model'} · {len(self.a)} against {len(self.b)} runs"


def file_rows(sides: ForeignSides) -> list[dict[str, Any]]:
    """One row for each run: where it is from, its requests, and its settings."""
    return [
        {
            "side": name,
            "where": run.where,
            "source": run.source,
            "requests": page_number(run.metrics.get("num_completed")),
            "failure": run.failure or "",
            "settings": ", ".join(
                f"{key} {_text(value)}" for key, value in run.settings.items() if value is not None
            ),
        }
        for name, runs in sides.sides
        for run in runs
    ]


def distribution_charts(sides: ForeignSides) -> tuple[Chart, ...]:
    """The distributions of both sides; without a chart where no file has its requests."""
    groups: dict[str, list[ForeignRun]] = {}
    loads = {run.load_point for run in (*sides.a, *sides.b)}
    for name, runs in sides.sides:
        for run in runs:
            load = " ".join(f"{key}={_text(value)}" for key, value in run.load_point if value is not None)
            groups.setdefault(f"{name} {load}" if len(loads) > 1 else name, []).append(run)
    arms = [
        (label, [(f"run {i}", _sorted(run)) for i, run in enumerate(group, 1)]) for label, group in groups.items()
    ]
    chart = draw_distributions(named_arms(arms), unit="run")
    return () if chart.figure is None else (chart,)


def _sorted(run: ForeignRun) -> dict[str, Sorted]:
    return {latency: np.sort(np.array(values)) for latency, values in run.latencies_ms.items()}


def percentile_values(comparison: Comparison) -> list[dict[str, Any]]:
    """A table for each cell in which a percentile is known."""
    tables = []
    for cell in comparison.cells:
        table = percentile_table(_rows(cell, comparison.confidence), comparison.confidence, "run")
        if table is not None:
            tables.append({"table": table, "name": cell.label if len(comparison.cells) > 1 else ""})
    return tables


def _rows(cell: CellComparison, confidence: float) -> list[tuple[str, str, list[PercentileLevel | None]]]:
    metrics = {metric.metric.name: metric for metric in cell.metrics}
    return [
        (
            latency,
            label,
            [_level(metrics.get(percentile_name(latency, p)), p, confidence, is_b=is_b) for p in PERCENTS],
        )
        for latency in LATENCY_NAMES
        for is_b, label in ((False, cell.a_label), (True, cell.b_label))
    ]


def _level(
    metric: MetricComparison | None, percent: int, confidence: float, *, is_b: bool
) -> PercentileLevel | None:
    if metric is None:
        return None
    values, level = (metric.b_blocks, metric.b) if is_b else (metric.a_blocks, metric.a)
    return level_of_blocks(values, level, percent, confidence)


def _text(value: float | str) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value) or NOT_AVAILABLE


_FEWEST: Final = 16
"""Shorter lists are no smaller in base64."""
_MARKUP: Final = re.compile("&|<(?!br>|/?extra>)")
_ENTITIES: Final = {"&": "&amp;", "<": "&lt;"}
_INTEGERS: Final = (("u1", np.uint8), ("u2", np.uint16), ("i4", np.int32))


def packed(value: Any) -> Any:
    """The value with every list of numbers, or list of rows of numbers, as a typed array of plotly.js.

    Texts become such that plotly.js shows what is in them, but for line breaks; ``meta``, which it never shows,
    stays as it is.
    """
    if isinstance(value, Mapping):
        return {key: part if key == "meta" else packed(part) for key, part in value.items()}
    if isinstance(value, str):
        return _plotly_text(value)
    if not isinstance(value, list | tuple):
        return value
    if len(value) >= _FEWEST and (array := _array_of(value)) is not None:
        return _typed(array)
    return [packed(part) for part in value]


def _plotly_text(text: str) -> str:
    """Plotly reads elements and entities of HTML in every text that it shows; ``<br>`` and ``<extra>`` are ours."""
    return _MARKUP.sub(lambda match: _ENTITIES[match.group()], visible_line(text))


def unpacked(typed: Mapping[str, Any]) -> list[Any]:
    """The numbers of a typed array again, as rows where it has rows."""
    array = np.frombuffer(base64.b64decode(typed["bdata"]), dtype=f"<{typed['dtype']}")
    shape = [int(size) for size in typed.get("shape", str(len(array))).split(",")]
    numbers: list[Any] = array.reshape(shape).tolist()
    return numbers


def _array_of(values: Sequence[Any]) -> NDArray[Any] | None:
    """The numbers as an array; None for anything else, for gaps, and for rows of different lengths."""
    rows = values if isinstance(values[0], list | tuple) else [values]
    if not all(isinstance(row, list | tuple) for row in rows) or len({len(row) for row in rows}) != 1:
        return None
    types = {type(number) for row in rows for number in row}
    if not types or not types <= {int, float}:
        return None
    array: NDArray[Any] = np.array(values, dtype=np.float64)
    if types == {int}:
        low, high = array.min(), array.max()
        ranges = ((kind, np.iinfo(kind)) for _, kind in _INTEGERS)
        fitting = next((kind for kind, limits in ranges if limits.min <= low and high <= limits.max), None)
        return None if fitting is None else array.astype(fitting)
    return array.astype(np.float32)


def _typed(array: NDArray[Any]) -> dict[str, str]:
    names = {np.dtype(kind): name for name, kind in _INTEGERS} | {np.dtype(np.float32): "f4"}
    little = array.astype(array.dtype.newbyteorder("<"))
    typed = {"dtype": names[array.dtype], "bdata": base64.b64encode(little.tobytes()).decode()}
    return typed if array.ndim == 1 else {**typed, "shape": ", ".join(map(str, array.shape))}
