"""The forest plot: the ratio of every deciding metric in every cell with its interval, against the margin."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from benchctl.analysis.compare.metric import MetricComparison
from benchctl.analysis.compare.result import Comparison
from benchctl.analysis.compare.words import change_text, has_two_margins
from benchctl.formats import percentage, shortened
from benchctl.report.charts import figure
from benchctl.report.charts.figure import BLUE, GREEN, GREY, SLATE, VERMILION

_LEAST_LOG: Final = math.log(1.02)
_NICE_PERCENT: Final = (
    *(100, -50, 50, 300, 900, -75, -90, 500, 200, 25, -25, 20, -20, 10, -10, 5, -5, 3, -3, 2, -2, 1, -1),
    *(0.5, -0.5, 0.2, -0.2, 0.1, -0.1, 0.05, -0.05, 0.02, -0.02, 0.01, -0.01),
)


@dataclass(frozen=True, slots=True)
class LogScale:
    """From ``low`` to ``high``, both logarithms of ratios."""

    low: float
    high: float

    def at(self, log_ratio: float) -> float:
        """Share of the width at which a value is drawn, 0 to 1; values beyond the ends are drawn at the ends."""
        return min(1.0, max(0.0, (log_ratio - self.low) / (self.high - self.low)))

    def holds(self, log_ratio: float) -> bool:
        return self.low <= log_ratio <= self.high

    def ticks(self) -> tuple[tuple[float, str], ...]:
        """Logarithm and label of each tick, from left to right: no change, and round percentages."""
        labels = {0.0: "0"}
        for percent in _NICE_PERCENT:
            log_ratio = math.log1p(percent / 100)
            gap = min(abs(self.at(log_ratio) - self.at(other)) for other in labels)
            if self.holds(log_ratio) and gap >= 0.13:
                labels[log_ratio] = f"{percent:+g}%".replace("-", "\N{MINUS SIGN}")
        return tuple(sorted(labels.items()))


def scale_of(points: Sequence[float], ends: Iterable[float], always: Iterable[float]) -> LogScale:
    """A scale that shows every point and ``always``, and as much of the intervals as does not squeeze these.

    An interval over two blocks may reach from nothing to everything: it is cut where it extends further from the
    points than these are apart.
    """
    required = [0.0, *points, *always]
    low, high = min(required), max(required)
    room = max(high - low, _LEAST_LOG)
    for end in ends:
        low, high = min(low, max(end, min(required) - room)), max(high, min(end, max(required) + room))
    if high - low < _LEAST_LOG:
        low, high = low - _LEAST_LOG / 2, high + _LEAST_LOG / 2
    pad = 0.04 * (high - low)
    return LogScale(low - pad, high + pad)


BETTER: Final = {"lower": "lower is better", "higher": "higher is better", "none": "neither is better"}
_MARKS: Final = {
    "regression": (VERMILION, "triangle-right"),
    "improvement": (GREEN, "triangle-left"),
    "equivalent": (BLUE, "square"),
}
"""Colour and shape: shapes tell verdicts apart where colours do not."""
_LEFT_PX: Final = 230


@dataclass(frozen=True, slots=True, kw_only=True)
class Forest:
    """The rows of each metric, label and comparison of a cell; the scale of all, and what the shaded bands are."""

    groups: dict[str, list[tuple[str, MetricComparison]]]
    scale: LogScale
    bands: str


def forest_of(comparison: Comparison) -> Forest | None:
    """The forest plot of one comparison; None where no deciding metric has a ratio."""
    groups: dict[str, list[tuple[str, MetricComparison]]] = {}
    for cell in comparison.cells:
        for metric in cell.deciding:
            groups.setdefault(metric.metric.name, []).append((cell.label, metric))
    estimated = [metric for cell in comparison.cells for metric in cell.deciding if metric.estimate is not None]
    estimates = [metric.estimate for metric in estimated if metric.estimate is not None]
    if not estimates:
        return None
    margin = max(metric.margins.log_bands[0] for metric in estimated)
    ends = [end for estimate in estimates for end in estimate.log_interval or ()]
    return Forest(
        groups=groups,
        scale=scale_of([estimate.log_ratio for estimate in estimates], ends, (-margin, margin)),
        bands="the margins of equivalence and of a change" if has_two_margins(estimated) else "the margin",
    )


def forest_plot(comparison: Comparison, suffix: str = ".png") -> bytes:
    """The picture as the content of a file; it says so where no deciding metric has a ratio."""
    title = shortened(f"{comparison.verdict}: {comparison.b_name} against {comparison.a_name}", 90)
    names = " against ".join(shortened(name, 30) for name in (comparison.b_name, comparison.a_name))
    note, forest = "No deciding metric has a ratio.", forest_of(comparison)
    if forest is not None:
        note = f"Change of {names}, with its {percentage(comparison.confidence)} interval; shaded: {forest.bands}."
    return figure.picture_bytes(forest_spec(forest), title, note, suffix)


def forest_spec(forest: Forest | None) -> figure.Spec:
    """One row for each metric in each cell, on a logarithmic axis, under the name of its metric."""
    rows: list[figure.Row] = []
    bands: list[figure.Row] = []
    scale = LogScale(-_LEAST_LOG, _LEAST_LOG) if forest is None else forest.scale
    for group in () if forest is None else forest.groups.values():
        metric = group[0][1].metric
        heading = f"{metric.name} [{metric.unit}], {BETTER[metric.direction]}"
        rows.append({"y": len(rows), "label": heading, "weight": "bold"})
        for label, each in group:
            bands += [{"y": len(rows), "low": -margin, "high": margin} for margin in each.margins.log_bands]
            rows.append({"y": len(rows), "label": shortened(label, 34), **_row(each, scale)})
    at: figure.Spec = {"y_by": "y"}
    own: figure.Spec = {**at, "color_by": {"field": "color", "type": "nominal", "scale": None}}
    black: figure.Spec = {"color_by": {"value": "black"}}
    shaded: figure.Spec = {
        "data": {"name": "bands"},
        "color_by": {"value": GREY},
        "opacity": 0.17,
        "size": 23,
        **at,
    }
    no_change: figure.Spec = {
        "data": {"values": [{"ratio": 0}]},
        "y_by": {"value": 0},
        "y2_by": {"value": "height"},
    }
    shape: figure.Spec = {"shape_by": {"field": "shape", "type": "nominal", "scale": None}, "size": 70}
    name: figure.Spec = {"text_by": "label", "align": "left", "x_by": {"value": -_LEFT_PX + 8}, **black, **at}
    words: figure.Spec = {"text_by": "words", "align": "left", "x_by": {"value": "width"}, "dx": 12}
    layers = [
        figure.layer("bar", x_by="low", x2_by="high", **shaded),
        figure.layer("rule", strokeWidth=1, **no_change, **black),
        figure.layer("rule", x_by="low", x2_by="high", where="isValid(datum.low)", strokeWidth=2.2, **own),
        *(
            figure.layer("point", x_by=end, where=f"datum.{end}_is_cut", shape=f"triangle-{side}", size=40, **own)
            for end, side in (("low", "left"), ("high", "right"))
        ),
        figure.layer("point", x_by="ratio", where="isValid(datum.ratio)", **shape, **own),
        figure.layer("text", where="isValid(datum.words)", **words, **own),
        *(
            figure.layer("text", where=f"(datum.weight === 'bold') === {test}", fontWeight=weight, limit=px, **name)
            for test, weight, px in (("true", "bold", 600), ("false", "normal", _LEFT_PX - 10))
        ),
    ]
    ticks = scale.ticks()
    cases = " : ".join(f"abs(datum.value - {at:.9f}) < 1e-6 ? '{label}'" for at, label in ticks)
    values = [at for at, _ in ticks]
    x = figure.axis(None, "ratio", domain=(scale.low, scale.high), values=values, labelExpr=f"{cases} : ''")
    y = figure.axis(None, domain=(len(rows) - 0.5, -0.5), labels=False, ticks=False, grid=False)
    panel = figure.panel(24 * max(len(rows), 2), y, layers, width=900 - _LEFT_PX - 290)  # verdicts at the right
    return figure.picture([panel], rows, x, left=_LEFT_PX, bands=bands)


def _row(metric: MetricComparison, scale: LogScale) -> figure.Row:
    """Interval and ratio, and numbers and verdict to the right; an end that the scale does not hold is cut."""
    estimate = metric.estimate
    words = change_text(metric) if estimate is not None else metric.reason or ""
    color, shape = _MARKS.get(metric.verdict, (SLATE, "circle"))
    row: dict[str, Any] = {"words": f"{words}  {metric.verdict}", "color": color, "shape": shape}
    row["ratio"] = None if estimate is None else estimate.log_ratio
    if estimate is not None and estimate.log_interval is not None:
        for name, end in zip(("low", "high"), estimate.log_interval, strict=True):
            row |= {name: min(max(end, scale.low), scale.high), f"{name}_is_cut": not scale.holds(end)}
    return row
