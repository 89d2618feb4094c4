"""The picture of a step-time model: predicted against measured, and errors by batch, context, phase and model."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from benchctl.report.charts import figure
from benchctl.steptime.diagnosis.buckets import Words, phases_of
from benchctl.steptime.diagnosis.predictions import Predictions
from benchctl.steptime.fitting.least_squares import Floats

_MAX_POINTS: Final = 4000
"""Points of a cloud; more make it no clearer and the file large."""
_CLIP: Final = 0.5
"""Errors beyond are drawn at the edge."""
_NUM_BINS: Final = 60
_LEFT_PX: Final = 390
_RIGHT_PX: Final = 330
_WIDE: Final = 20.0
_AGAINST: Final = {"batch": "rows in the batch", "context": "mean context of a row, tokens"}


def draw_fit(predictions: Predictions) -> figure.Spec:
    """A cloud and a histogram on the left, residuals on the right; colours are models."""
    runs = predictions.runs
    names = [f"{run.deployment.shape.name} TP{run.deployment.tensor_parallel}" for run in runs]
    labels: Words = np.array(names)[predictions.run_of]
    models: list[str] = list(dict.fromkeys(labels.tolist()))
    batch = np.concatenate([np.broadcast_to(run.work.num_seqs, len(run.duration_us)) for run in runs])
    context = np.concatenate([np.broadcast_to(run.work.context, len(run.duration_us)) for run in runs])
    values = {"batch": batch, "context": context / np.maximum(batch, 1.0)}
    errors = np.clip(predictions.errors, -_CLIP, _CLIP)
    phases = np.concatenate([phases_of(run) for run in runs])
    measured, predicted = predictions.measured_us / 1e3, predictions.predicted_us / 1e3
    steps = np.unique(np.linspace(0, len(errors) - 1, min(len(errors), _MAX_POINTS)).astype(np.intp))
    columns = {"model": labels, "measured": measured, "predicted": predicted, "error": errors, **values}
    medians = [
        {"model": model, "against": name, name: x, "error": y}
        for model in models
        for name, column in values.items()
        for x, y in _running_median(column[labels == model], errors[labels == model])
    ]
    encoding = figure.by_series(models, name="model")
    encoding["color"]["legend"] = None
    return figure.grid(
        [
            [_cloud(measured[steps], predicted[steps], figure.by_series(models, name="model")),
             _residuals("batch", batch, errors, encoding)],
            [_histogram(predictions, encoding), _residuals("context", values["context"], errors, encoding)],
            [_boxes(encoding)],
        ],
        models,
        rows=_records({name: column[steps].tolist() for name, column in columns.items()}),
        medians=medians,
        bins=list(_bins(predictions.errors, labels, models)),
        boxes=list(_box_rows(errors, labels, phases, models)),
    )  # fmt: skip


def _records(columns: Mapping[str, Sequence[Any]]) -> list[figure.Row]:
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _cloud(measured: Floats, predicted: Floats, encoding: figure.Spec) -> figure.Spec:
    """Predicted against measured in milliseconds, with the line of equality and 10 % to both sides."""
    low, high = np.quantile(np.concatenate([measured, predicted]), (0.001, 0.999)).tolist()
    ends = max(low * 0.93, 1e-4), high * 1.05
    x, y = (_axis_for(title, ends) for title in ("measured step time, ms", "predicted, ms; shaded: ± 10%"))
    for channel in (x, y):
        channel["scale"] = {**channel["scale"], "domain": list(ends), "nice": False}
    line = {"values": [{"at": end, "low": 0.9 * end, "high": 1.1 * end} for end in ends]}
    reference: figure.Spec = {"x_by": "at", "color_by": {"value": figure.SLATE}, "clip": True}
    return figure.panel(
        250,
        y,
        [
            {**figure.layer("area", y_by="low", y2_by="high", opacity=0.15, **reference), "data": line},
            {**figure.layer("line", y_by="at", strokeWidth=1, **reference), "data": line},
            figure.layer("point", x_by="measured", y_by="predicted", size=10, opacity=0.45, clip=True),
        ],
        encoding={**encoding, "x": x},
        width=_LEFT_PX,
    )


def _axis_for(title: str, values: Sequence[float], field: str | None = None) -> figure.Spec:
    """Logarithmic where the values span much."""
    if figure.is_wide([value for value in values if value > 0], _WIDE):
        return figure.log_axis(title, [value for value in values if value > 0], field)
    return figure.axis(title, field)


def _residuals(name: str, x: Floats, errors: Floats, encoding: figure.Spec) -> figure.Spec:
    """Errors over a coordinate, with the median of each model along it."""
    reach = max(0.05, float(np.quantile(np.abs(errors), 0.99)) * 1.1)
    is_log = figure.is_wide(x[x > 0].tolist(), _WIDE)
    return figure.panel(
        250 if name == "batch" else 160,
        figure.axis("error: predicted / measured - 1", domain=(-reach, reach), format=".0%"),
        [
            figure.layer(
                "point", y_by="error", size=6, opacity=0.3, clip=True, where=f"datum.{name} > 0" if is_log else None
            ),
            figure.level(0.0, figure.SLATE),
            {
                **figure.layer("line", y_by="error", where=f"datum.against === '{name}'", clip=True),
                "data": {"name": "medians"},
            },
        ],
        encoding={**encoding, "x": _axis_for(_AGAINST[name], x.tolist(), name)},
        width=_RIGHT_PX,
    )


def _running_median(x: Floats, y: Floats, num_parts: int = 12) -> Iterator[tuple[float, float]]:
    """Medians of both in parts of ``x`` with equally many points."""
    order = np.argsort(x, kind="stable")
    for part in np.array_split(order, min(num_parts, max(1, len(order) // 10))):
        if len(part):
            yield float(np.median(x[part])), float(np.median(y[part]))


def _histogram(predictions: Predictions, encoding: figure.Spec) -> figure.Spec:
    """Errors of all steps, and in the title their mean magnitude, bias and coverage."""
    errors = predictions.errors
    title = (
        f"MAPE {np.abs(errors).mean():.1%}, bias {errors.mean():+.1%}, "
        f"{predictions.is_covered.mean():.0%} inside the 90% interval"
    )
    bar = figure.layer("rect", x2_by="high", y_by="bottom", y2_by="top")
    x = figure.axis("error: predicted / measured - 1", "low", format=".0%")
    panel = figure.panel(160, figure.axis("steps", zero=True), [bar], encoding={**encoding, "x": x}, width=_LEFT_PX)
    return {**panel, "data": {"name": "bins"}, "title": title}


def _bins(errors: Floats, labels: Words, models: Sequence[str]) -> Iterator[figure.Row]:
    edge = min(_CLIP, max(0.05, float(np.quantile(np.abs(errors), 0.995))))
    edges = np.linspace(-edge, edge, _NUM_BINS + 1)
    bottoms = np.zeros(_NUM_BINS)
    for model in models:
        counts = np.histogram(np.clip(errors[labels == model], -edge, edge), edges)[0]
        columns = {"low": edges[:-1], "high": edges[1:], "bottom": bottoms, "top": bottoms + counts}
        for row in _records({name: column.tolist() for name, column in columns.items()}):
            yield {"model": model, **row}
        bottoms = bottoms + counts


def _boxes(encoding: figure.Spec) -> figure.Spec:
    """A box for each phase of each model: quartiles, and whiskers from 5 to 95 %."""
    y = {
        "type": "nominal",
        "title": None,
        "sort": None,
        "axis": {"labelLimit": 170, "grid": False, "minExtent": 170},
    }
    x = figure.axis("error: box 25 to 75%, whiskers 5 to 95%", "p5", format=".0%")
    at: figure.Spec = {"y_by": "name"}
    panel = figure.panel(
        150,
        y,
        [
            figure.layer("rule", x2_by="p95", **at),
            figure.layer("bar", x_by="p25", x2_by="p75", size=14, opacity=0.7, **at),
            figure.layer("tick", x_by="p50", color_by={"value": "black"}, thickness=2, size=14, **at),
        ],
        encoding={**encoding, "x": x},
        width=600,
    )
    return {**panel, "data": {"name": "boxes"}}


def _box_rows(errors: Floats, labels: Words, phases: Words, models: Sequence[str]) -> Iterator[figure.Row]:
    for phase in ("prefill", "mixed", "decode"):
        for model in models:
            values = errors[(labels == model) & (phases == phase)]
            if len(values):
                percents = (5, 25, 50, 75, 95)
                points = dict(
                    zip((f"p{p}" for p in percents), np.percentile(values, percents).tolist(), strict=True)
                )
                name = f"{phase}, {len(values):,} steps" + (f" of {model}" if len(models) > 1 else "")
                yield {"model": model, "name": name, **points}
