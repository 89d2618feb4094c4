"""Step time and batch size over a run, as PNG."""

from typing import Final

from benchctl.analysis.analyzed import AnalyzedExperiment
from benchctl.report.charts.step_time import TITLE, step_times
from benchctl.report.plots.style import Plot, legend_beside, new_figure, plain, png_bytes, tidy, wrapped

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
