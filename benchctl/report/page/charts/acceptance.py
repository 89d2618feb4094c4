"""Acceptance of draft tokens by position, in two panels of a Plotly figure: survival and conditional acceptance.

The forest plot: the ratio of every deciding metric in every cell with its interval, against the margin.
The table of all charts of the report page, in the order in which a reader asks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from benchctl.analysis.compare.metric import MetricComparison
from benchctl.analysis.compare.result import CellComparison, Comparison
from benchctl.analysis.compare.words import change_text, has_two_margins
from benchctl.analysis.metrics.speculation import ArmDrafts
from benchctl.analysis.metrics.table import Metric
from benchctl.analysis.statistics.intervals import Interval
from benchctl.analysis.summary.analyzed import AnalyzedExperiment
from benchctl.records.stores.peaks_store import MetricNoise
from benchctl.report.charts import figure
from benchctl.report.charts.figure import ArmStyle, Chart, ChartSource, LogScale, arm_styles, scale_of
from benchctl.report.charts.ratios import draw_block_values, draw_sweep
from benchctl.report.charts.requests import draw_gpu, draw_host, draw_requests
from benchctl.report.charts.steps import draw_batch_size, draw_step_time
from benchctl.report.page.charts.latencies import draw_latencies
from benchctl.report.page.charts.sections import draw_sections

_ID: Final = "acceptance"
_TITLE: Final = "Acceptance of draft tokens by position"
_PANEL_PX: Final = 210
_REST_PX: Final = 90
_TITLES: Final = ("Accepted up to this position, share of all drafts", "Accepted where the one before was")
_Point = tuple[int, float | None, Interval | None]


def draw_acceptance(source: figure.ChartSource) -> figure.Chart | None:
    """One line for each arm that drafted tokens, with the interval over its blocks at each position.

    None where no arm drafted any: then the page has nothing to say of it.
    """
    arms = [
        (arm, drafts)
        for arm in arm_styles(source.analysis)
        if (drafts := arm.cell.drafts()) is not None and drafts.positions
    ]
    if not arms:
        return None
    longest = max(len(drafts.positions) for _, drafts in arms)
    y_axis = figure.axis("share", range=[0, 1.05], tickformat=".2~f")
    x_axis = figure.axis("position in the draft", tickmode="linear", dtick=1, range=[0.5, longest + 0.5])
    height = _REST_PX + len(_TITLES) * _PANEL_PX + figure.legend_px(arm.label for arm, _ in arms)
    return figure.drawn(
        _ID,
        _TITLE,
        [trace for arm, drafts in arms for trace in _traces(arm, drafts)],
        figure.layout(
            height,
            **figure.panels(x_axis, [y_axis] * len(_TITLES), gap_frac=0.14),
            annotations=figure.panel_titles(_TITLES),
            margin={"l": 8, "r": 12, "t": 40, "b": 8},
        ),
        caption=(
            "Share of draft tokens that the target model accepted at each position, all usable runs of an arm "
            "together; bars are 95% intervals over its blocks."
        ),
        definition=(
            "Above: drafts accepted up to the position / all drafts. Below: the same / drafts accepted up to the "
            "position before. A draft that is shorter than others counts as rejected at the positions it lacks."
        ),
    )


def _traces(arm: ArmStyle, drafts: ArmDrafts) -> list[figure.Trace]:
    survival = [(at.pooled.position, at.pooled.survival, at.survival_interval) for at in drafts.positions]
    conditional = [(at.pooled.position, at.pooled.conditional, at.conditional_interval) for at in drafts.positions]
    return [_line(arm, survival, 0), _line(arm, conditional, 1)]


def _line(arm: ArmStyle, points: Sequence[_Point], panel: int) -> figure.Trace:
    shares = figure.rounded(share for _, share, _ in points)
    low = figure.rounded(None if interval is None else interval[0] for _, _, interval in points)
    high = figure.rounded(None if interval is None else interval[1] for _, _, interval in points)
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": arm.label,
        "legendgroup": arm.label,
        "showlegend": panel == 0,
        "yaxis": figure.panel_axis(panel),
        "x": [position for position, _, _ in points],
        "y": shares,
        "line": {"color": arm.color, "dash": arm.dash, "width": 2},
        "marker": {"color": arm.color, "size": 7},
        "error_y": figure.error_bars(shares, low, high, arm.color),
        "hovertemplate": "position %{x}: %{y:.4~g}",
    }


_BETTER: Final = {"lower": "lower is better", "higher": "higher is better", "none": "neither is better"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ForestRow:
    """One deciding metric in one cell."""

    label: str
    metric: MetricComparison

    @property
    def change(self) -> str:
        """``+14.3% [+13.1%, +15.4%]``."""
        return change_text(self.metric)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForestGroup:
    """The rows of one metric in the order of the cells, under its name."""

    metric: Metric
    rows: tuple[ForestRow, ...]

    @property
    def direction(self) -> str:
        """``lower is better``."""
        return _BETTER[self.metric.direction]


@dataclass(frozen=True, slots=True, kw_only=True)
class Forest:
    """Rows by metric, the scale that they share, and what the shaded bands are."""

    groups: tuple[ForestGroup, ...]
    scale: LogScale
    bands: str


def forest_of(comparison: Comparison) -> Forest | None:
    """The forest plot of one comparison; None where no deciding metric has a ratio."""
    rows: dict[str, list[ForestRow]] = {}
    for cell in comparison.cells:
        for metric in cell.deciding:
            rows.setdefault(metric.metric.name, []).append(ForestRow(label=cell.label, metric=metric))
    estimated = [row.metric for group in rows.values() for row in group if row.metric.estimate is not None]
    if not estimated:
        return None
    estimates = [metric.estimate for metric in estimated if metric.estimate is not None]
    ends = [end for estimate in estimates if estimate.log_interval is not None for end in estimate.log_interval]
    margin = max(metric.margins.log_bands[0] for metric in estimated)
    return Forest(
        groups=tuple(ForestGroup(metric=group[0].metric.metric, rows=tuple(group)) for group in rows.values()),
        scale=scale_of([estimate.log_ratio for estimate in estimates], ends, (-margin, margin)),
        bands="the margins of equivalence and of a change" if has_two_margins(estimated) else "the margin",
    )


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
