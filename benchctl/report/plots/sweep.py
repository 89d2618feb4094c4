"""The sweep as PNG: ratios to the baseline of time, FLOPs, and the rate at which FLOPs are achieved.

Pictures of stacked bars: the sections of a step, what guidance consists of, and FLOPs by their account.
The forest plot as PNG: one row for each deciding metric in each cell, on a logarithmic axis.
The saturation curve as PNG: metrics of each arm over the size of its load, with the limits they must keep.
Step time and batch size over a run, as PNG.
The table of all pictures of a report; each is drawn, or skipped with a reason a person can act on.
"""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from benchctl.analysis.compare.metric import MetricComparison
from benchctl.analysis.compare.result import Comparison
from benchctl.analysis.metrics.table import METRICS
from benchctl.analysis.summary.analyzed import AnalyzedExperiment
from benchctl.analysis.summary.summary import CellSummary, SweepRow
from benchctl.costs.flops import FlopsAccount
from benchctl.formats import percentage, shortened
from benchctl.report.charts.figure import (
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    SERIES,
    SKY,
    SLATE,
    VERMILION,
    YELLOW,
    LogScale,
)
from benchctl.report.charts.ratios import (
    NO_SWEEP,
    Reach,
    SweepLine,
    SweepPoint,
    interval_label,
    reach_of,
    sweep_lines,
    swept_factor,
    swept_rows,
)
from benchctl.report.charts.steps import (
    NO_SECTIONS,
    NO_STEPS,
    TITLE,
    SectionPart,
    guidance_parts,
    section_bars,
    step_times,
)
from benchctl.report.page.charts.acceptance import Forest, ForestRow, forest_of
from benchctl.report.plots.plots import (
    Part,
    Plot,
    legend_beside,
    new_figure,
    plain,
    png_bytes,
    stacked_bars,
    tidy,
    wrapped,
)
from benchctl.units import PETA, TERA

_FLOPS: Final = (
    ("pflops", "FLOPs, published rule", ORANGE, "--", "s"),
    ("pflops_observed", "FLOPs, observed", GREEN, "-.", "D"),
    ("achieved_tflops", "achieved FLOP/s, published rule", PURPLE, ":", "^"),
)
_MAX_UPRIGHT: Final = 6


def draw_sweep(analysis: AnalyzedExperiment) -> tuple[Plot, ...]:
    """``topk_sweep.png``, or ``<factor>_sweep.png``, for each variant that was swept over at least two cells."""
    rows = swept_rows(analysis, ["wall"])
    groups = [list(group) for _, group in itertools.groupby(rows, key=lambda row: row.variant)]
    groups = [group for group in groups if len(group) > 1]
    if not groups:
        return (Plot(name="topk_sweep.png", skipped=NO_SWEEP),)
    return tuple(_draw(group, suffix=f"_{group[0].variant}" if len(groups) > 1 else "") for group in groups)


def _draw(rows: Sequence[SweepRow], *, suffix: str) -> Plot:
    # The cells of a plan that somebody else wrote may differ in their factors.
    factors = dict.fromkeys(factor for row in rows for factor in row.cell)
    varied = [factor for factor in factors if len({row.cell.get(factor) for row in rows}) > 1]
    (line,) = sweep_lines(rows, swept_factor(rows) if len(varied) == 1 else None)
    points = line.points("wall")
    reach = reach_of(points)
    figure = new_figure(5.0, f"{rows[0].variant} against the baseline of the same block")
    axes = figure.add_subplot()
    x = _draw_x_axis(axes, line, varied)
    axes.axhline(1.0, color=SLATE, linewidth=1.0, label="baseline")
    _draw_wall(axes, points, x, reach, is_line=len(varied) == 1)
    highest = _draw_flops(axes, line, x, is_line=len(varied) == 1)
    axes.set_ylabel("ratio to the baseline")
    axes.set_ylim(0, max(1.06 * highest, reach.high))
    tidy(axes, grid="y")
    legend_beside(axes)
    return Plot(name=file_name(varied, suffix), png=png_bytes(figure))


