"""The curves over the load: latency against throughput, and throughput against the speed of one user."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

import numpy as np

from benchctl.analysis.experiment.curves import Curve
from benchctl.report.charts import figure
from benchctl.report.curve_tables import TITLES, blocks_text
from benchctl.units import percentage

_DEFINITION: Final = (
    "Knee: the load with the most throughput / latency, by a parabola in each block. Beyond it twice as many open "
    "requests give less than 1.41 times the tokens, and at a rate latency grows faster than the rate. Speed is "
    "1000 / TPOT. Each interval is that of its point alone. Metrics: "
)


def _draw(
    subject: figure.Subject, *, chart_id: str, title: str, x: str, ys: Sequence[str], height: int
) -> figure.Chart | None:
    """A panel for each of the quantities ``ys`` against ``x``; None where no load was swept."""
    curves = subject.analysis.curves[: figure.MAX_SERIES]
    if not curves:
        return None
    labels = [curve.label for curve in curves]
    rows = [row for curve in curves for y in ys for row in _rows(curve, x, y, labels[0])]
    has_bands = len(labels) <= figure.MAX_BANDS and all(_is_ordered(curve, x) for curve in curves)
    panels = [
        figure.panel(
            height,
            figure.suitable_axis(TITLES[y], [row["y"] for row in rows if row["panel"] == y]),
            _layers(curves[0].unit, TITLES[x], TITLES[y], has_bands=has_bands),
            where=(f"datum.panel === '{y}'",),
            encoding=figure.by_series(labels),
        )
        for y in ys
    ]
    return figure.Chart(
        id=chart_id,
        title=f"{title} over the load",
        caption=(
            f"One line per arm over {curves[0].unit}; points are centres over {blocks_text(curves)} with "
            f"{percentage(curves[0].confidence)} intervals. Diamond and thick piece: the knee with its interval."
        ),
        definition=_DEFINITION + ", ".join(curves[0].metrics.values()),
        section="load",
        file=f"{chart_id.replace('-', '_')}.png",
        spec=figure.picture(
            panels, rows, figure.suitable_axis(TITLES[x], [row["x"] for row in rows], "x"), legend=labels
        ),
    )


CHARTS: Final = (
    partial(
        _draw,
        chart_id="throughput-latency",
        title="Latency against throughput",
        x="throughput",
        ys=("ttft", "tpot"),
        height=200,
    ),
    partial(
        _draw,
        chart_id="speed-throughput",
        title="Throughput against the speed of one user",
        x="speed",
        ys=("throughput",),
        height=320,
    ),
)
"""In the order of the page."""


def _is_ordered(curve: Curve, quantity: str) -> bool:
    """True where the quantity only grows or only falls with the load: areas are drawn in the order of x."""
    return len(set(np.sign(np.diff([levels[quantity].value for levels in curve.levels.values()])))) == 1


def _rows(curve: Curve, x: str, y: str, first_label: str) -> Iterator[figure.Row]:
    """Points, then the piece of the curve in the interval of the knee, and the knee.

    Only points of the first arm have their size as ``words``.
    """
    common = {"arm": curve.label, "panel": y}
    for size, levels in curve.levels.items():
        yield {
            **common,
            "kind": "point",
            "size": size,
            "words": f"{size:g}" if curve.label == first_label else None,
            "x": levels[x].value,
            "x_low": levels[x].low,
            "x_high": levels[x].high,
            "y": levels[y].value,
            "low": levels[y].low,
            "high": levels[y].high,
        }
    if not isinstance(knee := curve.knee, str):
        low, high = knee.low or knee.value, knee.high or knee.value
        piece = [low, *(size for size in curve.cells if low < size < high), high]
        for kind, size in (*(("piece", size) for size in piece), ("knee", knee.value)):
            yield {**common, "kind": kind, "size": size, "x": curve.at(size, x), "y": curve.at(size, y)}


def _layers(unit: str, x_title: str, y_title: str, *, has_bands: bool) -> list[figure.Spec]:
    """From back to front: intervals, curves, knees, points and their sizes."""
    at_points = "datum.kind === 'point'"
    line: figure.Spec = {"mark": "line", "y_by": "y", "order_by": {"field": "size", "type": "quantitative"}}
    tip = [("arm", "arm"), ("size", unit, ".4~g"), ("x", x_title, ".4~g"), ("y", y_title, ".4~g")]
    ends = [("low", "from", ".4~g"), ("high", "to", ".4~g")]
    mark: figure.Spec = {"mark": "area", "opacity": 0.2} if has_bands else {"mark": "rule"}
    return [
        figure.layer(where=at_points, y_by="low", y2_by="high", **mark),
        figure.layer("rule", where=at_points, x_by="x_low", x2_by="x_high", y_by="y"),
        figure.layer(where=at_points, strokeWidth=2, **line),
        figure.layer(where="datum.kind === 'piece'", strokeWidth=8, opacity=0.4, **line),
        figure.layer("point", where=at_points, y_by="y", tip=[*tip, *ends]),
        figure.layer(
            "point", where="datum.kind === 'knee'", y_by="y", shape="diamond", size=260, filled=False, tip=tip
        ),
        figure.layer("text", where="isValid(datum.words)", y_by="y", text_by="words", align="left", dx=6, dy=-9),
    ]
