"""The picture of a step-time model: predicted against measured, and errors by batch, context, phase and model."""

from collections.abc import Sequence
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, PercentFormatter

from benchctl.report.charts.palette import GREY, SLATE, series_color
from benchctl.report.plots.style import new_figure, plain, png_bytes, tidy, wrapped
from benchctl.steptime.diagnosis.buckets import Words, phases_of
from benchctl.steptime.diagnosis.predictions import Predictions
from benchctl.steptime.fitting.least_squares import Floats

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
