"""The forest plot: the ratio of every deciding metric in every cell with its interval, against the margin."""

from dataclasses import dataclass
from typing import Final

from benchctl.analysis.compare.metric_comparison import MetricComparison
from benchctl.analysis.compare.result import Comparison
from benchctl.analysis.compare.text import change_text, has_two_margins
from benchctl.analysis.metrics.table import Metric
from benchctl.report.charts.scale import LogScale, scale_of

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
