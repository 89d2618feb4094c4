"""All charts of a result directory: those of the page in the order of a reader's questions, and those of files."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from benchctl.analysis.compare.result import CellComparison
from benchctl.analysis.summary.analyzed import AnalyzedExperiment
from benchctl.records.noise import MetricNoise
from benchctl.report.charts.arms import draw_acceptance, draw_block_values
from benchctl.report.charts.figure import Chart, ChartSource
from benchctl.report.charts.machine import draw_gpu, draw_host
from benchctl.report.charts.requests import draw_latencies, draw_requests
from benchctl.report.charts.sections import NO_SECTIONS, draw_flops, draw_guidance, draw_sections
from benchctl.report.charts.steps import draw_batch_size, draw_step_time
from benchctl.report.charts.sweep import WITH_FLOPS, draw_sweep, varied_factors

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
    """Every chart of the page, drawn or with the reason why not; see ``ChartSource``.

    A chart of something that no run did, such as drafting tokens, is left out.
    """
    source = ChartSource(analysis=analysis, cells=cells, noise=noise or {})
    return tuple(chart for draw in CHARTS if (chart := draw(source)) is not None)


def draw_pictures(analysis: AnalyzedExperiment) -> dict[str, Chart]:
    """The charts that a report writes as files, by the name of the file."""
    source = ChartSource(analysis=analysis)
    no_sections = Chart(id="sections", title="Time per step by section", skipped=NO_SECTIONS)
    return {
        "per_step_breakdown.png": draw_sections(source) or no_sections,
        "lvm_apply_breakdown.png": draw_guidance(source),
        "flops_breakdown.png": draw_flops(source),
        sweep_name(varied_factors([row for row in analysis.sweep if row.cell])): draw_sweep(source, WITH_FLOPS),
        "step_time_over_time.png": draw_step_time(source),
    }


def sweep_name(varied: Sequence[str]) -> str:
    """The name of a picture of the factors that vary, as one part of a path."""
    stem = "topk" if varied in ([], ["top_k"]) else "_".join(varied)
    return re.sub(r"[^\w=-]", "_", f"{stem}_sweep") + ".png"
