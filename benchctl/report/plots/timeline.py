"""Step time and batch size over the course of a run: is there a steady state, or only a ramp and a tail?"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from benchctl.analysis.analyzed import AnalyzedExperiment
from benchctl.analysis.summary.runs import RunSummary, arm_order
from benchctl.report.plots.style import DASHES, SERIES, Plot, legend_beside, new_figure, png_bytes, tidy
from benchctl.units import ms_from_ns, s_from_ns

_NAME: Final = "step_time_over_time.png"
_MAX_BINS: Final = 40
_MIN_STEPS_PER_BIN: Final = 4
"""A run is shown as means over stretches of equal duration, so that long logs stay readable."""
_MAX_RUNS: Final = len(SERIES) * len(DASHES)


def draw_timeline(analysis: AnalyzedExperiment) -> Plot:
    """Every arm of the first block that has the most finished runs with a step log."""
    runs = [run for run in analysis.runs if run.is_usable and run.values["n_steps"] and run.values["step_ms"]]
    if not runs:
        return Plot(name=_NAME, skipped=analysis.why_no_step_times)
    blocks = [run.record.block for run in runs]
    block = max(sorted(set(blocks)), key=blocks.count)
    baseline = analysis.results.manifest.baseline
    shown = sorted((run for run in runs if run.record.block == block), key=lambda r: arm_order(r.record, baseline))
    figure = new_figure(6.0, f"Course of the runs of block {block}, means over up to {_MAX_BINS} stretches")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for i, run in enumerate(shown[:_MAX_RUNS]):
        times_s, step_ms, batch = _course(run)
        dashes = DASHES[i // len(SERIES)]
        upper.plot(times_s, step_ms, dashes, color=SERIES[i % len(SERIES)], linewidth=1.4, label=run.label)
        lower.plot(times_s, batch, dashes, color=SERIES[i % len(SERIES)], linewidth=1.4)
    upper.set_ylabel("mean step time, ms")
    lower.set_ylabel("mean sequences in a step")
    lower.set_xlabel(f"time since the first step, s ({', '.join(sorted({r.record.clock for r in shown}))} clock)")
    for axes in (upper, lower):
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
        tidy(axes, grid="both")
    legend_beside(upper)
    return Plot(name=_NAME, png=png_bytes(figure))


def _course(run: RunSummary) -> tuple[Sequence[float], Sequence[float], Sequence[float]]:
    """Mean step time and batch size in stretches of equal duration; stretches without a step are left out."""
    steps = run.run.columns
    starts = (steps.start_ns - steps.start_ns.min()).astype(float)
    duration_ns = (starts + steps.dur_ns).max()
    num_bins = max(1, min(_MAX_BINS, len(steps) // _MIN_STEPS_PER_BIN))
    bins = np.minimum((starts / duration_ns * num_bins).astype(int), num_bins - 1)
    count = np.bincount(bins, minlength=num_bins)
    inside = count > 0
    means = [
        (np.bincount(bins, weights=values, minlength=num_bins)[inside] / count[inside]).tolist()
        for values in (starts, steps.dur_ns, steps.num_seqs)
    ]
    return [s_from_ns(t) for t in means[0]], [ms_from_ns(t) for t in means[1]], means[2]
