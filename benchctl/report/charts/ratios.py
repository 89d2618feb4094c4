"""The raw values of the deciding metrics, block by block, which show outliers, drift and effects of order.

The sweep: cells as lines over a swept factor, with the ratio to the baseline, its interval and its blocks.
Ratios to the baseline over a swept factor, one panel of a Plotly figure for each quantity.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import geometric_mean, stdev
from typing import Final

from benchctl.analysis.compare.result import CellComparison
from benchctl.analysis.metrics.table import METRICS
from benchctl.analysis.statistics.estimate import RatioEstimate
from benchctl.analysis.summary.analyzed import AnalyzedExperiment, few_requests
from benchctl.analysis.summary.summary import RunSummary, SweepRow
from benchctl.formats import range_of
from benchctl.profile.model import Profile
from benchctl.records.directory import arm_label, cell_name
from benchctl.records.noise import MetricNoise
from benchctl.report.charts import figure
from benchctl.report.charts.figure import GREY, ArmStyle, arm_styles, series_color, series_dash

_ID: Final = "block-values"
_TITLE: Final = "Values block by block"
_MAX_TICKS: Final = 20
_MARKER_PX: Final = 9
_SMALL_MARKER_PX: Final = 6
_MAX_LARGE: Final = 4
"""Markers of more arms would cover one another on a phone."""
_PANEL_PX: Final = 190
_REST_PX: Final = 80
_HIDDEN_FROM: Final = 5.0
_RELATIVE: Final = "in per cent from the mean of its arm, because the arms are far apart"
_SPREAD: Final = 0.6
"""Share of the distance between two blocks over which the arms of a block stand side by side."""


@dataclass(frozen=True, slots=True)
class Point:
    """The value of one run. ``left_out`` is the reason why it counts nowhere; None when it counts."""

    block: int
    x: float
    y: float
    """The value, or its distance from the mean of its arm in per cent."""
    value: float
    run_id: str
    is_outlier: bool
    left_out: str | None


def draw_block_values(source: figure.ChartSource) -> figure.Chart:
    """A panel for each deciding metric. ``cells`` are comparisons with the baseline; they know the outliers."""
    arms = arm_styles(source.analysis)
    names = [
        name
        for name in deciding_names(source.analysis.profile)
        if any(run.number(name) is not None for arm in arms for run in arm.cell.runs)
    ]
    if not names:
        return figure.no_chart(_ID, _TITLE, "no finished run knows a deciding metric")
    points = {name: _by_arm(source.analysis, arms, name, source.cells) for name in names}
    is_relative = any(hides_scatter([[p.value for p in group] for group in points[name]]) for name in names)
    size = _MARKER_PX if len(arms) <= _MAX_LARGE else _SMALL_MARKER_PX
    traces: list[figure.Trace] = []
    for panel, name in enumerate(names):
        groups = [_relative(group) for group in points[name]] if is_relative else points[name]
        traces.append(_joints([point for group in groups for point in group], panel))
        traces += [_trace(arm, group, name, panel, size) for arm, group in zip(arms, groups, strict=True) if group]
    height = _REST_PX + _PANEL_PX * len(names) + figure.legend_px(arm.label for arm in arms)
    y_axes = [_y_axis(name, is_relative=is_relative) for name in names]
    units = " and ".join(dict.fromkeys(METRICS[name].unit for name in names))
    origin = "a fresh server" if source.analysis.passes is None else "the replays of one pass"
    return figure.drawn(
        _ID,
        _TITLE,
        traces,
        figure.layout(
            height, **figure.panels(_x_axis(sorted({run.record.block for run in source.analysis.runs})), y_axes)
        ),
        caption=(
            f"Each point is one run, {origin}, {_RELATIVE if is_relative else f'in {units}'}; a line "
            "joins the runs of one block. Open circles are outliers and count; crosses are left out."
        ),
        definition="; ".join(f"{name} = {METRICS[name].formula}" for name in names)
        + ". Only runs that failed, are suspect or damaged are left out.",
    )


def _x_axis(blocks: Sequence[int]) -> figure.Trace:
    """Every block by its number, as long as the numbers have room."""
    ticks = {"tickvals": list(blocks)} if len(blocks) <= _MAX_TICKS else {"tickformat": "d"}
    return figure.axis("block", showgrid=False, range=[blocks[0] - 0.6, blocks[-1] + 0.6], **ticks)


def deciding_names(profile: Profile | None) -> tuple[str, ...]:
    """The primary metrics of the profile, those that are no counts; the default ones where it cannot be read."""
    names = Profile.model_fields["primary_metrics"].default if profile is None else profile.primary_metrics
    return tuple(name for name in names if name in METRICS and not METRICS[name].is_exact)


def outlier_blocks(cells: Sequence[CellComparison]) -> Mapping[tuple[str, str], tuple[int, ...]]:
    """Blocks that stand out, by label of the compared arm and metric."""
    return {
        (cell.b_label, metric.metric.name): metric.outlier_blocks
        for cell in cells
        for metric in cell.metrics
        if metric.outlier_blocks
    }


def hides_scatter(groups: Sequence[Sequence[float]]) -> bool:
    """True where arms differ so much that on one axis the scatter of each would be a flat line.

    That is when the values of all arms span more than five times what those of one arm do, in logarithms.
    """
    filled = [group for group in groups if group]
    if not filled or min(map(min, filled)) <= 0:
        return False
    widest = max(math.log(max(group) / min(group)) for group in filled)
    whole = math.log(max(map(max, filled)) / min(map(min, filled)))
    return 0 < widest < whole / _HIDDEN_FROM


def _relative(points: Sequence[Point]) -> list[Point]:
    """The points in per cent of the geometric mean of those that count."""
    counted = [point.value for point in points if point.left_out is None]
    mean = geometric_mean(counted) if counted and min(counted) > 0 else None
    return [] if mean is None else [replace(point, y=100 * (point.value / mean - 1)) for point in points]


def _y_axis(name: str, *, is_relative: bool) -> figure.Trace:
    return figure.axis(f"{name},<br>{'% from mean' if is_relative else METRICS[name].unit}", nticks=5)


def _by_arm(
    analysis: AnalyzedExperiment, arms: Sequence[ArmStyle], name: str, cells: Sequence[CellComparison]
) -> list[list[Point]]:
    """The points of each arm, its runs in the order of blocks."""
    outliers = outlier_blocks(cells)
    runs = sorted(analysis.runs, key=lambda run: run.record.block)
    offsets = [_SPREAD * ((i + 0.5) / len(arms) - 0.5) for i in range(len(arms))]
    return [
        _points([run for run in runs if run.label == arm.label], name, outliers.get((arm.label, name), ()), offset)
        for arm, offset in zip(arms, offsets, strict=True)
    ]


def _points(runs: Sequence[RunSummary], name: str, outliers: Sequence[int], offset: float) -> list[Point]:
    return [
        Point(
            block=run.record.block,
            x=run.record.block + offset,
            y=value,
            value=value,
            run_id=run.record.run_id,
            is_outlier=run.record.block in outliers,
            left_out=run.reason_excluded(name),
        )
        for run in runs
        if (value := run.number(name)) is not None
    ]


def _joints(points: Sequence[Point], panel: int) -> figure.Trace:
    """A thin line through the counted points of each block."""
    x: list[float | None] = []
    y: list[float | None] = []
    for block in sorted({point.block for point in points}):
        counted = sorted((p.x, p.y) for p in points if p.block == block and p.left_out is None)
        if len(counted) > 1:
            x += [*(at for at, _ in counted), None]
            y += [*(y_at for _, y_at in counted), None]
    return {
        "type": "scatter",
        "mode": "lines",
        "x": figure.rounded(x),
        "y": figure.rounded(y),
        "yaxis": figure.panel_axis(panel),
        "line": {"color": GREY, "width": 1},
        "hoverinfo": "skip",
        "showlegend": False,
    }


def _trace(arm: ArmStyle, points: Sequence[Point], name: str, panel: int, size: int) -> figure.Trace:
    symbols = ["x-thin-open" if p.left_out else "circle-open" if p.is_outlier else "circle" for p in points]
    notes = [f", left out: {p.left_out}" if p.left_out else ", outlier" if p.is_outlier else "" for p in points]
    unit = METRICS[name].unit
    return {
        "type": "scatter",
        "mode": "markers",
        "name": arm.label,
        "legendgroup": arm.label,
        "showlegend": panel == 0,
        "x": figure.rounded(p.x for p in points),
        "y": figure.rounded((p.y for p in points), 8),
        "yaxis": figure.panel_axis(panel),
        "marker": {"color": arm.color, "symbol": symbols, "size": size, "line": {"width": 2, "color": arm.color}},
        "customdata": [[p.block, p.value, p.run_id + note] for p, note in zip(points, notes, strict=True)],
        "hovertemplate": f"block %{{customdata[0]}}: %{{customdata[1]:.5~g}} {unit}<br>%{{customdata[2]}}",
    }


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


_QUANTITIES: Final = {
    "wall": ("wall_s", "wall time"),
    "step_ms": ("step_ms", "time per step"),
    "ttft": ("ttft_ms", "mean TTFT"),
    "p99_ttft": ("p99_ttft_ms", "p99 TTFT"),
}
"""Name in a row of the sweep, then name of the metric, and in words."""
_SWEEP_ID: Final = "sweep"
_SWEEP_TITLE: Final = "Cost over the swept factor"
_SWEEP_PANEL_PX: Final = 210
_SWEEP_REST_PX: Final = 80
_MAX_BANDS: Final = 3
_SWEEP_MAX_TICKS: Final = 12
_MAX_UPRIGHT: Final = 4
"""The names of more cells do not fit side by side on a phone."""
_LOG_FROM: Final = 10.0
"""A factor whose largest value is this many times the smallest gets a logarithmic axis."""


def draw_sweep(source: figure.ChartSource) -> figure.Chart:
    """With the noise of an A/A experiment as a band around 1, or else with the baseline's own scatter."""
    rows = swept_rows(source.analysis, _QUANTITIES)
    if len(rows) < 2:
        return figure.no_chart(_SWEEP_ID, _SWEEP_TITLE, NO_SWEEP)
    factor = swept_factor(rows)
    lines = sweep_lines(rows, factor)
    quantities = [name for name in _QUANTITIES if any(name in row.estimates for row in rows)]
    reaches = [reach_of([point for line in lines for point in line.points(name)]) for name in quantities]
    has_bands = factor is not None and len(lines) <= _MAX_BANDS
    few = few_requests([run for cell in source.analysis.cells for run in cell.runs], 99)
    y_axes = [
        figure.axis(
            _QUANTITIES[name][1]
            + (f" of<br>{few} requests" if few and name == "p99_ttft" else "")
            + ",<br>ratio to baseline",
            range=[reach.low, reach.high],
        )
        for name, reach in zip(quantities, reaches, strict=True)
    ]
    noise_bands = [_noise_band(source, _QUANTITIES[name][0], panel) for panel, name in enumerate(quantities)]
    shapes = [*(_one(panel) for panel in range(len(quantities))), *(shape for shape in noise_bands if shape)]
    height = _SWEEP_REST_PX + _SWEEP_PANEL_PX * len(quantities) + figure.legend_px(line.label for line in lines)
    return figure.drawn(
        _SWEEP_ID,
        _SWEEP_TITLE,
        [
            trace
            for panel, name in enumerate(quantities)
            for line in lines
            for trace in _traces(line, line.points(name), panel, has_bands=has_bands)
        ],
        figure.layout(height, **figure.panels(_sweep_x_axis(rows, factor), y_axes), shapes=shapes),
        caption=_caption(rows, source.noise, is_cut=any(reach.is_cut for reach in reaches)),
        definition=(
            "Ratio to the baseline of the same block, as compare estimates it, with its interval; open "
            "circles are single blocks. Above 1 the cell is slower than the baseline."
        ),
    )


