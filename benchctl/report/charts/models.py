"""Pictures of models: the fit of step times, the law of speculation, and the saturation of a server by its load."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from benchctl.analysis.experiment.drafts import MeasuredSpeculation
from benchctl.analysis.metrics.table import METRICS
from benchctl.report.charts import figure
from benchctl.steptime.evaluate import Predictions, Words, phases_of
from benchctl.steptime.speculation_law import Estimate, SpeculationLaw
from benchctl.steptime.speculation_load import ServedSpeculation
from benchctl.steptime.work import Floats
from benchctl.units import MS_PER_S

_CLIP: Final = 0.5
"""Errors beyond are drawn at the edge."""
_LEFT_PX: Final = 390
_RIGHT_PX: Final = 330
_WIDE: Final = 20.0
_AGAINST: Final = {"batch": "rows in the batch", "context": "mean context of a row, tokens"}


def draw_fit(predictions: Predictions) -> figure.Spec:
    """A cloud of at most 4,000 points and a histogram on the left, residuals on the right; colours are models."""
    runs = predictions.runs
    names = [f"{run.deployment.shape.name} TP{run.deployment.tensor_parallel}" for run in runs]
    labels: Words = np.array(names)[predictions.run_of]
    models: list[str] = list(dict.fromkeys(labels.tolist()))
    batch = np.concatenate([np.broadcast_to(run.work.num_seqs, len(run.duration_us)) for run in runs])
    context = np.concatenate([np.broadcast_to(run.work.context, len(run.duration_us)) for run in runs])
    values = {"batch": batch, "context": context / np.maximum(batch, 1.0)}
    errors = np.clip(predictions.errors, -_CLIP, _CLIP)
    measured, predicted = predictions.measured_us / 1e3, predictions.predicted_us / 1e3
    steps = np.unique(np.linspace(0, len(errors) - 1, min(len(errors), 4000)).astype(np.intp))
    columns = {"model": labels, "measured": measured, "predicted": predicted, "error": errors, **values}
    medians = [
        {"model": model, "against": name, name: x, "error": y}
        for model in models
        for name, column in values.items()
        for x, y in _running_median(column[labels == model], errors[labels == model])
    ]
    legend = figure.by_series(models, name="model")
    plain = {**legend, "color": {**legend["color"], "legend": None}}
    phases = np.concatenate([phases_of(run) for run in runs])
    return figure.grid(
        [
            [_cloud(measured[steps], predicted[steps], legend), _residuals("batch", batch, errors, plain)],
            [_histogram(predictions, plain), _residuals("context", values["context"], errors, plain)],
            [_boxes(plain)],
        ],
        models,
        rows=_records({name: column[steps].tolist() for name, column in columns.items()}),
        medians=medians,
        bins=list(_bins(predictions.errors, labels, models)),
        boxes=list(_box_rows(errors, labels, phases, models)),
    )


def _records(columns: Mapping[str, Sequence[Any]]) -> list[figure.Row]:
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _cloud(measured: Floats, predicted: Floats, encoding: figure.Spec) -> figure.Spec:
    """Predicted against measured in milliseconds, with the line of equality and 10 % to both sides."""
    low, high = np.quantile(np.concatenate([measured, predicted]), (0.001, 0.999)).tolist()
    ends = max(low * 0.93, 1e-4), high * 1.05
    titles = ("measured step time, ms", "predicted, ms; shaded: ± 10%")
    x, y = (figure.suitable_axis(title, ends, least=_WIDE, zero=False) for title in titles)
    for channel in (x, y):
        channel["scale"] |= {"domain": list(ends), "nice": False}
    line = {"values": [{"at": end, "low": 0.9 * end, "high": 1.1 * end} for end in ends]}
    reference: figure.Spec = {"x_by": "at", "color_by": {"value": figure.SLATE}, "clip": True, "data": line}
    return figure.panel(
        250,
        y,
        [
            figure.layer("area", y_by="low", y2_by="high", opacity=0.15, **reference),
            figure.layer("line", y_by="at", strokeWidth=1, **reference),
            figure.layer("point", x_by="measured", y_by="predicted", size=10, opacity=0.45, clip=True),
        ],
        encoding={**encoding, "x": x},
        width=_LEFT_PX,
    )


def _residuals(name: str, values: Floats, errors: Floats, encoding: figure.Spec) -> figure.Spec:
    """Errors over a coordinate, with the median of each model along it."""
    reach = max(0.05, float(np.quantile(np.abs(errors), 0.99)) * 1.1)
    x = figure.suitable_axis(_AGAINST[name], values.tolist(), name, least=_WIDE, zero=False)
    where = f"datum.{name} > 0" if x["scale"].get("type") == "log" else None
    return figure.panel(
        250 if name == "batch" else 160,
        figure.axis("error: predicted / measured - 1", domain=(-reach, reach), format=".0%"),
        [
            figure.layer("point", y_by="error", size=6, opacity=0.3, clip=True, where=where),
            figure.level(0.0, figure.SLATE),
            figure.layer(
                "line", y_by="error", clip=True, data={"name": "medians"}, where=f"datum.against === '{name}'"
            ),
        ],
        encoding={**encoding, "x": x},
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
    return figure.panel(
        160,
        figure.axis("steps", zero=True),
        [figure.layer("rect", x2_by="high", y_by="bottom", y2_by="top")],
        encoding={**encoding, "x": figure.axis("error: predicted / measured - 1", "low", format=".0%")},
        width=_LEFT_PX,
        data={"name": "bins"},
        title=f"MAPE {np.abs(errors).mean():.1%}, bias {errors.mean():+.1%}, "
        f"{predictions.is_covered.mean():.0%} inside the 90% interval",
    )


def _bins(errors: Floats, labels: Words, models: Sequence[str]) -> Iterator[figure.Row]:
    edge = min(_CLIP, max(0.05, float(np.quantile(np.abs(errors), 0.995))))
    edges = np.linspace(-edge, edge, 61)
    bottoms = np.zeros(60)
    for model in models:
        tops = bottoms + np.histogram(np.clip(errors[labels == model], -edge, edge), edges)[0]
        columns = {"low": edges[:-1], "high": edges[1:], "bottom": bottoms, "top": tops}
        for row in _records({name: column.tolist() for name, column in columns.items()}):
            yield {"model": model, **row}
        bottoms = tops


def _boxes(encoding: figure.Spec) -> figure.Spec:
    """A box for each phase of each model: quartiles, and whiskers from 5 to 95 %."""
    labels = {"labelLimit": 170, "grid": False, "minExtent": 170}
    return figure.panel(
        150,
        {"type": "nominal", "title": None, "sort": None, "axis": labels},
        [
            figure.layer("rule", x2_by="p95", y_by="name"),
            figure.layer("bar", x_by="p25", x2_by="p75", size=14, opacity=0.7, y_by="name"),
            figure.layer("tick", x_by="p50", y_by="name", color_by={"value": "black"}, thickness=2, size=14),
        ],
        encoding={**encoding, "x": figure.axis("error: box 25 to 75%, whiskers 5 to 95%", "p5", format=".0%")},
        width=600,
        data={"name": "boxes"},
    )


def _box_rows(errors: Floats, labels: Words, phases: Words, models: Sequence[str]) -> Iterator[figure.Row]:
    percents = (5, 25, 50, 75, 95)
    for phase in ("prefill", "mixed", "decode"):
        for model in models:
            values = errors[(labels == model) & (phases == phase)]
            if len(values):
                name = f"{phase}, {len(values):,} steps" + (f" of {model}" if len(models) > 1 else "")
                points = zip(percents, np.percentile(values, percents).tolist(), strict=True)
                yield {"model": model, "name": name, **{f"p{percent}": value for percent, value in points}}


_LAW_PX: Final[figure.Spec] = {"height": 260, "width": 360}
_STAR: Final = (
    "M0,-1L0.22,-0.31L0.95,-0.31L0.36,0.12L0.59,0.81L0,0.38L-0.59,0.81L-0.36,0.12L-0.95,-0.31L-0.22,-0.31Z"
)
_COLORS: Final = {"with bonus token": figure.BLUE, "without": figure.VERMILION}


def draw_speculation(
    law: SpeculationLaw, served: ServedSpeculation | None = None, measured: MeasuredSpeculation | None = None
) -> figure.Spec:
    """Two panels of the law, with the arms of a result directory as points.

    With a server's step times, two panels of its load are below.
    """
    rows = [
        {"panel": name, "bonus": bonus, "kind": "law", **_values(length.num_draft_tokens, getattr(length, field))}
        for name in ("tokens", "speed_up")
        for length in law.lengths
        for bonus, field in zip(_COLORS, (name, f"{name}_without_bonus"), strict=True)
    ]
    with_bonus, without_bonus = _COLORS
    for arm in () if measured is None else measured.arms:
        # The law of a server has the costs of another one than was measured.
        speed_up = arm.measured_speed_up if served is None else None
        for name, each in (("tokens", arm.measured_tokens), ("speed_up", speed_up)):
            if each is not None:
                point = {"panel": name, "bonus": with_bonus if arm.bonus else without_bonus, "kind": "measured"}
                rows.append({**point, **_values(arm.num_draft_tokens, each)})
    best = {"values": [{"length": law.best.value, "value": law.best_speed_up.value}]}
    look: figure.Spec = {"shape": _STAR, "size": 180, "color_by": {"value": "black"}}
    has_best = law.best.value in [length.num_draft_tokens for length in law.lengths]
    star = [figure.layer("point", y_by="value", data=best, **look)] if has_best else []
    title = "speed-up while memory bounds the step; dashed: without" + ("; star: best" if has_best else "")
    lines = [
        [
            _law_panel("tokens", "tokens per step and sequence", []),
            _law_panel("speed_up", title, [figure.level(1.0, figure.SLATE), *star]),
        ]
    ]
    if served is None:
        return figure.grid(lines, list(_COLORS), rows=rows)
    load = list(_load_rows(served))
    return figure.grid([*lines, _load_panels(served, load)], list(_COLORS), rows=rows, load=load)


def _values(length: int, each: Estimate) -> figure.Row:
    return {"length": length, "value": each.value, "low": each.low, "high": each.high}


def _law_panel(name: str, title: str, more: Sequence[figure.Spec]) -> figure.Spec:
    """The law as lines, measured arms with their intervals over blocks."""
    law, measured = "datum.kind === 'law'", "datum.kind === 'measured'"
    x = figure.axis("draft tokens K; diamonds: measured", "length", tickMinStep=1, format="d")
    return figure.panel(
        y=figure.axis(title, zero=True),
        layers=[
            figure.layer("area", y_by="low", y2_by="high", opacity=0.2, where=f"{law} && isValid(datum.low)"),
            figure.layer("line", y_by="value", where=law),
            figure.layer("point", y_by="value", where=law),
            figure.layer("rule", y_by="low", y2_by="high", where=f"{measured} && isValid(datum.low)"),
            figure.layer("point", y_by="value", where=measured, shape="diamond", filled=False, size=110),
            *more,
        ],
        where=[f"datum.panel === '{name}'"],
        encoding={"color": figure.by_color("bonus", _COLORS), "x": x},
        **_LAW_PX,
    )


def _load_rows(served: ServedSpeculation) -> Iterator[figure.Row]:
    """Every batch without drafts and with some draft lengths, spread evenly, at most six."""
    number = len(served.batches[0].points) - 1
    chosen = sorted({*range(1, number + 1, max(1, -(-number // 5))), number})[:6]
    for batch in served.batches:
        for point in (batch.points[index] for index in (0, *chosen)):
            num = point.num_draft_tokens
            yield {
                "length": f"K = {num}" if num else "without speculation",
                "batch": batch.rows,
                "gain": point.speed_up.value,
                "throughput": point.goodput_per_s.value,
                "latency": point.tpot_s.value * MS_PER_S,
            }


def _load_panels(served: ServedSpeculation, rows: Sequence[figure.Row]) -> list[figure.Spec]:
    """Gain by batch, and time per token over throughput: its lines go from the smallest batch to the largest."""
    _, *names = dict.fromkeys(row["length"] for row in rows)
    colors = {name: figure.SERIES[i % len(figure.SERIES)] for i, name in enumerate(names)}
    pays = served.largest_paying
    is_marked = 0 < pays < max(row["batch"] for row in rows)
    title = "goodput over that without speculation" + (f"; dotted: pays up to {pays}" if is_marked else "")
    size = {**_LAW_PX, "data": {"name": "load"}}
    return [
        figure.panel(
            y=figure.axis(title, zero=True),
            layers=[
                figure.layer("line", y_by="gain"),
                figure.layer("point", y_by="gain", size=20),
                figure.level(1.0, figure.SLATE),
                *([_upright({"values": [{"batch": pays}]}, color_by={"value": figure.GREY})] if is_marked else []),
            ],
            where=["datum.length !== 'without speculation'"],
            encoding={
                "color": figure.by_color("length", colors),
                "x": figure.log_axis("sequences in the batch", [row["batch"] for row in rows], "batch"),
            },
            **size,
        ),
        figure.panel(
            y=figure.log_axis("time per output token, ms", [row["latency"] for row in rows]),
            layers=[
                figure.layer("line", y_by="latency", order_by={"field": "batch"}),
                figure.layer("point", y_by="latency", size=20),
            ],
            encoding={
                "color": figure.by_color("length", {"without speculation": "black", **colors}),
                "x": figure.log_axis("output tokens per second", [row["throughput"] for row in rows], "throughput"),
            },
            **size,
        ),
    ]


def _upright(data: figure.Spec, **properties: Any) -> figure.Spec:
    """Dotted lines over the height of a panel."""
    ends: figure.Spec = {"y_by": {"value": 0}, "y2_by": {"value": "height"}}
    return figure.layer("rule", data=data, strokeDash=[1, 3], **ends, **properties)


def draw_saturation(
    x_title: str,
    rows: Sequence[figure.Row],
    names: Sequence[str],
    limits: Mapping[str, float],
    largest: Mapping[str, float | None],
) -> figure.Spec:
    """One panel for each metric of ``names``; ``limits`` are dashed, the ``largest`` load of each arm is dotted.

    ``rows`` have an ``arm``, the ``size`` of its load, a ``metric`` and its ``value``.
    """
    labels = list(dict.fromkeys(row["arm"] for row in rows))
    panels = []
    for name in names:
        limit = limits.get(name)
        title = f"{name}, {METRICS[name].unit}" + ("" if limit is None else f"; dashed: limit {limit:g}")
        where = f"datum.metric === '{name}'"
        layers = [
            *([] if limit is None else [figure.level(limit, figure.SLATE)]),
            figure.layer("line", y_by="value", where=where),
            figure.layer("point", y_by="value", where=where, shape_by={"field": "arm", "legend": None}),
            _upright({"name": "largest"}, strokeWidth=1),
        ]
        y = figure.suitable_axis(title, [row["value"] for row in rows if row["metric"] == name])
        panels.append(figure.panel(190, y, layers, encoding=figure.by_series(labels)))
    ends = [{"arm": label, "size": size} for label, size in largest.items() if size is not None]
    x = figure.suitable_axis(x_title, [row["size"] for row in rows], "size")
    return figure.picture(panels, rows, x, legend=labels, largest=ends)
