"""Pictures of models: the fit of step times, the law of speculation, and the saturation of a server by its load."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from benchctl.analysis.drafts import MeasuredSpeculation, SpeculativeArm
from benchctl.analysis.metrics.table import METRICS
from benchctl.report.charts import figure
from benchctl.steptime.diagnosis.buckets import Words, phases_of
from benchctl.steptime.diagnosis.predictions import Predictions
from benchctl.steptime.fitting.least_squares import Floats
from benchctl.steptime.speculation.draft_length import SpeculationLaw
from benchctl.steptime.speculation.estimate import Estimate
from benchctl.steptime.speculation.served import ServedSpeculation
from benchctl.units import MS_PER_S

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


_MOST_LINES: Final = 5
"""Draft lengths in a panel that has a line for each."""
_WIDTH_PX: Final = 360
_HEIGHT_PX: Final = 260
_STAR: Final = (
    "M0,-1L0.22,-0.31L0.95,-0.31L0.36,0.12L0.59,0.81L0,0.38L-0.59,0.81L-0.36,0.12L-0.95,-0.31L-0.22,-0.31Z"
)
_WITH: Final = "with bonus token"
_WITHOUT: Final = "without"
_COLORS: Final = {_WITH: figure.BLUE, _WITHOUT: figure.VERMILION}


def draw_speculation(
    law: SpeculationLaw, served: ServedSpeculation | None = None, measured: MeasuredSpeculation | None = None
) -> figure.Spec:
    """Two panels of the law, with the arms of a result directory as points.

    With a server's step times, two panels of its load are below.
    """
    arms = () if measured is None else measured.arms
    of_law = {
        "tokens": [*_law_rows(law, "tokens"), *_points(arms, lambda arm: arm.measured_tokens)],
        "speed_up": [
            *_law_rows(law, "speed_up"),
            # The law of a server has the costs of another one than was measured.
            *([] if served is not None else _points(arms, lambda arm: arm.measured_speed_up)),
        ],
    }
    has_best = law.best.value in [length.num_draft_tokens for length in law.lengths]
    star = {
        **figure.layer("point", y_by="value", shape=_STAR, size=180, color_by={"value": "black"}),
        "data": {"values": [{"length": law.best.value, "value": law.best_speed_up.value}]},
    }
    title = "speed-up while memory bounds the step; dashed: without" + ("; star: best" if has_best else "")
    lines = [
        [
            _law_panel("tokens", "tokens per step and sequence", []),
            _law_panel("speed_up", title, [figure.level(1.0, figure.SLATE), *([star] if has_best else [])]),
        ]
    ]
    rows = [{"panel": name, **row} for name, group in of_law.items() for row in group]
    if served is None:
        return figure.grid(lines, list(_COLORS), rows=rows)
    lines.append(_load_panels(served))
    return figure.grid(lines, list(_COLORS), rows=rows, load=list(_load_rows(served)))


def _law_rows(law: SpeculationLaw, name: str) -> Iterator[figure.Row]:
    for length in law.lengths:
        for bonus, field in ((_WITH, name), (_WITHOUT, f"{name}_without_bonus")):
            yield {"bonus": bonus, "kind": "law", **_values(length.num_draft_tokens, getattr(length, field))}


def _points(
    arms: Sequence[SpeculativeArm], of: Callable[[SpeculativeArm], Estimate | None]
) -> Iterator[figure.Row]:
    """Measured arms with their intervals over blocks."""
    for arm in arms:
        if (each := of(arm)) is not None:
            bonus = _WITH if arm.bonus else _WITHOUT
            yield {"bonus": bonus, "kind": "measured", **_values(arm.num_draft_tokens, each)}


def _values(length: int, each: Estimate) -> figure.Row:
    return {"length": length, "value": each.value, "low": each.low, "high": each.high}


def _law_panel(name: str, title: str, more: Sequence[figure.Spec]) -> figure.Spec:
    law, measured = "datum.kind === 'law'", "datum.kind === 'measured'"
    return figure.panel(
        _HEIGHT_PX,
        figure.axis(title, zero=True),
        [
            figure.layer("area", y_by="low", y2_by="high", opacity=0.2, where=f"{law} && isValid(datum.low)"),
            figure.layer("line", y_by="value", where=law),
            figure.layer("point", y_by="value", where=law),
            figure.layer("rule", y_by="low", y2_by="high", where=f"{measured} && isValid(datum.low)"),
            figure.layer("point", y_by="value", where=measured, shape="diamond", filled=False, size=110),
            *more,
        ],
        where=[f"datum.panel === '{name}'"],
        encoding={
            "color": figure.by_color("bonus", _COLORS),
            "x": figure.axis("draft tokens K; diamonds: measured", "length", tickMinStep=1, format="d"),
        },
        width=_WIDTH_PX,
    )


def _chosen(served: ServedSpeculation) -> list[int]:
    """Indices of at most ``_MOST_LINES`` draft lengths, spread evenly, without the 0 at the front."""
    number = len(served.batches[0].points) - 1
    step = max(1, -(-number // _MOST_LINES))
    return sorted({*range(1, number + 1, step), number})[: _MOST_LINES + 1]


def _load_rows(served: ServedSpeculation) -> Iterator[figure.Row]:
    for batch in served.batches:
        for index in (0, *_chosen(served)):
            point = batch.points[index]
            yield {
                "length": _length_name(point.num_draft_tokens),
                "batch": batch.rows,
                "gain": point.speed_up.value,
                "throughput": point.goodput_per_s.value,
                "latency": point.tpot_s.value * MS_PER_S,
            }


def _length_name(num_draft_tokens: int) -> str:
    return f"K = {num_draft_tokens}" if num_draft_tokens else "without speculation"


def _load_panels(served: ServedSpeculation) -> list[figure.Spec]:
    """Gain by batch, and time per token over throughput: its lines go from the smallest batch to the largest."""
    rows = list(_load_rows(served))
    names = [_length_name(served.batches[0].points[i].num_draft_tokens) for i in _chosen(served)]
    colors = {name: figure.series_color(i) for i, name in enumerate(names)}
    pays = served.largest_paying
    marked = {
        "data": {"values": [{"batch": pays}]},
        "mark": {"type": "rule", "strokeDash": [1, 3]},
        "encoding": {"y": {"value": 0}, "y2": {"value": "height"}, "color": {"value": figure.GREY}},
    }
    is_marked = 0 < pays < max(row["batch"] for row in rows)
    gain = figure.panel(
        _HEIGHT_PX,
        figure.axis(
            "goodput over that without speculation" + (f"; dotted: pays up to {pays}" if is_marked else ""),
            zero=True,
        ),
        [
            figure.layer("line", y_by="gain"),
            figure.layer("point", y_by="gain", size=20),
            figure.level(1.0, figure.SLATE),
            *([marked] if is_marked else []),
        ],
        where=["datum.length !== 'without speculation'"],
        encoding={
            "color": figure.by_color("length", colors),
            "x": figure.log_axis("sequences in the batch", [row["batch"] for row in rows], "batch"),
        },
        width=_WIDTH_PX,
    )
    latency = figure.panel(
        _HEIGHT_PX,
        figure.log_axis("time per output token, ms", [row["latency"] for row in rows]),
        [
            figure.layer("line", y_by="latency", order_by={"field": "batch"}),
            figure.layer("point", y_by="latency", size=20),
        ],
        encoding={
            "color": figure.by_color("length", {"without speculation": "black", **colors}),
            "x": figure.log_axis("output tokens per second", [row["throughput"] for row in rows], "throughput"),
        },
        width=_WIDTH_PX,
    )
    return [{**panel, "data": {"name": "load"}} for panel in (gain, latency)]


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
