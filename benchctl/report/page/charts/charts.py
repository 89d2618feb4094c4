"""Every chart of the report page, in the order in which a reader asks."""

from collections.abc import Mapping, Sequence

from benchctl.analysis.analyzed import AnalyzedExperiment
from benchctl.analysis.compare.result import CellComparison
from benchctl.records.noise import MetricNoise
from benchctl.report.page.charts.batch_size import draw_batch_size
from benchctl.report.page.charts.blocks import draw_block_values
from benchctl.report.page.charts.chart import Chart
from benchctl.report.page.charts.devices import draw_gpu, draw_host
from benchctl.report.page.charts.requests import draw_requests
from benchctl.report.page.charts.sections import draw_sections
from benchctl.report.page.charts.step_time import draw_step_time
from benchctl.report.page.charts.sweep import draw_sweep


def draw_charts(
    analysis: AnalyzedExperiment,
    *,
    cells: Sequence[CellComparison] = (),
    noise: Mapping[str, MetricNoise] | None = None,
) -> tuple[Chart, ...]:
    """Is it real (block values), how does it grow (sweep), where does it sit (the others).

    ``cells`` are the comparisons of the directory's variants with its baseline, ``noise`` is that of an A/A
    experiment; without them outliers are not marked, and the baseline's own scatter stands in for the noise.
    """
    return (
        draw_block_values(analysis, cells),
        draw_sweep(analysis, noise or {}),
        draw_sections(analysis),
        draw_step_time(analysis),
        draw_batch_size(analysis),
        draw_requests(analysis),
        draw_gpu(analysis),
        draw_host(analysis),
    )
