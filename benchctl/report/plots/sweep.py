"""Ratios to the baseline over the swept factor: time, FLOPs, and the rate at which FLOPs are achieved."""

import itertools
from collections.abc import Sequence
from typing import Final

from matplotlib.axes import Axes

from benchctl.analysis.analyzed import AnalyzedExperiment
from benchctl.analysis.statistics.block_ratio import RatioEstimate
from benchctl.analysis.summary.sweep import SweepRow
from benchctl.formats import range_of
from benchctl.records.directory import cell_name
from benchctl.report.plots.style import (
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    Plot,
    legend_beside,
    new_figure,
    png_bytes,
    tidy,
)

_LINES: Final = (
    ("pflops", "FLOPs, published rule", ORANGE, "--", "s"),
    ("pflops_observed", "FLOPs, observed", GREEN, "-.", "D"),
    ("achieved_tflops", "achieved FLOP/s, published rule", PURPLE, ":", "^"),
)
_BAND_LIMIT: Final = 1.6
"""With two blocks an interval can reach far; beyond this multiple of the highest ratio it leaves the picture."""


def draw_sweep(analysis: AnalyzedExperiment) -> tuple[Plot, ...]:
    """``topk_sweep.png``, or ``<factor>_sweep.png``, for each variant that was swept over at least two cells."""
    swept = [row for row in analysis.sweep if row.cell and "wall" in row.estimates]
    groups = [list(group) for _, group in itertools.groupby(swept, key=lambda row: row.variant)]
    groups = [group for group in groups if len(group) > 1]
    if not groups:
        reason = "no variant has finished runs beside the baseline in two or more cells of a sweep"
        return (Plot(name="topk_sweep.png", skipped=reason),)
    return tuple(_draw(group, suffix=f"_{group[0].variant}" if len(groups) > 1 else "") for group in groups)


def _draw(rows: Sequence[SweepRow], *, suffix: str) -> Plot:
    varied = [factor for factor in rows[0].cell if len({row.cell.get(factor) for row in rows}) > 1]
    figure = new_figure(5.0, f"{rows[0].variant} against the baseline of the same block")
    axes = figure.add_subplot()
    positions = _place(axes, rows, varied)
    has_order = len(varied) == 1  # cells of several factors have no order that a line could follow
    axes.axhline(1.0, color="#555555", linewidth=1.0, label="baseline")
    top = _top(rows)
    _draw_wall(axes, rows, positions, has_order=has_order, top=top)
    for quantity, label, color, dashes, marker in _LINES:
        if all(quantity in row.estimates for row in rows):
            ratios = [row.estimates[quantity].ratio for row in rows]
            axes.plot(
                positions,
                ratios,
                linestyle=dashes if has_order else "none",
                marker=marker,
                color=color,
                label=label,
                markersize=5,
            )
    axes.set_ylabel("ratio to the baseline")
    axes.set_ylim(0, top)
    tidy(axes, grid="y")
    legend_beside(axes)
    stem = "topk" if varied == ["top_k"] else "_".join(factor.replace(".", "_") for factor in varied)
    return Plot(name=f"{stem}_sweep{suffix}.png", png=png_bytes(figure))


def _place(axes: Axes, rows: Sequence[SweepRow], varied: Sequence[str]) -> list[float]:
    """Numbers of one factor at their value; anything else side by side, with its name below."""
    values = [row.cell.get(varied[0]) if len(varied) == 1 else None for row in rows]
    numbers = [float(value) for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(numbers) == len(rows):
        axes.set_xlabel(varied[0])
        axes.set_xticks(numbers, labels=[f"{number:g}" for number in numbers])
        return numbers
    positions = [float(i) for i in range(len(rows))]
    axes.set_xlim(-0.5, len(rows) - 0.5)
    if len(varied) == 1:
        axes.set_xlabel(varied[0])
        axes.set_xticks(positions, labels=[str(value) for value in values])
    else:
        labels = [cell_name(row.cell) for row in rows]
        axes.set_xticks(positions, labels=labels, rotation=30, ha="right", rotation_mode="anchor")
    return positions


def _draw_wall(
    axes: Axes, rows: Sequence[SweepRow], positions: Sequence[float], *, has_order: bool, top: float
) -> None:
    estimates = [row.estimates["wall"] for row in rows]
    bounds = [interval for estimate in estimates if (interval := _interval(estimate)) is not None]
    ratios = [estimate.ratio for estimate in estimates]
    if len(bounds) == len(rows):
        label = f"wall time, {interval_label(estimates, top)}"
        lows, highs = [low for low, _ in bounds], [high for _, high in bounds]
        if has_order:
            axes.fill_between(positions, lows, highs, color=BLUE, alpha=0.15, linewidth=0, label=label)
        else:
            axes.vlines(positions, lows, highs, color=BLUE, alpha=0.25, linewidth=8, label=label)
    axes.plot(
        positions,
        ratios,
        linestyle="-" if has_order else "none",
        marker="o",
        color=BLUE,
        label="wall time, geometric mean",
    )
    points = [
        (x, ratio)
        for x, row in zip(positions, rows, strict=True)
        for pair in row.pairs
        if (ratio := pair.ratio("wall")) is not None
    ]
    axes.scatter(
        [x for x, _ in points],
        [ratio for _, ratio in points],
        s=22,
        facecolors="none",
        edgecolors=BLUE,
        linewidths=0.9,
        label="wall time, one block",
        zorder=3,
    )


def interval_label(estimates: Sequence[RatioEstimate], top: float) -> str:
    """What the shown intervals are: their confidence, their blocks, and whether the picture holds all of them."""
    blocks = range_of([estimate.num_blocks for estimate in estimates])
    is_cut = any(estimate.ci_high is not None and estimate.ci_high > top for estimate in estimates)
    label = f"{estimates[0].confidence:.0%} interval over {blocks} blocks"
    return f"{label},\nreaches beyond the top" if is_cut else label


def _interval(estimate: RatioEstimate) -> tuple[float, float] | None:
    low, high = estimate.ci_low, estimate.ci_high
    return None if low is None or high is None else (low, high)


def _top(rows: Sequence[SweepRow]) -> float:
    """The highest point, and as much of the interval as fits."""
    points = [ratio for row in rows for pair in row.pairs if (ratio := pair.ratio("wall")) is not None]
    points += [e.ratio for row in rows for name, e in row.estimates.items() if name in {line[0] for line in _LINES}]
    highest = max(points)
    bounds = [high for row in rows if (high := row.estimates["wall"].ci_high) is not None]
    return 1.06 * max(highest, 1.0, min(max(bounds, default=0.0), _BAND_LIMIT * highest))
