"""The picture of speculation: tokens and speed-up by draft length; with step times, gain by batch and latency."""

import textwrap
from collections.abc import Sequence
from typing import Final

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from benchctl.analysis.summary.speculation import MeasuredSpeculation, SpeculativeArm
from benchctl.report.charts.palette import BLUE, GREY, SLATE, VERMILION, series_color
from benchctl.report.plots.style import new_figure, png_bytes, tidy
from benchctl.steptime.speculation.draft_length import SpeculationLaw
from benchctl.steptime.speculation.estimate import Estimate
from benchctl.steptime.speculation.served import ServedSpeculation
from benchctl.units import MS_PER_S

_MOST_LINES: Final = 5
"""Draft lengths in a panel that has a line for each."""
_PANEL_IN: Final = 4.1
_TITLE_CHARACTERS: Final = 100


def draw_speculation(
    title: str,
    law: SpeculationLaw,
    served: ServedSpeculation | None = None,
    measured: MeasuredSpeculation | None = None,
) -> bytes:
    """PNG bytes: two panels of the law, with the arms of a result directory as points.

    With a server's step times, two panels of its load are below.
    """
    figure = new_figure(_PANEL_IN * (1 if served is None else 2), textwrap.fill(title, _TITLE_CHARACTERS))
    panels = figure.subplots(1 if served is None else 2, 2, squeeze=False)
    _draw_tokens(panels[0, 0], law)
    _draw_speed_ups(panels[0, 1], law)
    if measured is not None:
        _draw_points(panels[0, 0], [(arm, arm.measured_tokens) for arm in measured.arms])
        if served is None:  # otherwise the law has the costs of another server
            _draw_points(panels[0, 1], [(arm, arm.measured_speed_up) for arm in measured.arms])
    for axes in panels[0]:
        _finish(axes)
    if served is not None:
        _draw_gain_by_batch(panels[1, 0], served)
        _draw_latency(panels[1, 1], served)
    return png_bytes(figure)


def _draw_tokens(axes: Axes, law: SpeculationLaw) -> None:
    numbers = [length.num_draft_tokens for length in law.lengths]
    _line(axes, numbers, [length.tokens for length in law.lengths], BLUE, "with bonus token")
    _line(axes, numbers, [length.tokens_without_bonus for length in law.lengths], VERMILION, "without")
    axes.set_ylabel("tokens per step and sequence")


def _draw_speed_ups(axes: Axes, law: SpeculationLaw) -> None:
    numbers = [length.num_draft_tokens for length in law.lengths]
    _line(axes, numbers, [length.speed_up for length in law.lengths], BLUE, "with bonus token")
    _line(axes, numbers, [length.speed_up_without_bonus for length in law.lengths], VERMILION, "without")
    axes.axhline(1.0, color=SLATE, linewidth=1.0, linestyle="--", label="without speculation")
    if law.best.value in numbers:
        axes.plot([law.best.value], [law.best_speed_up.value], "*", color="black", markersize=12, label="best")
    axes.set_ylabel("speed-up while memory bounds the step")


def _draw_points(axes: Axes, points: Sequence[tuple[SpeculativeArm, Estimate | None]]) -> None:
    """Measured arms with their intervals over blocks."""
    for bonus, color, label in ((True, BLUE, "measured with"), (False, VERMILION, "measured without")):
        known_points = [
            (arm.num_draft_tokens, each) for arm, each in points if each is not None and arm.bonus == bonus
        ]
        if not known_points:
            continue
        values = [each.value for _, each in known_points]
        lows = [each.value if each.low is None else each.low for _, each in known_points]
        highs = [each.value if each.high is None else each.high for _, each in known_points]
        reach = (
            [value - low for value, low in zip(values, lows, strict=True)],
            [high - value for value, high in zip(values, highs, strict=True)],
        )
        numbers = [num for num, _ in known_points]
        axes.errorbar(numbers, values, reach, fmt="D", color=color, mfc="white", ms=7, capsize=4, label=label)


def _line(axes: Axes, numbers: Sequence[int], estimates: Sequence[Estimate], color: str, label: str) -> None:
    """A line with its band, where the values have intervals."""
    axes.plot(numbers, [each.value for each in estimates], marker="o", color=color, label=label)
    bounds = [(each.low, each.high) for each in estimates if each.low is not None and each.high is not None]
    if len(bounds) == len(numbers):
        axes.fill_between(
            numbers, [low for low, _ in bounds], [high for _, high in bounds], color=color, alpha=0.2, linewidth=0
        )


def _finish(axes: Axes) -> None:
    axes.set_ylim(bottom=0)
    axes.set_xlabel("draft tokens K")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(framealpha=0.85, edgecolor="none", fontsize=9)
    tidy(axes, grid="y")


def _chosen(served: ServedSpeculation) -> list[int]:
    """Indices of at most ``_MOST_LINES`` draft lengths, spread evenly, without the 0 at the front."""
    number = len(served.batches[0].points) - 1
    step = max(1, -(-number // _MOST_LINES))
    return sorted({*range(1, number + 1, step), number})[: _MOST_LINES + 1]


def _draw_gain_by_batch(axes: Axes, served: ServedSpeculation) -> None:
    rows = [batch.rows for batch in served.batches]
    for color, index in enumerate(_chosen(served)):
        points = [batch.points[index] for batch in served.batches]
        gains = [point.speed_up.value for point in points]
        axes.plot(rows, gains, marker=".", color=series_color(color), label=f"K = {points[0].num_draft_tokens}")
    axes.plot(rows, [batch.best.speed_up.value for batch in served.batches], color="black", linewidth=4, alpha=0.2)
    axes.axhline(1.0, color=SLATE, linewidth=1.0, linestyle="--")
    if 0 < served.largest_paying < max(rows):
        axes.axvline(served.largest_paying, color=GREY, linewidth=1.0, linestyle=":")
        axes.annotate(
            f"pays up to {served.largest_paying}",
            (served.largest_paying, axes.get_ylim()[1]),
            xytext=(-4, -2),
            textcoords="offset points",
            ha="right",
            va="top",
            rotation=90,
            fontsize=8,
            color=SLATE,
        )
    axes.set_xscale("log")
    _plain_numbers(axes)
    axes.set_xlabel("sequences in the batch")
    axes.set_ylabel("goodput over that without speculation")
    axes.set_ylim(bottom=0)
    axes.legend(framealpha=0.85, edgecolor="none", fontsize=9)
    tidy(axes, grid="both")


def _draw_latency(axes: Axes, served: ServedSpeculation) -> None:
    """Time per token over throughput: each line goes from the smallest batch at its left to the largest."""
    for color, index in enumerate([0, *_chosen(served)]):
        points = [batch.points[index] for batch in served.batches]
        num = points[0].num_draft_tokens
        axes.plot(
            [point.goodput_per_s.value for point in points],
            [point.tpot_s.value * MS_PER_S for point in points],
            marker=".",
            color=series_color(color - 1) if num else "black",
            linestyle="-" if num else "--",
            label=f"K = {num}" if num else "without speculation",
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    _plain_numbers(axes)
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("output tokens per second")
    axes.set_ylabel("time per output token, ms")
    axes.legend(framealpha=0.85, edgecolor="none", fontsize=9)
    tidy(axes, grid="both")


def _plain_numbers(axes: Axes) -> None:
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.tick_params(axis="x", labelsize=8)
