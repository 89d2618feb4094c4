"""Where the time of a step sits, section by section, for each arm."""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from benchctl.analysis.analyzed import AnalyzedExperiment
from benchctl.analysis.attribution.sections import Breakdown
from benchctl.records.step import SECTION_PARENT
from benchctl.report.page.charts.arms import arm_looks, clock_note
from benchctl.report.page.charts.chart import (
    GREY,
    Chart,
    Trace,
    axis,
    drawn,
    layout,
    legend_px,
    no_chart,
    rounded,
    wrapped,
)
from benchctl.report.plots.style import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION, YELLOW
from benchctl.units import ms_from_ns

_COLORS: Final = {
    "schedule": SKY,
    "model_forward": BLUE,
    "sampler_total": PURPLE,
    "pre_lvm": YELLOW,
    "lvm_apply_outer": VERMILION,
    "sample": PURPLE,
    "lvm_build_pending": ORANGE,
    "lvm_forward": VERMILION,
    "lvm_apply_guidance": GREEN,
    "value_model_load": YELLOW,
}
"""Two sections of one colour are never both leaves: one is the parent of the other, or has another pattern."""
_PATTERNS: Final = {"value_model_load": "x"}
_REST: Final = "not named by any section"
_LABEL_CHARACTERS: Final = 16
_NAMED_FROM_FRAC: Final = 0.003
"""A section that takes less of the longest bar cannot be seen and has no entry in the legend."""
_LINE_PX: Final = 16
_BAR_PX: Final = 44
_REST_PX: Final = 80
_ID: Final = "sections"


class _Words(NamedTuple):
    """What the chart calls the whole that the sections are parts of."""

    title: str
    axis: str
    whole: str
    mean: str
    beside: str = ""


_STEP: Final = _Words("Time per step by section", "time per step, ms", "step", "Mean time of a step")
_SAMPLER: Final = _Words(
    "Time in the sampler by section",
    "time in the sampler per step, ms",
    "sampler",
    "Mean time in the sampler of a step",
    " Not of whole steps: the step log times the sampler alone.",
)
"""Where the log of a run covers no more of a step."""


def draw_sections(analysis: AnalyzedExperiment) -> Chart:
    """Stacked bars, the baseline on top; every bar is as long as the mean step of its arm, or its sampler."""
    cells = [look.cell for look in arm_looks(analysis)]
    found = [(cell, breakdown) for cell in cells if (breakdown := cell.breakdown()) is not None]
    if not found:
        return no_chart(_ID, _STEP.title, "no finished run has a step log")
    parts = parts_of([breakdown for _, breakdown in found])
    labels = [wrapped(cell.label, _LABEL_CHARACTERS) for cell, _ in found]
    bar_px = max(_BAR_PX, _LINE_PX * (2 + max(label.count("<br>") for label in labels)))
    longest = max(ms_from_ns(breakdown.step.mean_ns) for _, breakdown in found)
    named = [name for name, values in parts.items() if max(values) >= _NAMED_FROM_FRAC * longest]
    height = _REST_PX + bar_px * len(found) + legend_px(named)
    note = clock_note(clock for _, breakdown in found for clock in breakdown.clocks)
    words = _STEP if all(breakdown.covers_steps for _, breakdown in found) else _SAMPLER
    return drawn(
        _ID,
        words.title,
        [_bars(name, values, labels, is_named=name in named) for name, values in parts.items()],
        layout(
            height,
            barmode="stack",
            bargap=0.35,
            xaxis=axis(words.axis, rangemode="tozero"),
            yaxis={"autorange": "reversed", "automargin": True, "title": {"text": ""}},
        ),
        caption=(
            f"{words.mean} in ms ({note}) and the sections it consists of, all usable runs of an arm.{words.beside}"
        ),
        definition=(
            "Σ time of the section / number of all steps, so that the sections of an arm add up to its mean "
            f"{words.whole}. " + "; ".join(sorted({breakdown.clock_note for _, breakdown in found})) + "."
        ),
    )


def parts_of(breakdowns: Sequence[Breakdown]) -> Mapping[str, list[float]]:
    """Time per step in ms of each leaf of the sections, one value for each breakdown; the rest is the last part.

    The values of one breakdown add up to its mean step. Parts that take no time anywhere are left out.
    """
    leaves = [breakdown.leaf_means_ns() for breakdown in breakdowns]
    names = [name for name in SECTION_PARENT if any(name in leaf for leaf in leaves)]
    parts = {name: [ms_from_ns(leaf.get(name, 0.0)) for leaf in leaves] for name in names}
    parts[_REST] = [
        max(0.0, ms_from_ns(sum(mean for name, mean in leaf.items() if name not in names))) for leaf in leaves
    ]
    return {name: values for name, values in parts.items() if any(values)}


def _bars(name: str, values_ms: Sequence[float], labels: Sequence[str], *, is_named: bool) -> Trace:
    pattern = "/" if name == _REST else _PATTERNS.get(name, "")
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "showlegend": is_named,
        "x": rounded(values_ms, 8),
        "y": list(labels),
        "marker": {
            "color": _COLORS.get(name, GREY),
            "pattern": {"shape": pattern, "fgopacity": 0.6, "size": 6},
            "line": {"width": 0},
        },
        "hovertemplate": "%{y}: %{x:.4~g} ms per step",
    }
