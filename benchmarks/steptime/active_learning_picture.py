"""Errors of coefficients and of predictions by the GPU time spent, for runs chosen by diagnosis and at random."""

import numpy as np

from benchctl.report.charts.figure import BLUE, VERMILION
from benchctl.report.plots.plots import legend_beside, new_figure, png_bytes, tidy


def draw(ways, goal):
    """PNG: for both ways the median over repetitions, and a band of 10% to 90%."""
    figure = new_figure(6.5, "Runs that a diagnosis asks for, beside random runs of the same cost")
    panels = figure.subplots(2, 1, sharex=True)
    num_rounds = min(len(states) for states, _ in ways)
    for axes, error, label in (
        (panels[0], lambda state: 100 * state.worst, "largest error of\na coefficient, %"),
        (panels[1], lambda state: 100 * state.mape, "mean error of\npredictions, %"),
    ):
        for side, (name, color, mark) in enumerate((("diagnose", BLUE, "o-"), ("random", VERMILION, "s--"))):
            cost_s = np.median([[state.cost_s for state in way[side][:num_rounds]] for way in ways], axis=0)
            errors = np.array([[error(state) for state in way[side][:num_rounds]] for way in ways])
            low, middle, high = np.percentile(errors, (10, 50, 90), axis=0)
            axes.plot(cost_s, middle, mark, color=color, label=name)
            axes.fill_between(cost_s, low, high, color=color, alpha=0.15, linewidth=0)
        axes.set_yscale("log")
        axes.set_ylabel(label)
        tidy(axes, grid="both")
        legend_beside(axes)
    panels[0].axhline(100 * goal, color="0.4", linewidth=0.8, linestyle=":")
    panels[1].set_xlabel("GPU seconds")
    return png_bytes(figure)
