"""The table of all pictures of a report; each is drawn, or skipped with a reason a person can act on.

A new picture is a file with a ``draw`` function and a line here.
"""

from collections.abc import Callable
from typing import Final

from benchctl.analysis.analyzed import AnalyzedExperiment
from benchctl.report.plots.bars import draw_flops, draw_guidance, draw_sections
from benchctl.report.plots.step_time import draw_step_time
from benchctl.report.plots.style import Plot
from benchctl.report.plots.sweep import draw_sweep

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
