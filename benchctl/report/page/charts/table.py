"""The table of all charts of the report page, in the order in which a reader asks.

A new chart is a file with a ``draw`` function and a line here.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from benchctl.analysis.analyzed import AnalyzedExperiment
from benchctl.analysis.compare.result import CellComparison
from benchctl.records.noise import MetricNoise
from benchctl.report.page.charts.acceptance import draw_acceptance
from benchctl.report.page.charts.batch_size import draw_batch_size
from benchctl.report.page.charts.blocks import draw_block_values
from benchctl.report.page.charts.devices import draw_gpu, draw_host
from benchctl.report.page.charts.figure import Chart, ChartSource
from benchctl.report.page.charts.latencies import draw_latencies
from benchctl.report.page.charts.requests import draw_requests
from benchctl.report.page.charts.sections import draw_sections
from benchctl.report.page.charts.step_time import draw_step_time
from benchctl.report.page.charts.sweep import draw_sweep

CHARTS: Final[tuple[Callable[[ChartSource], Chart | None], ...]] = (
    draw_latencies,
    draw_block_values,
    draw_sweep,
    draw_acceptance,
    draw_sections,
    draw_step_time,
    draw_batch_size,
    draw_requests,
    draw_gpu,
    draw_host,
)


def draw_charts(
    analysis: AnalyzedExperiment,
    *,
    cells: Sequence[CellComparison] = (),
    noise: Mapping[str, MetricNoise] | None = None,
) -> tuple[Chart, ...]:
    """Every chart of a result directory, drawn or with the reason why not; see ``ChartSource``.

    A chart of something that no run did, such as drafting tokens, is left out.
    """
    source = ChartSource(analysis=analysis, cells=cells, noise=noise or {})
    return tuple(chart for draw in CHARTS if (chart := draw(source)) is not None)
