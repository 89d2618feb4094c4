"""The style of every picture: size, axes, legend beside the data, stacked bars, PNG bytes.

The picture of a step-time model: predicted against measured, and errors by batch, context, phase and model.
The picture of speculation: tokens and speed-up by draft length; with step times, gain by batch and latency.
Pictures as PNG files, drawn with matplotlib.
"""

import io
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator, PercentFormatter

from benchctl.analysis.drafts import MeasuredSpeculation, SpeculativeArm
from benchctl.errors import MissingPackageError
from benchctl.formats import short_number
from benchctl.report.charts.figure import BLUE, GREY, ORANGE, PURPLE, SKY, SLATE, VERMILION, YELLOW, series_color
from benchctl.steptime.diagnosis.buckets import Words, phases_of
from benchctl.steptime.diagnosis.predictions import Predictions
from benchctl.steptime.fitting.least_squares import Floats
from benchctl.steptime.speculation.draft_length import SpeculationLaw
from benchctl.steptime.speculation.estimate import Estimate
from benchctl.steptime.speculation.served import ServedSpeculation
from benchctl.units import MS_PER_S
from benchctl.untrusted.text import visible_line

_LIGHT: Final = frozenset({YELLOW, SKY, GREY, ORANGE, PURPLE})

_WIDTH_IN: Final = 10.0
_DPI: Final = 130
_LABEL_CHARACTERS: Final = 36
_MOST_CHARACTERS: Final = 200
"""A longer line would leave the data no room."""
_LEGEND_LINE_IN: Final = 0.22
_AROUND_LEGEND_IN: Final = 2.0
"""Height of title and axis labels."""
_LABEL_MIN_FRAC: Final = 0.07
"""A segment narrower than this share of the axis is too narrow for its own number."""
_VISIBLE_MIN_FRAC: Final = 0.001
"""A colour that is nowhere wider than this share of the axis cannot be seen and has no entry in the legend."""
_GROUP_GAP: Final = 0.45


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A picture as PNG bytes, or the reason why there is none."""

    name: str
    png: bytes | None = None
    skipped: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One colour of stacked bars: a value for each bar, None where it has none."""

    label: str
    color: str
    values: Sequence[float | None]
    hatch: str = ""
    """A pattern of matplotlib such as ``////``."""


def plain(label: str) -> str:
    r"""A label that matplotlib draws as it is: ``$`` begins no formula."""
    text = "\n".join(visible_line(line, _MOST_CHARACTERS) for line in label.split("\n"))
    return text.replace("$", r"\$")


def wrapped(label: str) -> str:
    """A label beside the data, in short lines that are drawn as they are."""
    return plain(textwrap.fill(visible_line(label, _MOST_CHARACTERS), _LABEL_CHARACTERS))


def new_figure(height_in: float, title: str) -> Figure:
    figure = Figure(figsize=(_WIDTH_IN, height_in), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(plain(title), x=0.01, ha="left", fontsize=12, fontweight="bold")
    return figure


def tidy(axes: Axes, *, grid: str) -> None:
    """Only the axes that carry numbers, and a faint grid behind the data."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(axis="both" if grid == "both" else "x" if grid == "x" else "y", color="#E5E5E5", linewidth=0.8)


def legend_beside(axes: Axes) -> None:
    """The legend to the right of the axes, never over the data; none where nothing can be seen.

    The figure grows with a long legend, which would leave the data no room.
    """
    labels = axes.get_legend_handles_labels()[1]
    if labels:
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False)
        figure = axes.get_figure(root=True)
        if figure is not None:
            num_lines = sum(label.count("\n") + 1 for label in labels)
            figure.set_figheight(max(figure.get_figheight(), _AROUND_LEGEND_IN + _LEGEND_LINE_IN * num_lines))


def png_bytes(figure: Figure) -> bytes:
    """The same figure gives the same bytes: no date, no version inside."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def stacked_bars(
    title: str, x_label: str, bar_labels: Sequence[str], parts: Sequence[Part], *, group: Sequence[str] = ()
) -> bytes:
    """Horizontal stacked bars, the first on top, each with its total behind it.

    ``group`` names the group of each bar; a gap sets groups apart.
    """
    labels = [wrapped(label) for label in bar_labels]
    positions = _positions(group or [""] * len(labels))
    bar_in = 0.42 if all("\n" not in label for label in labels) else 0.55
    figure = new_figure(1.6 + bar_in * positions[-1], title)
    axes = figure.add_subplot()
    ends = [0.0] * len(labels)
    totals = [sum(part.values[i] or 0.0 for part in parts) for i in range(len(labels))]
    span = max(totals) or 1.0
    for part in parts:
        _stack(axes, part, positions, ends, span)
    for position, total in zip(positions, totals, strict=True):
        text = short_number(total)
        axes.text(total + 0.008 * span, position, text, ha="left", va="center", fontsize=9, fontweight="bold")
    axes.set_yticks(positions, labels=labels)
    axes.invert_yaxis()
    axes.set_xlim(0, span * 1.09)
    axes.set_xlabel(plain(x_label))
    axes.tick_params(axis="y", length=0)
    tidy(axes, grid="x")
    legend_beside(axes)
    return png_bytes(figure)