def file_name(varied: Sequence[str], suffix: str) -> str:
    """The name of a picture of the factors that vary, as one part of a path."""
    stem = "topk" if varied == ["top_k"] else "_".join(varied)
    return re.sub(r"[^\w=-]", "_", f"{stem}_sweep{suffix}") + ".png"


def _draw_x_axis(axes: Axes, line: SweepLine, varied: Sequence[str]) -> list[float]:
    """Numbers of one factor at their value; anything else side by side, with its name below."""
    if len(varied) == 1:
        axes.set_xlabel(plain(varied[0]))
    if line.is_ordered:
        numbers = [float(value) for value in line.x]
        axes.set_xticks(numbers, labels=[f"{number:g}" for number in numbers])
        return numbers
    heights = [float(i) for i in range(len(line.x))]
    axes.set_xlim(-0.5, len(heights) - 0.5)
    words = [wrapped(str(value)) for value in line.x]
    axes.set_xticks(heights, labels=words, rotation=0 if len(heights) <= _MAX_UPRIGHT else 90)
    return heights


def _draw_wall(
    axes: Axes, points: Sequence[SweepPoint], x: Sequence[float], reach: Reach, *, is_line: bool
) -> None:
    estimates = [point.estimate for point in points]
    lows = [estimate.ci_low for estimate in estimates if estimate.ci_low is not None]
    highs = [estimate.ci_high for estimate in estimates if estimate.ci_high is not None]
    if len(lows) == len(highs) == len(points):
        cut = ",\nextends beyond the picture" if reach.is_cut else ""
        label = f"wall time, {interval_label(estimates)}{cut}"
        inside = [max(low, 0.0) for low in lows], [min(high, reach.high) for high in highs]
        if is_line:
            axes.fill_between(x, *inside, color=BLUE, alpha=0.15, linewidth=0, label=label)
        else:
            axes.vlines(x, *inside, color=BLUE, alpha=0.25, linewidth=8, label=label)
    axes.plot(
        x,
        [estimate.ratio for estimate in estimates],
        linestyle="-" if is_line else "none",
        marker="o",
        color=BLUE,
        label="wall time, estimate over blocks",
    )
    blocks = [(at, ratio) for at, point in zip(x, points, strict=True) for _, ratio in point.blocks]
    axes.scatter(
        [at for at, _ in blocks],
        [ratio for _, ratio in blocks],
        s=22,
        facecolors="none",
        edgecolors=BLUE,
        linewidths=0.9,
        label="wall time, one block",
        zorder=3,
    )


def _draw_flops(axes: Axes, line: SweepLine, x: Sequence[float], *, is_line: bool) -> float:
    """The lines of FLOPs that every cell has; the highest ratio among them."""
    highest = 1.0
    for quantity, label, color, dashes, marker in _FLOPS:
        points = line.points(quantity)
        if len(points) == len(line.rows):
            ratios = [point.estimate.ratio for point in points]
            axes.plot(
                x,
                ratios,
                linestyle=dashes if is_line else "none",
                marker=marker,
                color=color,
                label=label,
                markersize=5,
            )
            highest = max(highest, *ratios)
    return highest


_FLOPS_PARTS: Final = (
    ("base: projections", BLUE),
    ("base: attention", SKY),
    ("base: vocabulary head", PURPLE),
    ("value model: prefill", YELLOW),
    ("value model: extend prefixes", ORANGE),
    ("value model: score candidates", VERMILION),
    ("draft model", GREEN),
)


