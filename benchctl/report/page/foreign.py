"""Result files of other tools on the page: the files, and the latencies of their requests if these are known."""

from dataclasses import dataclass
from typing import Any

import numpy as np

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
from benchctl.report.charts.requests import draw_distributions
from benchctl.report.tables.times import percentile_table


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
    arms = {
        label: [(f"run {i}", _sorted(run)) for i, run in enumerate(group, 1)] for label, group in groups.items()
    }
    chart = draw_distributions(arms, unit="run")
    return (chart,) if chart.spec else ()


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
