"""The raw values of the deciding metrics, block by block, which show outliers, drift and effects of order."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import geometric_mean
from typing import Final

from benchctl.analysis.analyzed import AnalyzedExperiment
from benchctl.analysis.compare.result import CellComparison
from benchctl.analysis.metrics.table import METRICS
from benchctl.analysis.summary.runs import RunSummary
from benchctl.profile.model import Profile
from benchctl.report.charts.arms import ArmStyle, arm_styles
from benchctl.report.charts.palette import GREY
from benchctl.report.page.charts import figure

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
