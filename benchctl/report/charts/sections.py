"""Stacked bars: the time of a step by its sections, what guidance consists of, and FLOPs by their account."""

import re
from collections.abc import Mapping, Sequence
from typing import Final

from benchctl.analysis.attribution.breakdown import Breakdown
from benchctl.costs.flops import FlopsAccount
from benchctl.formats import short_number
from benchctl.records.schema import SECTION_PARENT, Clock
from benchctl.report.charts import figure
from benchctl.report.charts.arms import arms_of, clock_note
from benchctl.report.charts.figure import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, YELLOW
from benchctl.units import PETA, TERA, ms_from_ns

NO_STEPS: Final = "no finished run has a step log"
NO_SECTIONS: Final = "a forward pass is one section"
UNNAMED: Final = "not named by any section"
_BROWN: Final = "#8C6D31"
_COLORS: Final = {
    "schedule": SKY,
    "draft": GREEN,
    "backfill": ORANGE,
    "model_forward": BLUE,
    "sampler_total": PURPLE,
    "pre_lvm": YELLOW,
    "lvm_apply_outer": VERMILION,
    "sample": PURPLE,
    "lvm_build_pending": ORANGE,
    "lvm_forward": VERMILION,
    "lvm_apply_guidance": GREEN,
    "value_model_load": _BROWN,
    "base: projections": BLUE,
    "base: attention": SKY,
    "base: vocabulary head": PURPLE,
    "value model: prefill": YELLOW,
    "value model: extend prefixes": ORANGE,
    "value model: score candidates": VERMILION,
    "draft model": GREEN,
}
"""Two sections of one colour are never both leaves: one is the parent of the other, or is of speculation and the
other of guidance, which exclude each other."""
_LIGHT: Final = frozenset({YELLOW, SKY, GREY, ORANGE, PURPLE})
_BAR_PX: Final = 34
_NUMBERED_FROM_FRAC: Final = 0.1
"""A part that takes less of the longest bar is too narrow for its own number."""
_NAMED_FROM_FRAC: Final = 0.001
"""A part that takes less of the longest bar cannot be seen and has no entry in the legend."""
_MOST_CHARACTERS: Final = 200
_LABEL_CHARACTERS: Final = 24
"""Longer labels have several lines."""

Parts = Mapping[str, float]
"""Value of each part of a bar, from left to right."""


def draw_sections(source: figure.ChartSource) -> figure.Chart | None:
    """The baseline on top; every bar is as long as the mean step of its arm, or its sampler.

    None for forward passes, which have one section.
    """
    title = "Time per step by section"
    if source.analysis.passes is not None:
        return None
    pairs = [(arm.label, each) for arm in arms_of(source.analysis) if (each := arm.breakdown()) is not None]
    if not pairs:
        return figure.Chart(id="sections", title=title, skipped=NO_STEPS)
    breakdowns = [breakdown for _, breakdown in pairs]
    clock = clock_note(clock for breakdown in breakdowns for clock in breakdown.clocks)
    is_whole = all(breakdown.covers_steps for breakdown in breakdowns)
    mean = "Mean time of a step" if is_whole else "Mean time in the sampler of a step"
    limit = "" if is_whole else " Not of whole steps: the step log times the sampler alone."
    notes = "; ".join(sorted({breakdown.clock_note for breakdown in breakdowns}))
    return figure.Chart(
        id="sections",
        title=title if is_whole else "Time in the sampler by section",
        caption=f"{mean} in ms ({clock}) and the sections it consists of, all usable runs of an arm.{limit}",
        definition=(
            "Σ time of the section / number of all steps, so that the sections of an arm add up to its mean "
            f"{'step' if is_whole else 'sampler'}. {notes}."
        ),
        spec=stacked_bars(
            [(label, section_parts(breakdown)) for label, breakdown in pairs],
            "time per step, ms" if is_whole else "time in the sampler per step, ms",
        ),
    )


def section_parts(breakdown: Breakdown) -> Parts:
    """Every leaf of the sections in ms per step, and the unnamed rest last; together the mean step."""
    leaves = breakdown.leaf_means_ns()
    parts = {name: ms_from_ns(leaves[name]) for name in SECTION_PARENT if name in leaves}
    rest = ms_from_ns(sum(mean for name, mean in leaves.items() if name not in parts))
    return {**parts, UNNAMED: max(0.0, rest)}


def draw_guidance(source: figure.ChartSource) -> figure.Chart:
    """The sections of applying guidance, of the arms that have such steps."""
    bars: list[tuple[str, Parts]] = []
    clocks: list[Clock] = []
    for arm in arms_of(source.analysis):
        breakdown = arm.breakdown()
        section = None if breakdown is None else breakdown.sections.get("lvm_apply_outer")
        if breakdown is None or section is None or not section.children:
            continue
        means = {child.name: ms_from_ns(child.mean_ns) for child in section.children}
        rest = ms_from_ns(max(0, section.children[-1].total_ns) / section.num_steps)
        names = [name for name, parent in SECTION_PARENT.items() if parent == "lvm_apply_outer"]
        bars.append((arm.label, {**{name: means.get(name, 0.0) for name in names}, UNNAMED: rest}))
        clocks += breakdown.clocks
    title = "Time of applying guidance by section"
    if not bars:
        reason = "no finished run has steps in which guidance was applied"
        return figure.Chart(id="guidance", title=title, skipped=reason)
    return figure.Chart(
        id="guidance",
        title=title,
        caption=f"Σ time of the section / number of all steps, in ms ({clock_note(clocks)}).",
        spec=stacked_bars(bars, "time per step, ms"),
    )