def _traces(line: SweepLine, points: Sequence[SweepPoint], panel: int, *, has_bands: bool) -> list[figure.Trace]:
    if not points:
        return []
    estimates = [point.estimate for point in points]
    x = [_tick(point.x) for point in points]
    low, high = figure.rounded(e.ci_low for e in estimates), figure.rounded(e.ci_high for e in estimates)
    ratios = figure.rounded(e.ratio for e in estimates)
    shared = {"name": line.label, "legendgroup": line.label, "type": "scatter", "yaxis": figure.panel_axis(panel)}
    mean: figure.Trace = {
        **shared,
        "mode": "lines+markers" if line.is_ordered else "markers",
        "showlegend": panel == 0,
        "x": x,
        "y": ratios,
        "line": {"color": line.color, "dash": line.dash, "width": 2},
        "marker": {"color": line.color, "size": 8},
        "customdata": [[lo, hi, e.num_blocks] for lo, hi, e in zip(low, high, estimates, strict=True)],
        "hovertemplate": (
            "%{x}: %{y:.4~g} [%{customdata[0]:.4~g}, %{customdata[1]:.4~g}] over %{customdata[2]} blocks"
        ),
    }
    blocks = [(_tick(point.x), block, ratio) for point in points for block, ratio in point.blocks]
    single: figure.Trace = {
        **shared,
        "mode": "markers",
        "showlegend": False,
        "x": [at for at, _, _ in blocks],
        "y": figure.rounded(ratio for _, _, ratio in blocks),
        "customdata": [block for _, block, _ in blocks],
        "marker": {"color": line.color, "symbol": "circle-open", "size": 6},
        "hovertemplate": "%{x}, block %{customdata}: %{y:.4~g}",
    }
    if not has_bands:
        return [{**mean, "error_y": figure.error_bars(ratios, low, high, line.color)}, single]
    return [
        figure.band(x, low, high, line.color, legendgroup=line.label, yaxis=figure.panel_axis(panel)),
        mean,
        single,
    ]


