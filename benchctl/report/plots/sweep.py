"""The sweep as PNG: ratios to the baseline of time, FLOPs, and the rate at which FLOPs are achieved."""

import itertools
import re
from collections.abc import Sequence
from typing import Final

from matplotlib.axes import Axes

from benchctl.analysis.analyzed import AnalyzedExperiment
from benchctl.analysis.summary.sweep import SweepRow
from benchctl.report.charts.palette import BLUE, GREEN, ORANGE, PURPLE, SLATE
from benchctl.report.charts.sweep import (
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
from benchctl.report.plots.style import Plot, legend_beside, new_figure, plain, png_bytes, tidy, wrapped

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
