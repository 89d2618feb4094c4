"""Step time over the course of a run: is there a steady state, or only a ramp, stalls and a tail?"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from benchctl.analysis.analyzed import AnalyzedExperiment
from benchctl.analysis.summary.runs import RunSummary
from benchctl.records.columns.step_columns import Floats, StepColumns
from benchctl.report.page.charts.arms import (
    ArmLook,
    arm_looks,
    clock_note,
    runs_of_block,
    with_steps,
)
from benchctl.report.page.charts.chart import (
    Chart,
    Trace,
    axis,
    band,
    drawn,
    layout,
    legend_px,
    no_chart,
    panels,
    rounded,
)
from benchctl.units import NS_PER_MS, NS_PER_S

MAX_STRETCHES: Final = 150
_MIN_STEPS_PER_STRETCH: Final = 4
_MAX_BANDS: Final = 3
"""Bands of more arms than this cover one another."""
_BESIDE: Final = {True: "with the 5-95 % band of its steps", False: "5-95 % of its steps on hover"}
_HEIGHT: Final = 420
_ID: Final = "step-time"
_TITLE: Final = "Step time over the run"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Course:
    """The steps of one run in stretches of equal duration; stretches in which no step began are left out."""

    time_s: Floats
    """Mean start of the steps of each stretch."""
    count: Floats
    mean_ms: Floats
    """Weighted by ``count`` these add up to the mean step of the run."""
    low_ms: Floats
    """5th percentile of the steps of the stretch."""
    median_ms: Floats
    high_ms: Floats
    """95th percentile."""
    num_seqs: Floats
    """Mean batch size."""


def course_of(columns: StepColumns, origin_ns: int, max_stretches: int = MAX_STRETCHES) -> Course:
    """Shorten the log of a run to at most ``max_stretches`` stretches of at least four steps on average.

    Times count from ``origin_ns``. ValueError without steps.
    """
    if not len(columns):
        raise ValueError("a run without steps has no course")
    since_ns = columns.start_ns - columns.start_ns.min()
    span_ns = int((since_ns + columns.dur_ns).max()) or 1
    num_bins = max(1, min(max_stretches, len(columns) // _MIN_STEPS_PER_STRETCH))
    bins = np.minimum(since_ns * num_bins // span_ns, num_bins - 1)
    order = np.argsort(bins, kind="stable")
    firsts = np.flatnonzero(np.diff(bins[order], prepend=-1))
    count = np.diff(firsts, append=len(columns)).astype(np.float64)
    dur_ms = columns.dur_ns[order] / NS_PER_MS
    percentiles = np.array([np.percentile(part, (5, 50, 95)) for part in np.split(dur_ms, firsts[1:])])
    return Course(
        time_s=np.add.reduceat((columns.start_ns[order] - origin_ns) / NS_PER_S, firsts) / count,
        count=count,
        mean_ms=np.add.reduceat(dur_ms, firsts) / count,
        low_ms=percentiles[:, 0],
        median_ms=percentiles[:, 1],
        high_ms=percentiles[:, 2],
        num_seqs=np.add.reduceat(columns.num_seqs[order], firsts) / count,
    )


def draw_step_time(analysis: AnalyzedExperiment) -> Chart:
    """One line for each arm, from the run of the block in which most arms have a step log."""
    looks = arm_looks(analysis)
    shown = [(look, run, run.run.columns) for look, run in runs_of_block(looks, with_steps(looks))]
    if not shown:
        return no_chart(_ID, _TITLE, analysis.why_no_step_times)
    origins = [_first_send_ns(run, columns) for _, run, columns in shown]
    is_aligned = None not in origins
    has_band = len(shown) <= _MAX_BANDS
    traces: list[Trace] = []
    for (look, _, columns), origin_ns in zip(shown, origins, strict=True):
        start_ns = origin_ns if is_aligned and origin_ns is not None else int(columns.start_ns.min())
        traces += _traces(look, course_of(columns, start_ns), has_band=has_band)
    note = clock_note(clock for _, _, columns in shown for clock in columns.clocks)
    since = "first send" if is_aligned else "first step"
    return drawn(
        _ID,
        _TITLE,
        traces,
        _layout(since, _HEIGHT + legend_px(look.label for look, _, _ in shown)),
        caption=(
            f"Median step time in ms ({note}) and mean batch size in up to {MAX_STRETCHES} stretches of a run, "
            f"block {shown[0][1].record.block}, {_BESIDE[has_band]}; warm-up excluded."
        ),
        definition=(
            "The run is cut into stretches of equal duration; a step belongs to the stretch in which it starts. "
            "Upper panel: median of the step times of a stretch, and their 5th and 95th percentile. Lower panel: "
            f"mean number of sequences in a step. Time counts from the {since}."
        ),
    )


def _layout(since: str, height: int) -> Mapping[str, Any]:
    y_axes = [axis("step time, ms", rangemode="tozero"), axis("batch size,<br>sequences", rangemode="tozero")]
    return layout(height, **panels(axis(f"time since the {since}, s", rangemode="tozero"), y_axes, shares=(3, 2)))


def _first_send_ns(run: RunSummary, columns: StepColumns) -> int | None:
    """When the load began, on the clock of the steps; None when that clock is another than the client's."""
    first_ns, last_ns = run.record.times.first_send_ns, run.record.times.last_token_ns
    if first_ns is None or last_ns is None or "virtual" in columns.clocks:
        return None
    return first_ns if first_ns <= int(columns.start_ns.min()) <= last_ns else None


def _traces(look: ArmLook, course: Course, *, has_band: bool) -> list[Trace]:
    x = rounded(course.time_s)
    low, median, high = (rounded(values, 5) for values in (course.low_ms, course.median_ms, course.high_ms))
    line = {"type": "scatter", "mode": "lines", "name": look.label, "legendgroup": look.label, "x": x}
    style = {"color": look.color, "dash": look.dash, "width": 1.8}
    counts = [int(count) for count in course.count]
    hover = list(zip(low, high, rounded(course.mean_ms, 8), counts, strict=True))
    traces: list[Trace] = [
        {
            **line,
            "y": median,
            "line": style,
            "customdata": [list(row) for row in hover],
            "hovertemplate": (
                "%{x:.3~f} s: median %{y:.4~g} ms<br>5-95 %: %{customdata[0]:.4~g}-%{customdata[1]:.4~g} ms"
                "<br>mean %{customdata[2]:.4~g} ms of %{customdata[3]} steps"
            ),
        },
        {
            **line,
            "y": rounded(course.num_seqs, 5),
            "yaxis": "y2",
            "line": style,
            "showlegend": False,
            "hovertemplate": "%{x:.3~f} s: %{y:.4~g} sequences",
        },
    ]
    return [band(x, low, high, look.color, legendgroup=look.label), *traces] if has_band else traces
