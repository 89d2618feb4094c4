"""The forest plot as PNG: one row for each deciding metric in each cell, on a logarithmic axis."""

from typing import Final

from matplotlib.axes import Axes

from benchctl.analysis.compare.metric_comparison import MetricComparison
from benchctl.analysis.compare.result import Comparison
from benchctl.formats import percentage, shortened
from benchctl.report.charts.forest import Forest, ForestRow, forest_of
from benchctl.report.charts.palette import BLUE, GREEN, SLATE, VERMILION
from benchctl.report.charts.scale import LogScale
from benchctl.report.plots.style import new_figure, plain, png_bytes, tidy

_COLORS: Final = {"regression": VERMILION, "improvement": GREEN, "equivalent": BLUE}
_MARKERS: Final = {"regression": ">", "improvement": "<", "equivalent": "s"}
"""Shapes tell verdicts apart where colours do not."""
_ROW_IN: Final = 0.34
_LABEL_CHARACTERS: Final = 34


def forest_plot(comparison: Comparison) -> bytes:
    """The picture as PNG; it says so where no deciding metric has a ratio."""
    forest = forest_of(comparison)
    title = shortened(f"{comparison.verdict}: {comparison.b_name} against {comparison.a_name}", 90)
    lines = [] if forest is None else _lines(forest)
    figure = new_figure(1.5 + _ROW_IN * max(len(lines), 2), title)
    axes = figure.add_subplot()
    if forest is None:
        axes.set_axis_off()
        axes.text(0, 0.5, "no deciding metric has a ratio", transform=axes.transAxes, va="center", color=SLATE)
        return png_bytes(figure)
    axes.set_xlim(forest.scale.low, forest.scale.high)
    for height, (_, row) in enumerate(lines):
        if row is not None:
            _draw_row(axes, height, row, forest.scale)
    axes.axvline(0.0, color="black", linewidth=0.9, zorder=1)
    _draw_axes(axes, lines, forest.scale)
    names = " against ".join(shortened(name, 30) for name in (comparison.b_name, comparison.a_name))
    interval = f"its {percentage(comparison.confidence)} interval"
    axes.set_xlabel(plain(f"change of {names}, with {interval}; shaded: {forest.bands}"))
    return png_bytes(figure)


def _lines(forest: Forest) -> list[tuple[str, ForestRow | None]]:
    """The labels from top to bottom: a heading without a row for each metric, then its rows."""
    lines: list[tuple[str, ForestRow | None]] = []
    for group in forest.groups:
        lines.append((f"{group.metric.name} [{group.metric.unit}], {group.direction}", None))
        lines += [(shortened(row.label, _LABEL_CHARACTERS), row) for row in group.rows]
    return lines


def _draw_row(axes: Axes, height: int, row: ForestRow, scale: LogScale) -> None:
    """Margin, interval and ratio, and numbers and verdict to the right."""
    metric, color = row.metric, _COLORS.get(row.metric.verdict, SLATE)
    for margin in metric.margins.log_bands:
        ends = [height - 0.5, height + 0.5]
        axes.fill_betweenx(ends, -margin, margin, color="black", alpha=0.07, linewidth=0, zorder=0)
    words = row.change if metric.estimate is not None else metric.reason or ""
    beside = axes.get_yaxis_transform()  # x in shares of the width
    axes.text(
        1.02,
        height,
        plain(f"{words}  {metric.verdict}"),
        transform=beside,
        va="center",
        ha="left",
        fontsize=9,
        color=color,
    )
    _draw_estimate(axes, height, metric, scale, color)


def _draw_estimate(axes: Axes, height: int, metric: MetricComparison, scale: LogScale, color: str) -> None:
    """The interval, with an arrow at an end that the scale does not hold, and the ratio on it."""
    estimate = metric.estimate
    if estimate is None:
        return
    if estimate.log_interval is not None:
        low, high = (min(max(end, scale.low), scale.high) for end in estimate.log_interval)
        axes.plot([low, high], [height, height], color=color, linewidth=2.2, solid_capstyle="butt", zorder=2)
        for end, arrow in zip(estimate.log_interval, ("<", ">"), strict=True):
            if not scale.holds(end):
                at = scale.low if arrow == "<" else scale.high
                axes.plot([at], [height], arrow, markersize=5, color=color, clip_on=False, zorder=2)
    marker = _MARKERS.get(metric.verdict, "o")
    face = color if marker != "o" else "white"
    axes.plot([estimate.log_ratio], [height], marker, markersize=6.5, color=color, markerfacecolor=face, zorder=3)


def _draw_axes(axes: Axes, lines: list[tuple[str, ForestRow | None]], scale: LogScale) -> None:
    ticks = scale.ticks()
    axes.set_xticks([log_ratio for log_ratio, _ in ticks], labels=[label for _, label in ticks])
    axes.set_ylim(len(lines) - 0.4, -0.7)
    axes.set_yticks(range(len(lines)), labels=[plain(label) for label, _ in lines])
    for text, (_, row) in zip(axes.get_yticklabels(), lines, strict=True):
        text.set_fontweight("bold" if row is None else "normal")
    axes.tick_params(axis="y", length=0)
    tidy(axes, grid="x")
