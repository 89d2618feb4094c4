"""The picture of speculation: tokens and speed-up by draft length; with step times, gain by batch and latency."""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from benchctl.analysis.drafts import MeasuredSpeculation, SpeculativeArm
from benchctl.report.charts import figure
from benchctl.steptime.speculation.draft_length import SpeculationLaw
from benchctl.steptime.speculation.estimate import Estimate
from benchctl.steptime.speculation.served import ServedSpeculation
from benchctl.units import MS_PER_S

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