def _tick(x: float | str) -> float | str:
    return x.replace("\n", "<br>") if isinstance(x, str) else x


def _sweep_x_axis(rows: Sequence[SweepRow], factor: str | None) -> figure.Trace:
    """The factor at its values, logarithmic where they span much; without one, the cells side by side."""
    if factor is None:
        return figure.axis(
            " and ".join(rows[0].cell), type="category", tickangle=0 if len(rows) <= _MAX_UPRIGHT else None
        )
    values = sorted({factor_value(row, factor) for row in rows})
    is_log = values[0] > 0 and values[-1] / values[0] >= _LOG_FROM
    few = (
        {"tickvals": values, "ticktext": [f"{value:g}" for value in values]}
        if len(values) <= _SWEEP_MAX_TICKS
        else {}
    )
    return figure.axis(factor, type="log" if is_log else "linear", **few)


def _one(panel: int) -> figure.Trace:
    return {
        "type": "line",
        "xref": "x domain",
        "x0": 0,
        "x1": 1,
        "yref": figure.panel_axis(panel),
        "y0": 1,
        "y1": 1,
        "line": {"color": GREY, "width": 1.5, "dash": "dash"},
    }


def _noise_band(source: figure.ChartSource, metric: str, panel: int) -> figure.Trace | None:
    """A grey band around 1, as wide as the noise alone."""
    noise = source.noise.get(metric)
    scatter = None if source.noise else _baseline_scatter(source.analysis, metric)
    half = scatter if noise is None else math.log1p(noise.floor_frac)
    if half is None:
        return None
    return {
        "type": "rect",
        "layer": "below",
        "xref": "x domain",
        "x0": 0,
        "x1": 1,
        "yref": figure.panel_axis(panel),
        "y0": math.exp(-half),
        "y1": math.exp(half),
        "fillcolor": figure.translucent(GREY, 0.25),
        "line": {"width": 0},
    }


def _baseline_scatter(analysis: AnalyzedExperiment, metric: str) -> float | None:
    """Standard deviation of the logarithms of the baseline's blocks; None below three."""
    baseline = analysis.results.manifest.baseline
    cells = [cell for cell in analysis.cells if cell.variant == baseline and not cell.cell]
    values = [
        value for cell in cells for run in cell.runs if (value := run.number(metric)) is not None and value > 0
    ]
    return stdev(map(math.log, values)) if len(values) > 2 else None


def _caption(rows: Sequence[SweepRow], noise: Mapping[str, MetricNoise], *, is_cut: bool) -> str:
    interval = interval_label([estimate for row in rows for estimate in row.estimates.values()])
    grey = "the noise of an A/A experiment" if noise else "one standard deviation of the baseline's own blocks"
    cut = "; intervals extend beyond the picture" if is_cut else ""
    return f"Ratio to the baseline with its {interval}{cut}; the grey band around 1 is {grey}."
