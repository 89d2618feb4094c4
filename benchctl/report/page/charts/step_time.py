"""Step time and batch size over a run, as two panels of a Plotly figure."""

from typing import Final

from benchctl.report.charts.arms import ArmStyle
from benchctl.report.charts.step_time import TITLE, Course, step_times_by_block
from benchctl.report.page.charts import figure

_HEIGHT: Final = 420
_ID: Final = "step-time"


def draw_step_time(source: figure.ChartSource) -> figure.Chart:
    """One line for each arm, from the run of one block; at first that in which most arms have a step log."""
    blocks = step_times_by_block(source.analysis)
    if not blocks:
        return figure.no_chart(_ID, TITLE, source.analysis.missing_step_times_reason)
    first = blocks[0]
    labels = list(dict.fromkeys(arm.label for times in blocks for arm, _ in times.courses))
    y_axes = [
        figure.axis("step time, ms", rangemode="tozero"),
        figure.axis("batch size,<br>sequences", rangemode="tozero"),
    ]
    return figure.drawn(
        _ID,
        TITLE,
        [
            {**trace, "meta": {"block": str(times.block), "arm": arm.label}}
            for times in blocks
            for arm, course in times.courses
            for trace in _traces(arm, course, has_band=first.has_bands)
        ],
        figure.layout(
            _HEIGHT + figure.legend_px(labels),
            **figure.panels(figure.axis(first.time_axis, rangemode="tozero"), y_axes, shares=(3, 2)),
        ),
        caption=first.caption(),
        definition=(
            "The run is cut into stretches of equal duration; a step belongs to the stretch in which it starts. "
            "Upper panel: median of the step times of a stretch, and their 5th and 95th percentile. Lower panel: "
            f"mean number of sequences in a step. Time counts from the {first.origin}."
        ),
        choices=(figure.block_choice((times.block for times in blocks), first.block), figure.arm_choice(labels)),
    )


def _traces(arm: ArmStyle, course: Course, *, has_band: bool) -> list[figure.Trace]:
    x = figure.rounded(course.time_s)
    low, median, high = (figure.rounded(values, 5) for values in (course.low_ms, course.median_ms, course.high_ms))
    line = {"type": "scatter", "mode": "lines", "name": arm.label, "legendgroup": arm.label, "x": x}
    style = {"color": arm.color, "dash": arm.dash, "width": 1.8}
    counts = [int(count) for count in course.count]
    hover = list(zip(low, high, figure.rounded(course.mean_ms, 8), counts, strict=True))
    traces: list[figure.Trace] = [
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
            "y": figure.rounded(course.num_seqs, 5),
            "yaxis": "y2",
            "line": style,
            "showlegend": False,
            "hovertemplate": "%{x:.3~f} s: %{y:.4~g} sequences",
        },
    ]
    return [figure.band(x, low, high, arm.color, legendgroup=arm.label), *traces] if has_band else traces