def draw_sections(analysis: AnalyzedExperiment) -> tuple[Plot, ...]:
    """``per_step_breakdown.png``: the time of a step by its sections."""
    name = "per_step_breakdown.png"
    if analysis.passes is not None:
        return (Plot(name=name, skipped=NO_SECTIONS),)
    bars = section_bars(_cells(analysis))
    if bars is None:
        return (Plot(name=name, skipped=NO_STEPS),)
    title = bars.title if bars.covers_steps else f"{bars.title} (not of whole steps)"
    x_label = f"{bars.axis} (sum / all steps; {bars.clock})"
    return (Plot(name=name, png=stacked_bars(title, x_label, bars.labels, _parts(bars.parts))),)


def draw_guidance(analysis: AnalyzedExperiment) -> tuple[Plot, ...]:
    """``lvm_apply_breakdown.png``: the sections of applying guidance."""
    name = "lvm_apply_breakdown.png"
    cells, parts, clock = guidance_parts(_cells(analysis))
    if not cells:
        return (Plot(name=name, skipped="no finished run has steps in which guidance was applied"),)
    x_label = f"time per step, ms (sum / all steps; {clock})"
    labels = [cell.label for cell in cells]
    return (
        Plot(name=name, png=stacked_bars("Time of applying guidance by section", x_label, labels, _parts(parts))),
    )


def draw_flops(analysis: AnalyzedExperiment) -> tuple[Plot, ...]:
    """``flops_breakdown.png``: FLOPs as the published rule charges them, and as the step log shows them."""
    name = "flops_breakdown.png"
    bars: list[tuple[str, str, tuple[float, ...]]] = []
    for cell in _cells(analysis):
        flops = [run.flops for run in cell.runs if run.flops is not None]
        published = [account.published for account in flops if account.published is not None]
        observed = [account.observed for account in flops if account.observed is not None]
        for kind, accounts in (("published", published), ("observed", observed)):
            if accounts and len(accounts) == len(cell.runs):
                bars.append((cell.label, f"{cell.label}, {kind}", _mean_parts(accounts)))
    if not bars:
        reason = "FLOPs are unknown: no finished run with known model shapes and token counts"
        return (Plot(name=name, skipped=reason),)
    largest = max(sum(values) for _, _, values in bars)
    unit, unit_name = (PETA, "PFLOPs") if largest >= PETA / 2 else (TERA, "TFLOPs")
    parts = [
        Part(label=label, color=color, values=[values[i] / unit for _, _, values in bars])
        for i, (label, color) in enumerate(_FLOPS_PARTS)
    ]
    png = stacked_bars(
        "FLOPs of a run: charged by the published rule, and observed in the step log",
        f"{unit_name} per run (model FLOPs, not a measurement)",
        [label for _, label, _ in bars],
        [part for part in parts if any(part.values)],
        group=[cell for cell, _, _ in bars],
    )
    return (Plot(name=name, png=png),)


def _cells(analysis: AnalyzedExperiment) -> list[CellSummary]:
    return [cell for cell in analysis.cells if cell.runs]


def _parts(parts: Sequence[SectionPart]) -> list[Part]:
    return [
        Part(label=part.name, color=part.color, values=part.values_ms, hatch=part.pattern and 4 * part.pattern)
        for part in parts
    ]


def _mean_parts(accounts: Sequence[FlopsAccount]) -> tuple[float, ...]:
    parts = [
        (
            account.base.linear,
            account.base.attention,
            account.base.head,
            account.value_prefill.total,
            account.value_extend.total,
            account.value_candidates.total,
            account.draft.total,
        )
        for account in accounts
    ]
    return tuple(sum(column) / len(accounts) for column in zip(*parts, strict=True))


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


