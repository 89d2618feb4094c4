"""The raw values of the deciding metrics, block by block: outliers, drift and order seen with the eye."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from benchctl.analysis.comparison import CellComparison
from benchctl.analysis.metric_table import METRICS
from benchctl.analysis.summary import RunSummary
from benchctl.profile.model import Profile
from benchctl.report.page.chart import GREY, Chart, Trace, axis, layout, no_chart, panel_axis, panels, rounded
from benchctl.report.page.chart_arms import ArmLook, arm_looks
from benchctl.report.reading import Reading

_ID: Final = "block-values"
_TITLE: Final = "Values block by block"
_PANEL_PX: Final = 190
_REST_PX: Final = 100
_SPREAD: Final = 0.6
"""Share of the distance between two blocks over which the arms of a block stand side by side."""


@dataclass(frozen=True, slots=True)
class Point:
    """The value of one run. ``left_out`` says why it counts nowhere; None when it does."""

    block: int
    x: float
    value: float
    run_id: str
    is_outlier: bool
    left_out: str | None


def draw_block_values(reading: Reading, cells: Sequence[CellComparison]) -> Chart:
    """A panel for each deciding metric. ``cells`` are comparisons with the baseline; they know the outliers."""
    looks = arm_looks(reading)
    names = [name for name in deciding_names(reading.profile) if any(_has(look, name) for look in looks)]
    if not names:
        return no_chart(_ID, _TITLE, "no finished run knows a deciding metric")
    outliers = outlier_blocks(cells)
    traces: list[Trace] = []
    for panel, name in enumerate(names):
        points = {
            look.label: _points(reading.runs, look, name, outliers.get((look.label, name), ()), place)
            for look, place in zip(looks, _places(len(looks)), strict=True)
        }
        traces.append(_joints([point for group in points.values() for point in group], panel))
        traces += [_trace(look, points[look.label], name, panel) for look in looks if points[look.label]]
    height = _REST_PX + _PANEL_PX * len(names)
    blocks = sorted({run.record.block for run in reading.runs})
    x_axis = axis("block", tickvals=blocks, showgrid=False, range=[blocks[0] - 0.6, blocks[-1] + 0.6])
    return Chart(
        id=_ID,
        title=_TITLE,
        caption=(
            "Each point is one run, a fresh server; a line joins the runs of one block, in "
            f"{_units(names)}. Open circles stand out in their comparison and count; crosses are left out."
        ),
        definition="; ".join(f"{name} = {METRICS[name].formula}" for name in names)
        + ". A run that failed, is suspect or damaged is left out; nothing else is.",
        figure={
            "data": traces,
            "layout": layout(
                height, **panels(x_axis, [axis(f"{name},<br>{METRICS[name].unit}") for name in names])
            ),
        },
        skipped=None,
        height=height,
    )


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


def _has(look: ArmLook, name: str) -> bool:
    return any(run.number(name) is not None for run in look.cell.runs)


def _units(names: Sequence[str]) -> str:
    return " and ".join(dict.fromkeys(METRICS[name].unit for name in names))


def _places(num_arms: int) -> list[float]:
    """Offsets from the middle of a block, one for each arm."""
    return [_SPREAD * ((i + 0.5) / num_arms - 0.5) for i in range(num_arms)]


def _points(
    runs: Sequence[RunSummary], look: ArmLook, name: str, outliers: Sequence[int], place: float
) -> list[Point]:
    return [
        Point(
            block=run.record.block,
            x=run.record.block + place,
            value=value,
            run_id=run.record.run_id,
            is_outlier=run.record.block in outliers,
            left_out=None if run.is_usable else ("damaged" if run.run.is_damaged else run.record.state),
        )
        for run in sorted(runs, key=lambda run: run.record.block)
        if run.label == look.label and (value := run.number(name)) is not None
    ]


def _joints(points: Sequence[Point], panel: int) -> Trace:
    """A thin line through the counted points of each block."""
    x: list[float | None] = []
    y: list[float | None] = []
    for block in sorted({point.block for point in points}):
        counted = sorted((p.x, p.value) for p in points if p.block == block and p.left_out is None)
        x += [*(at for at, _ in counted), None]
        y += [*(value for _, value in counted), None]
    return {
        "type": "scatter",
        "mode": "lines",
        "x": rounded(x),
        "y": rounded(y),
        "yaxis": panel_axis(panel),
        "line": {"color": GREY, "width": 1},
        "hoverinfo": "skip",
        "showlegend": False,
    }


def _trace(look: ArmLook, points: Sequence[Point], name: str, panel: int) -> Trace:
    symbols = ["x-thin-open" if p.left_out else "circle-open" if p.is_outlier else "circle" for p in points]
    notes = [f", left out: {p.left_out}" if p.left_out else ", stands out" if p.is_outlier else "" for p in points]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": look.label,
        "legendgroup": look.label,
        "showlegend": panel == 0,
        "x": rounded(p.x for p in points),
        "y": rounded((p.value for p in points), 8),
        "yaxis": panel_axis(panel),
        "marker": {"color": look.color, "symbol": symbols, "size": 9, "line": {"width": 2, "color": look.color}},
        "customdata": [[p.block, p.run_id + note] for p, note in zip(points, notes, strict=True)],
        "hovertemplate": f"block %{{customdata[0]}}: %{{y:.5~g}} {METRICS[name].unit}<br>%{{customdata[1]}}",
    }
