"""The time of a step by its sections, as stacked bars of a Plotly figure."""

from collections.abc import Sequence
from typing import Final

from benchctl.report.charts import figure
from benchctl.report.charts.figure import arm_styles
from benchctl.report.charts.steps import NO_STEPS, SectionPart, section_bars

_LABEL_CHARACTERS: Final = 16
_NAMED_FROM_FRAC: Final = 0.003
"""A section that takes less of the longest bar cannot be seen and has no entry in the legend."""
_LINE_PX: Final = 16
_BAR_PX: Final = 44
_REST_PX: Final = 80
_ID: Final = "sections"


def draw_sections(source: figure.ChartSource) -> figure.Chart | None:
    """Stacked bars, the baseline on top; every bar is as long as the mean step of its arm, or its sampler.

    None for forward passes, which have one section.
    """
    if source.analysis.passes is not None:
        return None
    bars = section_bars([arm.cell for arm in arm_styles(source.analysis)])
    if bars is None:
        return figure.no_chart(_ID, "Time per step by section", NO_STEPS)
    labels = [figure.wrapped(label, _LABEL_CHARACTERS) for label in bars.labels]
    bar_px = max(_BAR_PX, _LINE_PX * (2 + max(label.count("<br>") for label in labels)))
    visible = {part.name for part in bars.parts if max(part.values_ms) >= _NAMED_FROM_FRAC * bars.longest_ms}
    mean = "Mean time of a step" if bars.covers_steps else "Mean time in the sampler of a step"
    limit = "" if bars.covers_steps else " Not of whole steps: the step log times the sampler alone."
    return figure.drawn(
        _ID,
        bars.title,
        [_trace(part, labels, is_named=part.name in visible) for part in bars.parts],
        figure.layout(
            _REST_PX
            + bar_px * len(labels)
            + figure.legend_px(part.name for part in bars.parts if part.name in visible),
            barmode="stack",
            bargap=0.35,
            xaxis=figure.axis(bars.axis, rangemode="tozero"),
            yaxis={"autorange": "reversed", "automargin": True, "title": {"text": ""}},
        ),
        caption=f"{mean} in ms ({bars.clock}) and the sections it consists of, all usable runs of an arm.{limit}",
        definition=(
            "Σ time of the section / number of all steps, so that the sections of an arm add up to its mean "
            f"{bars.whole}. {'; '.join(bars.clock_notes)}."
        ),
    )


def _trace(part: SectionPart, labels: Sequence[str], *, is_named: bool) -> figure.Trace:
    return {
        "type": "bar",
        "orientation": "h",
        "name": part.name,
        "showlegend": is_named,
        "x": figure.rounded(part.values_ms, 8),
        "y": list(labels),
        "marker": {
            "color": part.color,
            "pattern": {"shape": part.pattern, "fgopacity": 0.6, "size": 6},
            "line": {"width": 0},
        },
        "hovertemplate": "%{y}: %{x:.4~g} ms per step",
    }