_SATURATION_MARKERS: Final = ("o", "s", "D", "^", "v", "P", "X")
_WIDE_RANGE: Final = 8.0
"""A quotient of the largest and the smallest value from which an axis is logarithmic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaturationLine:
    """One arm: its loads, ascending, and the metrics of each; ``largest`` is the largest load that keeps limits."""

    label: str
    sizes: Sequence[float]
    metrics: Sequence[Mapping[str, float | None]]
    largest: float | None = None


def draw_saturation(
    title: str, x_label: str, lines: Sequence[SaturationLine], names: Sequence[str], limits: Mapping[str, float]
) -> bytes:
    """One panel for each metric of ``names``; ``limits`` are drawn as dashed lines."""
    figure = new_figure(1.2 + 2.6 * len(names), title)
    panels = figure.subplots(len(names), 1, sharex=True, squeeze=False)[:, 0]
    for axes, name in zip(panels, names, strict=True):
        values: list[float] = []
        for number, line in enumerate(lines):
            pairs = [(size, each[name]) for size, each in zip(line.sizes, line.metrics, strict=True)]
            points = [(size, value) for size, value in pairs if value is not None]
            style = {
                "color": SERIES[number % len(SERIES)],
                "marker": _SATURATION_MARKERS[number % len(_SATURATION_MARKERS)],
            }
            axes.plot(
                [size for size, _ in points], [value for _, value in points], label=wrapped(line.label), **style
            )
            values += [value for _, value in points]
            if line.largest is not None:
                axes.axvline(line.largest, color=style["color"], linewidth=0.8, linestyle=":")
        if name in limits:
            axes.axhline(limits[name], color=SLATE, linestyle="--", linewidth=1.0, label=f"limit {limits[name]:g}")
        axes.set_ylabel(f"{name}, {METRICS[name].unit}")
        if _is_wide(values):
            axes.set_yscale("log")
            _plain_numbers(axes.yaxis)
        else:
            axes.set_ylim(bottom=0)
        tidy(axes, grid="both")
    sizes = [size for line in lines for size in line.sizes]
    if _is_wide(sizes):
        panels[-1].set_xscale("log")
        _plain_numbers(panels[-1].xaxis)
    panels[-1].set_xlabel(plain(x_label))
    legend_beside(panels[0])
    return png_bytes(figure)


def _plain_numbers(axis: Axis) -> None:
    """Label a logarithmic axis at 1, 2 and 5 of each decade."""
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def _is_wide(values: Sequence[float]) -> bool:
    return bool(values) and min(values) > 0 and max(values) >= _WIDE_RANGE * min(values)


_NAME: Final = "step_time_over_time.png"
_DASHES: Final = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}


def draw_step_time(analysis: AnalyzedExperiment) -> tuple[Plot, ...]:
    """Every arm of the block in which most arms have a step log."""
    times = step_times(analysis)
    if times is None:
        return (Plot(name=_NAME, skipped=analysis.missing_step_times_reason),)
    figure = new_figure(6.0, f"{TITLE}, block {times.block}")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for arm, course in times.courses:
        style = {"color": arm.color, "linestyle": _DASHES[arm.dash], "linewidth": 1.4}
        if times.has_bands:
            upper.fill_between(
                course.time_s, course.low_ms, course.high_ms, color=arm.color, alpha=0.2, linewidth=0
            )
        upper.plot(course.time_s, course.median_ms, label=wrapped(arm.label), **style)
        lower.plot(course.time_s, course.num_seqs, **style)
    band = ",\nband: 5-95 % of its steps" if times.has_bands else ""
    upper.set_ylabel(f"median step time, ms{band}")
    lower.set_ylabel("batch size, sequences")
    lower.set_xlabel(plain(f"{times.time_axis} ({times.clock})"))
    for axes in (upper, lower):
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
        tidy(axes, grid="both")
    legend_beside(upper)
    return (Plot(name=_NAME, png=png_bytes(figure)),)


PLOTS: Final[tuple[Callable[[AnalyzedExperiment], tuple[Plot, ...]], ...]] = (
    draw_sections,
    draw_guidance,
    draw_flops,
    draw_sweep,
    draw_step_time,
)


def draw_plots(analysis: AnalyzedExperiment) -> tuple[Plot, ...]:
    """Every picture of a result directory, drawn or skipped with its reason."""
    return tuple(plot for draw in PLOTS for plot in draw(analysis))
