"""The sweep: cells as lines over a swept factor, with the ratio to the baseline, its interval and its blocks."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from benchctl.analysis.analyzed import AnalyzedExperiment
from benchctl.analysis.statistics.block_ratio import RatioEstimate
from benchctl.analysis.summary.sweep import SweepRow
from benchctl.formats import range_of
from benchctl.records.directory import arm_label, cell_name
from benchctl.report.charts.palette import series_color, series_dash

NO_SWEEP: Final = "no variant has finished runs beside the baseline in two or more cells of a sweep"
_REACH: Final = 1.0
"""An interval over few blocks can extend far; beyond the points it is cut at this multiple of their span."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint:
    """One cell of a line: the ratio over the blocks, and the ratio of each block by its number."""

    x: float | str
    estimate: RatioEstimate
    blocks: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepLine:
    """The cells of one variant that differ in the factor alone, in its order."""

    label: str
    color: str
    dash: str
    rows: tuple[SweepRow, ...]
    x: tuple[float | str, ...]
    """Values of the factor, or names of the cells with a line for each of several factors."""

    @property
    def is_ordered(self) -> bool:
        """The cells have an order that a line can follow."""
        return isinstance(self.x[0], float)

    def points(self, quantity: str) -> tuple[SweepPoint, ...]:
        """The cells in which ``quantity`` has an estimate."""
        return tuple(
            SweepPoint(
                x=x, estimate=row.estimates[quantity], blocks=tuple(row.ratios[quantity].block_ratios.items())
            )
            for x, row in zip(self.x, self.rows, strict=True)
            if quantity in row.estimates
        )


@dataclass(frozen=True, slots=True)
class Reach:
    """The ends of the y axis, and whether an interval extends beyond them."""

    low: float
    high: float
    is_cut: bool


def swept_rows(analysis: AnalyzedExperiment, quantities: Iterable[str]) -> list[SweepRow]:
    """The compared cells of sweeps that have an estimate of at least one of the quantities."""
    names = set(quantities)
    return [row for row in analysis.sweep if row.cell and names & set(row.estimates)]


def swept_factor(rows: Sequence[SweepRow]) -> str | None:
    """The numeric factor with the most values, the first of equals; None where none has two."""
    values = {name: {row.cell.get(name) for row in rows} for row in rows for name in row.cell}
    types = {name: {type(value) for value in cells} for name, cells in values.items() if len(cells) > 1}
    numeric = [name for name in types if types[name] <= {int, float}]
    return max(numeric, key=lambda name: len(values[name]), default=None)


def sweep_lines(rows: Sequence[SweepRow], factor: str | None) -> tuple[SweepLine, ...]:
    """A line for each variant and each combination of the other factors; without a factor, one for each variant."""
    groups: dict[str, list[SweepRow]] = {}
    for row in rows:
        others = {name: value for name, value in row.cell.items() if factor is not None and name != factor}
        groups.setdefault(arm_label(row.variant, others), []).append(row)
    lines = []
    for i, (label, group) in enumerate(groups.items(), start=1):
        ordered = group if factor is None else sorted(group, key=lambda row: factor_value(row, factor))
        x = [_cell_lines(row) if factor is None else factor_value(row, factor) for row in ordered]
        lines.append(
            SweepLine(label=label, color=series_color(i), dash=series_dash(i), rows=tuple(ordered), x=tuple(x))
        )
    return tuple(lines)


def factor_value(row: SweepRow, factor: str) -> float:
    """The value of a numeric factor. Raises TypeError for one that is not a number."""
    value = row.cell[factor]
    if not isinstance(value, int | float):
        raise TypeError(f"{factor} = {value!r} is not a number")
    return float(value)


def reach_of(points: Sequence[SweepPoint]) -> Reach:
    """All ratios, the baseline's 1, and as much of the intervals as leaves the points readable."""
    ratios = [1.0, *(ratio for point in points for _, ratio in point.blocks)]
    lowest, highest = min(ratios), max(ratios)
    span = max(highest - lowest, 0.02)
    lows = [point.estimate.ci_low for point in points if point.estimate.ci_low is not None]
    highs = [point.estimate.ci_high for point in points if point.estimate.ci_high is not None]
    low = max(min([lowest, *lows]), lowest - _REACH * span)
    high = min(max([highest, *highs]), highest + _REACH * span)
    is_cut = low > min([low, *lows]) or high < max([high, *highs])
    return Reach(round(low - 0.06 * span, 4), round(high + 0.06 * span, 4), is_cut)


def interval_label(estimates: Sequence[RatioEstimate]) -> str:
    """Confidence and blocks of the intervals: ``95% interval over 2 to 3 blocks``."""
    blocks = range_of([estimate.num_blocks for estimate in estimates])
    return f"{estimates[0].confidence:.0%} interval over {blocks} blocks"


def _cell_lines(row: SweepRow) -> str:
    """The cell as the label of a tick: the bare value where there is only one factor."""
    values = [str(value) for value in row.cell.values()]
    return values[0] if len(values) == 1 else cell_name(row.cell).replace(", ", "\n")
