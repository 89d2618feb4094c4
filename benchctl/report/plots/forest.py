"""The forest plot: the ratio of each deciding metric in each cell with its interval, against the margin, as PNG.

One row each, by metric and then by cell; the axis is logarithmic, so that twice and half are equally far from 1.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from matplotlib.axes import Axes

from benchctl.analysis.compare.metric_comparison import MetricComparison
from benchctl.analysis.compare.result import Comparison
from benchctl.analysis.compare.text import change_text, has_two_margins
from benchctl.formats import percentage, shortened
from benchctl.report.plots.style import BLUE, GREEN, SLATE, VERMILION, new_figure, png_bytes, tidy

_COLORS: Final = {"regression": VERMILION, "improvement": GREEN, "equivalent": BLUE}
_MARKERS: Final = {"regression": ">", "improvement": "<", "equivalent": "s"}
"""Shapes tell verdicts apart where colours do not."""
_BETTER: Final = {"lower": "lower is better", "higher": "higher is better", "none": "neither is better"}
_ROW_IN: Final = 0.34
_LABEL_CHARACTERS: Final = 34
_LEAST_REACH_FRAC: Final = 0.02
"""The axis reaches at least this far on either side of equal: no interval is blown up to fill it."""
_MOST_TICKS: Final = 7
_LABEL_FRAC: Final = 0.12
"""Labels closer than this share of the axis touch."""
_TICK_DIGITS: Final = (1.0, 2.0, 5.0)


@dataclass(frozen=True, slots=True)
class _Row:
    """A line of the plot: a heading, or a metric in a cell."""

    label: str
    metric: MetricComparison | None = None


def forest_plot(comparison: Comparison) -> bytes:
    """The picture as PNG; it says so where no deciding metric has a ratio."""
    rows = _rows(comparison)
    title = shortened(f"{comparison.verdict}: {comparison.b_name} against {comparison.a_name}", 90)
    figure = new_figure(1.5 + _ROW_IN * max(len(rows), 2), title)
    axes = figure.add_subplot()
    drawn = [row.metric for row in rows if row.metric is not None and row.metric.estimate is not None]
    if not drawn:
        axes.set_axis_off()
        axes.text(0, 0.5, "no deciding metric has a ratio", transform=axes.transAxes, va="center", color=SLATE)
        return png_bytes(figure)
    ends = _ends(drawn)
    axes.set_xlim(*ends)
    for position, row in enumerate(rows):
        if row.metric is not None:
            _draw(axes, position, row.metric)
    axes.axvline(0.0, color="black", linewidth=0.9, zorder=1)
    _scale(axes, rows, ends)
    level = percentage(comparison.confidence)
    band = "bands: margins of equivalence and of a change" if has_two_margins(drawn) else "the band is the margin"
    names = " against ".join(shortened(name, 30) for name in (comparison.b_name, comparison.a_name))
    axes.set_xlabel(f"change of {names}, with its {level} interval; {band}")
    return png_bytes(figure)


def _rows(comparison: Comparison) -> list[_Row]:
    groups: dict[str, list[_Row]] = {}
    for cell in comparison.cells:
        for metric in cell.deciding:
            heading = _Row(f"{metric.metric.name} [{metric.metric.unit}], {_BETTER[metric.metric.direction]}")
            group = groups.setdefault(metric.metric.name, [heading])
            group.append(_Row(shortened(cell.label, _LABEL_CHARACTERS), metric))
    return [row for group in groups.values() for row in group]


def _ends(drawn: Sequence[MetricComparison]) -> tuple[float, float]:
    """The ends of the axis in logarithms: every interval, margin and ratio is on it, and so is equal."""
    found = [-math.log1p(_LEAST_REACH_FRAC), math.log1p(_LEAST_REACH_FRAC)]
    for metric in drawn:
        margin = metric.margins.log_bands[0]
        found += [-margin, margin]
        if metric.estimate is not None:
            found += [metric.estimate.log_ratio, *(metric.estimate.log_interval or ())]
    room = 0.04 * (max(found) - min(found))
    return min(found) - room, max(found) + room


def _draw(axes: Axes, position: int, metric: MetricComparison) -> None:
    """One row: margin, interval, ratio, and its numbers and verdict at the right."""
    estimate = metric.estimate
    height = [position - 0.5, position + 0.5]
    for margin in metric.margins.log_bands:
        axes.fill_betweenx(height, -margin, margin, color="black", alpha=0.07, linewidth=0, zorder=0)
    color = _COLORS.get(metric.verdict, SLATE)
    words = change_text(metric) if estimate is not None else metric.reason or ""
    said = f"{words}  {metric.verdict}"
    beside = axes.get_yaxis_transform()  # x in shares of the width
    axes.text(1.02, position, said, transform=beside, va="center", ha="left", fontsize=9, color=color)
    if estimate is None:
        return
    if estimate.log_interval is not None:
        low, high = estimate.log_interval
        axes.plot([low, high], [position, position], color=color, linewidth=2.2, solid_capstyle="butt", zorder=2)
    marker = _MARKERS.get(metric.verdict, "o")
    face = color if marker != "o" else "white"
    axes.plot([estimate.log_ratio], [position], marker, markersize=6.5, color=color, markerfacecolor=face, zorder=3)


def _scale(axes: Axes, rows: Sequence[_Row], ends: tuple[float, float]) -> None:
    ticks = _apart(_ticks(*(math.expm1(end) for end in ends)), ends)
    axes.set_xticks(
        [math.log1p(tick) for tick in ticks], labels=[f"{tick * 100:+.4g}%" if tick else "0" for tick in ticks]
    )
    axes.set_ylim(len(rows) - 0.4, -0.7)
    axes.set_yticks(range(len(rows)), labels=[row.label for row in rows])
    for label, row in zip(axes.get_yticklabels(), rows, strict=True):
        label.set_fontweight("bold" if row.metric is None else "normal")
    axes.tick_params(axis="y", length=0)
    tidy(axes, grid="x")


def _apart(ticks: Sequence[float], ends: tuple[float, float]) -> list[float]:
    """Those ticks whose labels do not touch on the logarithmic axis; no change keeps its label."""
    kept: list[float] = []
    for tick in sorted(ticks, key=abs):
        if all(abs(math.log1p(tick) - math.log1p(other)) >= _LABEL_FRAC * (ends[1] - ends[0]) for other in kept):
            kept.append(tick)
    return sorted(kept)


def _ticks(low: float, high: float) -> list[float]:
    """Round changes between two: multiples of 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10((high - low) / _MOST_TICKS))
    steps = (digit * scale for scale in (power, 10 * power) for digit in _TICK_DIGITS)
    step = next(step for step in steps if (high - low) / step <= _MOST_TICKS)
    return [step * i for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