def _positions(groups: Sequence[str]) -> list[float]:
    positions, here = [0.0], 0.0
    for before, after in pairwise(groups):
        here += 1.0 if before == after else 1.0 + (_GROUP_GAP if len(set(groups)) > 1 else 0.0)
        positions.append(here)
    return positions


def _stack(axes: Axes, part: Part, positions: Sequence[float], ends: list[float], span: float) -> None:
    """Draw one colour behind what is there, and move ``ends``."""
    widths = [value or 0.0 for value in part.values]
    is_visible = max(widths) >= _VISIBLE_MIN_FRAC * span
    axes.barh(
        positions,
        widths,
        left=ends,
        height=0.68,
        label=wrapped(part.label) if is_visible else None,
        color=part.color,
        hatch=part.hatch or None,
        edgecolor="white",
        linewidth=0.5,
    )
    ink = "black" if part.color in _LIGHT else "white"
    for i, width in enumerate(widths):
        if width >= _LABEL_MIN_FRAC * span and not part.hatch:
            middle, text = ends[i] + width / 2, short_number(width)
            axes.text(middle, positions[i], text, ha="center", va="center", color=ink, fontsize=8)
        ends[i] += width


_MAX_POINTS: Final = 4000
"""Points of a cloud; more make it no clearer and the file large."""
_CLIP: Final = 0.5
"""Errors beyond are drawn at the edge."""


def draw_fit(predictions: Predictions, title: str) -> bytes:
    """PNG bytes: a cloud on the left, residuals on the right; colours are models."""
    labels = _labels(predictions)
    figure = new_figure(8.6, title)
    grid = figure.add_gridspec(3, 2, width_ratios=(1.25, 1.0))
    cloud = figure.add_subplot(grid[:2, 0])
    steps = _thinned(len(predictions.measured_us))
    names = list(dict.fromkeys(labels.tolist()))
    _draw_cloud(cloud, predictions, labels, names, steps)
    _draw_histogram(figure.add_subplot(grid[2, 0]), predictions, labels, names)
    batch, context, phase = _coordinates(predictions)
    residuals = np.clip(predictions.errors, -_CLIP, _CLIP)
    for row, (x, axis) in enumerate(((batch, "rows in the batch"), (context, "mean context of a row, tokens"))):
        _draw_residuals(figure.add_subplot(grid[row, 1]), x[steps], residuals[steps], labels[steps], names, axis)
    _draw_boxes(figure.add_subplot(grid[2, 1]), residuals, labels, phase, names)
    return png_bytes(figure)


def _labels(predictions: Predictions) -> Words:
    names = [f"{run.deployment.shape.name} TP{run.deployment.tensor_parallel}" for run in predictions.runs]
    return np.array(names)[predictions.run_of]


def _thinned(num_steps: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.intp]]":
    """Indices of at most ``_MAX_POINTS`` steps, spread evenly."""
    return np.unique(np.linspace(0, num_steps - 1, min(num_steps, _MAX_POINTS)).astype(np.intp))


def _coordinates(predictions: Predictions) -> tuple[Floats, Floats, Words]:
    runs = predictions.runs
    batch = np.concatenate([np.broadcast_to(run.work.num_seqs, len(run.duration_us)) for run in runs])
    context = np.concatenate([np.broadcast_to(run.work.context, len(run.duration_us)) for run in runs])
    return batch, context / np.maximum(batch, 1.0), np.concatenate([phases_of(run) for run in runs])


