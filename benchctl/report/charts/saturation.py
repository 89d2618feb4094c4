"""The saturation curve: metrics of each arm over the size of its load, with the limits they must keep."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchctl.analysis.metrics.table import METRICS
from benchctl.report.charts import figure


@dataclass(frozen=True, slots=True, kw_only=True)
class SaturationLine:
    """One arm: its loads, ascending, and the metrics of each; ``largest`` is the largest load that keeps limits."""

    label: str
    sizes: Sequence[float]
    metrics: Sequence[Mapping[str, float | None]]
    largest: float | None = None


def draw_saturation(
    x_title: str, lines: Sequence[SaturationLine], names: Sequence[str], limits: Mapping[str, float]
) -> figure.Spec:
    """One panel for each metric of ``names``; ``limits`` are dashed, the largest load of each arm is dotted."""
    rows: list[figure.Row] = [
        {"arm": line.label, "size": size, "metric": name, "value": value}
        for line in lines
        for size, each in zip(line.sizes, line.metrics, strict=True)
        for name in names
        if (value := each[name]) is not None
    ]
    labels = [line.label for line in lines]
    largest = [{"arm": line.label, "size": line.largest} for line in lines if line.largest is not None]
    dotted = {"mark": {"type": "rule", "strokeDash": [1, 3], "strokeWidth": 1}, "data": {"name": "largest"}}
    panels = []
    for name in names:
        title = f"{name}, {METRICS[name].unit}" + (f"; dashed: limit {limits[name]:g}" if name in limits else "")
        values = [row["value"] for row in rows if row["metric"] == name]
        y = figure.log_axis(title, values) if figure.is_wide(values) else figure.axis(title, zero=True)
        layers = [
            *([figure.level(limits[name], figure.SLATE)] if name in limits else []),
            figure.layer("line", y_by="value", where=f"datum.metric === '{name}'"),
            figure.layer(
                "point", y_by="value", where=f"datum.metric === '{name}'", shape_by={"field": "arm", "legend": None}
            ),
            {**dotted, "encoding": {"y": {"value": 0}, "y2": {"value": "height"}}},
        ]
        panels.append(figure.panel(190, y, layers, encoding=figure.by_series(labels)))
    sizes = [row["size"] for row in rows]
    x = (
        figure.log_axis(x_title, sizes, "size")
        if figure.is_wide(sizes)
        else figure.axis(x_title, "size", zero=True)
    )
    return figure.picture(panels, rows, x, legend=labels, largest=largest)
