"""Measured and predicted course of a run, one above the other."""

import numpy as np

from benchctl.report.charts.figure import BLUE, VERMILION
from benchctl.report.plots.plots import legend_beside, new_figure, png_bytes, tidy

SIDES = (("measured", BLUE, "o"), ("predicted", VERMILION, "."))


def draw_curve(running, memory, curve, label, color):
    running.step(curve.t_s, curve.running, where="post", label=label, color=color, linewidth=1.2)
    memory.step(curve.t_s, 100 * curve.kv_frac, where="post", label=label, color=color, linewidth=1.2)


def draw(name, measured, predicted):
    """PNG of running requests, key-value memory, TTFT and E2EL; each side is its times and its curve."""
    figure = new_figure(10.5, f"{name}: a real run and its prediction from measured layers")
    running, memory, waits, ends = figure.subplots(4, 1)
    for (label, color, dot), (times, curve) in zip(SIDES, (measured, predicted), strict=True):
        if curve is not None:
            draw_curve(running, memory, curve, label, color)
        waits.plot(times.queued_s, times.ttft_ms() / 1e3, dot, label=label, color=color, markersize=4, mfc="none")
        e2el_s = np.sort(times.e2el_ms()) / 1e3
        ends.step(e2el_s, np.arange(1, len(e2el_s) + 1) / len(e2el_s), where="post", label=label, color=color)
    for axes, x_label, y_label in (
        (running, "time, s", "running requests"),
        (memory, "time, s", "key-value memory, %"),
        (waits, "time of queueing, s", "TTFT, s"),
        (ends, "E2EL, s", "share of requests"),
    ):
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.set_ylim(bottom=0)
        tidy(axes, grid="both")
        legend_beside(axes)
    return png_bytes(figure)