def _draw_cloud(
    axes: Axes,
    predictions: Predictions,
    labels: Words,
    names: Sequence[str],
    steps: "np.ndarray[tuple[int, ...], np.dtype[np.intp]]",
) -> None:
    """Predicted against measured in milliseconds, with the line of equality and 10 % to both sides."""
    measured, predicted = predictions.measured_us[steps] / 1e3, predictions.predicted_us[steps] / 1e3
    for index, name in enumerate(names):
        chosen = labels[steps] == name
        axes.scatter(
            measured[chosen],
            predicted[chosen],
            s=7,
            alpha=0.45,
            linewidths=0,
            color=series_color(index),
            label=wrapped(name),
        )
    low, high = np.quantile(np.concatenate([measured, predicted]), (0.001, 0.999))
    ends = np.array([max(low * 0.93, 1e-4), high * 1.05])
    axes.plot(ends, ends, color=SLATE, linewidth=1.0)
    axes.fill_between(ends, ends * 0.9, ends * 1.1, color=GREY, alpha=0.15, linewidth=0, label="± 10%")
    is_wide = ends[1] > 20 * ends[0]
    if is_wide:
        axes.set_xscale("log")
        axes.set_yscale("log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlim(*ends)
    axes.set_ylim(*ends)
    axes.set_xlabel("measured step time, ms")
    axes.set_ylabel("predicted, ms")
    tidy(axes, grid="both")
    legend = axes.legend(loc="upper left", frameon=False, fontsize=9)
    for handle in legend.legend_handles:
        if handle is not None:
            handle.set_alpha(1.0 if handle is not legend.legend_handles[-1] else 0.3)


def _draw_histogram(axes: Axes, predictions: Predictions, labels: Words, names: Sequence[str]) -> None:
    """Errors of all steps, and in the title their mean magnitude, bias and coverage."""
    errors = predictions.errors
    edge = min(_CLIP, max(0.05, float(np.quantile(np.abs(errors), 0.995))))
    bins = np.linspace(-edge, edge, 61)
    parts = [np.clip(errors[labels == name], -edge, edge) for name in names]
    axes.hist(parts, bins=bins.tolist(), stacked=True, color=[series_color(i) for i in range(len(names))])
    axes.axvline(0.0, color=SLATE, linewidth=1.0)
    axes.set_title(
        f"MAPE {np.abs(errors).mean():.1%}, bias {errors.mean():+.1%}, "
        f"{predictions.is_covered.mean():.0%} inside the 90% interval",
        loc="left",
        fontsize=10,
    )
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel("predicted / measured - 1")
    axes.set_ylabel("steps")
    tidy(axes, grid="y")


def _draw_residuals(
    axes: Axes, x: Floats, residuals: Floats, labels: Words, names: Sequence[str], x_label: str
) -> None:
    """Errors over a coordinate, with the median of each model along it."""
    for index, name in enumerate(names):
        chosen = labels == name
        axes.scatter(x[chosen], residuals[chosen], s=5, alpha=0.25, linewidths=0, color=series_color(index))
        centres, medians = _running_median(x[chosen], residuals[chosen])
        axes.plot(centres, medians, color=series_color(index), linewidth=1.6)
    axes.axhline(0.0, color=SLATE, linewidth=1.0)
    positive = x[x > 0]
    if len(positive) and positive.max() > 20 * positive.min():
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    reach = max(0.05, float(np.quantile(np.abs(residuals), 0.99)) * 1.1)
    axes.set_ylim(-reach, reach)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel(plain(x_label))
    axes.set_ylabel("error")
    tidy(axes, grid="y")


def _running_median(x: Floats, y: Floats, num_parts: int = 12) -> tuple[list[float], list[float]]:
    """Medians of ``y`` in parts of ``x`` with equally many points."""
    order = np.argsort(x, kind="stable")
    parts = [part for part in np.array_split(order, min(num_parts, max(1, len(order) // 10))) if len(part)]
    return [float(np.median(x[part])) for part in parts], [float(np.median(y[part])) for part in parts]


def _draw_boxes(axes: Axes, residuals: Floats, labels: Words, phase: Words, names: Sequence[str]) -> None:
    """A box for each phase of each model: quartiles, and whiskers from 5 to 95 %."""
    boxes = [
        (index, word, residuals[(labels == name) & (phase == word)])
        for word in ("prefill", "mixed", "decode")
        for index, name in enumerate(names)
    ]
    boxes = [box for box in boxes if len(box[2])]
    drawn = axes.boxplot(
        [values for _, _, values in boxes],
        orientation="horizontal",
        whis=(5, 95),
        showfliers=False,
        patch_artist=True,
        widths=0.6,
        medianprops={"color": "black"},
    )
    for patch, (index, _, _) in zip(drawn["boxes"], boxes, strict=True):
        patch.set_facecolor(series_color(index))
        patch.set_alpha(0.7)
    axes.set_yticks(
        range(1, len(boxes) + 1),
        labels=[plain(f"{word}, {len(values):,} steps") for _, word, values in boxes],
        fontsize=9,
    )
    axes.axvline(0.0, color=SLATE, linewidth=1.0)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel("error: box 25 to 75%, whiskers 5 to 95%")
    axes.tick_params(axis="y", length=0)
    tidy(axes, grid="x")


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


try:
    import matplotlib as mpl  # noqa: F401 - whether it is there
except ImportError as error:
    raise MissingPackageError(("matplotlib",), "PNG pictures cannot be drawn") from error