def draw_flops(source: figure.ChartSource) -> figure.Chart:
    """FLOPs as the published rule charges them, and as the step log shows them."""
    title = "FLOPs of a run: charged by the published rule, and observed in the step log"
    bars = []
    for cell in arms_of(source.analysis):
        flops = [run.flops for run in cell.runs if run.flops is not None]
        published = [account.published for account in flops if account.published is not None]
        observed = [account.observed for account in flops if account.observed is not None]
        for kind, accounts in (("published", published), ("observed", observed)):
            if accounts and len(accounts) == len(cell.runs):
                bars.append((f"{cell.label}, {kind}", _mean_flops(accounts)))
    if not bars:
        reason = "FLOPs are unknown: no finished run with known model shapes and token counts"
        return figure.Chart(id="flops", title=title, skipped=reason)
    largest = max(sum(parts.values()) for _, parts in bars)
    unit, name = (PETA, "PFLOPs") if largest >= PETA / 2 else (TERA, "TFLOPs")
    scaled = [(label, {part: value / unit for part, value in parts.items()}) for label, parts in bars]
    return figure.Chart(
        id="flops",
        title=title,
        caption="Model FLOPs, not a measurement; means over the usable runs of an arm.",
        spec=stacked_bars(scaled, f"{name} per run"),
    )


def _mean_flops(accounts: Sequence[FlopsAccount]) -> Parts:
    parts = [
        {
            "base: projections": account.base.linear,
            "base: attention": account.base.attention,
            "base: vocabulary head": account.base.head,
            "value model: prefill": account.value_prefill.total,
            "value model: extend prefixes": account.value_extend.total,
            "value model: score candidates": account.value_candidates.total,
            "draft model": account.draft.total,
        }
        for account in accounts
    ]
    return {name: sum(each[name] for each in parts) / len(parts) for name in parts[0]}


def stacked_bars(bars: Sequence[tuple[str, Parts]], x_title: str) -> figure.Spec:
    """Horizontal bars, the first on top, each with its total behind it. Parts without any value are left out."""
    bars = [(wrapped(label), parts) for label, parts in bars]
    names = list(dict.fromkeys(name for _, parts in bars for name, value in parts.items() if value)) or [UNNAMED]
    names = [*(name for name in _COLORS if name in names), *(name for name in names if name not in _COLORS)]
    longest = max(sum(parts.values()) for _, parts in bars) or 1.0
    rows, ends = [], []
    for label, parts in bars:
        end = 0.0
        for name in names:
            value, start = parts.get(name, 0.0), end
            end += value
            number = short_number(value) if value >= _NUMBERED_FROM_FRAC * longest else ""
            ink = "black" if _COLORS.get(name, GREY) in _LIGHT else "white"
            row = {"bar": label, "part": name, "value": value, "start": start, "end": end}
            rows.append({**row, "middle": (start + end) / 2, "number": number, "ink": ink})
        ends.append({"bar": label, "end": end, "number": short_number(end)})
    colors = {name: _COLORS.get(name, GREY) for name in names}
    visible = [name for name in names if max(p.get(name, 0.0) for _, p in bars) >= _NAMED_FROM_FRAC * longest]
    color = figure.by_color("part", colors)
    color["legend"] = {"symbolOpacity": 1, "values": visible} if visible else None
    labels = [label for label, _ in bars]
    lines = [line for label in labels for line in label.split("\n")]
    left = 14 + 7 * min(_LABEL_CHARACTERS, max(map(len, lines)))
    bar_px = max(_BAR_PX, 16 * (1 + max(label.count("\n") for label in labels)))
    panel = figure.panel(
        bar_px * len(bars),
        {
            "field": "bar",
            "type": "nominal",
            "title": None,
            "sort": labels,
            "axis": {"ticks": False, "grid": False, "labelExpr": "split(datum.label, '\\n')"},
        },
        [
            figure.layer(
                "bar",
                x2_by="end",
                color_by=color,
                height=_BAR_PX * 2 // 3,
                tip=[("bar", "arm"), ("part", "part"), ("value", x_title, ".4~g")],
            ),
            figure.layer(
                "text", x_by="middle", text_by="number", color_by={"field": "ink", "scale": None}, fontSize=11
            ),
            {
                **figure.layer("text", x_by="end", text_by="number", align="left", dx=5, fontWeight="bold"),
                "data": {"name": "ends"},
            },
        ],
    )
    x = figure.axis(x_title, "start", domain=(0, 1.1 * longest))
    return figure.picture([panel], rows, x, legend=visible, left=left, ends=ends)


def wrapped(label: str) -> str:
    """A label in short lines, broken after spaces and equals signs only."""
    lines = [""]
    for piece in re.findall(r"[^ =]+[ =]?|[ =]", label[:_MOST_CHARACTERS]):
        if lines[-1] and len(lines[-1]) + len(piece.rstrip()) > _LABEL_CHARACTERS:
            lines.append("")
        lines[-1] += piece
    return "\n".join(line.rstrip() for line in lines)
