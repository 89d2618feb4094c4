"""The pictures of a report. Each is drawn from a analysis, or skipped with a reason a person can act on."""

from collections.abc import Sequence
from typing import Final

from benchctl.analysis.analyzed import AnalyzedExperiment
from benchctl.analysis.attribution.sections import CLOCK_NOTE, Breakdown
from benchctl.analysis.summary.runs import CellSummary
from benchctl.costs.flops import FlopsAccount
from benchctl.records.step import SECTION_PARENT
from benchctl.report.plots.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PLUM,
    PURPLE,
    SKY,
    SLATE,
    VERMILION,
    YELLOW,
    Part,
    Plot,
    stacked_bars,
)
from benchctl.report.plots.sweep import draw_sweep
from benchctl.report.plots.timeline import draw_timeline
from benchctl.units import PETA, TERA, ms_from_ns

_SECTION_COLORS: Final = {
    "schedule": SKY,
    "model_forward": BLUE,
    "pre_lvm": YELLOW,
    "lvm_apply_outer": BLACK,
    "lvm_build_pending": ORANGE,
    "lvm_forward": VERMILION,
    "lvm_apply_guidance": GREEN,
    "value_model_load": SLATE,
    "sample": PURPLE,
    "sampler_total": PLUM,
}
_NOT_NAMED: Final = "not named by any section"
_FLOPS_PARTS: Final = (
    ("base: projections", BLUE),
    ("base: attention", SKY),
    ("base: vocabulary head", PURPLE),
    ("value model: prefill", YELLOW),
    ("value model: extend prefixes", ORANGE),
    ("value model: score candidates", VERMILION),
)


def draw_plots(analysis: AnalyzedExperiment) -> tuple[Plot, ...]:
    """Every picture of a result directory, drawn or skipped with its reason."""
    cells = [cell for cell in analysis.cells if cell.runs]
    broken_down = [(cell, breakdown) for cell in cells if (breakdown := cell.breakdown()) is not None]
    return (
        _draw_steps(broken_down),
        _draw_apply(broken_down),
        _draw_flops(cells),
        *draw_sweep(analysis),
        draw_timeline(analysis),
    )


def _draw_steps(cells: Sequence[tuple[CellSummary, Breakdown]]) -> Plot:
    name = "per_step_breakdown.png"
    if not cells:
        return Plot(name=name, skipped="no finished run has a step log")
    leaves = [breakdown.leaf_means_ns() for _, breakdown in cells]
    known = [section for section in (*SECTION_PARENT, "step") if any(section in leaf for leaf in leaves)]
    parts = [
        Part(
            label=section,
            color=_SECTION_COLORS.get(section, BLUE),
            values=[ms_from_ns(leaf.get(section, 0.0)) for leaf in leaves],
        )
        for section in known
    ]
    rest = [max(0.0, sum(mean for name, mean in leaf.items() if name not in known)) for leaf in leaves]
    parts.append(Part(label=_NOT_NAMED, color=GREY, values=[ms_from_ns(value) for value in rest], is_hatched=True))
    parts = [part for part in parts if any((value or 0) > 0 for value in part.values)]
    covers_steps = all(breakdown.covers_steps for _, breakdown in cells)
    timed = "time per step" if covers_steps else "time in the sampler per step"
    return Plot(
        name=name,
        png=stacked_bars(
            "Where the time of a step sits"
            if covers_steps
            else "Where the time in the sampler sits (not that of whole steps)",
            f"{timed}, ms (sum / all steps; {_clock(cells)})",
            [cell.label for cell, _ in cells],
            parts,
        ),
    )


def _draw_apply(cells: Sequence[tuple[CellSummary, Breakdown]]) -> Plot:
    name = "lvm_apply_breakdown.png"
    applied = [
        (cell, breakdown, section)
        for cell, breakdown in cells
        if (section := breakdown.section("lvm_apply_outer")) is not None and section.children
    ]
    if not applied:
        return Plot(name=name, skipped="no finished run has steps in which guidance was applied")
    names = [child for child, parent in SECTION_PARENT.items() if parent == "lvm_apply_outer"]
    means = [{child.name: ms_from_ns(child.mean_ns) for child in section.children} for _, _, section in applied]
    parts = [
        Part(label=child, color=_SECTION_COLORS[child], values=[mean.get(child) for mean in means])
        for child in names
        if any(mean.get(child) for mean in means)
    ]
    rest = [ms_from_ns(max(0, section.children[-1].total_ns) / section.num_steps) for _, _, section in applied]
    if any(rest):
        parts.append(Part(label=_NOT_NAMED, color=GREY, values=rest, is_hatched=True))
    return Plot(
        name=name,
        png=stacked_bars(
            "What applying guidance consists of",
            f"time per step, ms (sum / all steps; {_clock([(cell, found) for cell, found, _ in applied])})",
            [cell.label for cell, _, _ in applied],
            parts,
        ),
    )


def _clock(cells: Sequence[tuple[CellSummary, Breakdown]]) -> str:
    clocks = sorted({clock for _, breakdown in cells for clock in breakdown.clocks})
    return "; ".join(CLOCK_NOTE[clock].split(",")[0] for clock in clocks)


def _draw_flops(cells: Sequence[CellSummary]) -> Plot:
    name = "flops_breakdown.png"
    bars: list[tuple[str, str, tuple[float, ...]]] = []
    for cell in cells:
        flops = [run.flops for run in cell.runs if run.flops is not None]
        published = [account.published for account in flops if account.published is not None]
        observed = [account.observed for account in flops if account.observed is not None]
        for kind, accounts in (("published", published), ("observed", observed)):
            if accounts and len(accounts) == len(cell.runs):
                bars.append((cell.label, f"{cell.label}, {kind}", _mean_parts(accounts)))
    if not bars:
        return Plot(
            name=name, skipped="FLOPs are unknown: no finished run with known model shapes and token counts"
        )
    largest = max(sum(parts) for _, _, parts in bars)
    unit, unit_name = (PETA, "PFLOPs") if largest >= PETA / 2 else (TERA, "TFLOPs")
    parts = [
        Part(label=label, color=color, values=[values[i] / unit for _, _, values in bars])
        for i, (label, color) in enumerate(_FLOPS_PARTS)
    ]
    return Plot(
        name=name,
        png=stacked_bars(
            "FLOPs of a run: charged by the published rule, and observed in the step log",
            f"{unit_name} per run (model FLOPs, not a measurement)",
            [label for _, label, _ in bars],
            [part for part in parts if any(part.values)],
            group=[cell for cell, _, _ in bars],
        ),
    )


def _mean_parts(accounts: Sequence[FlopsAccount]) -> tuple[float, ...]:
    parts = [
        (
            account.base.linear,
            account.base.attention,
            account.base.head,
            account.value_prefill.total,
            account.value_extend.total,
            account.value_candidates.total,
        )
        for account in accounts
    ]
    return tuple(sum(column) / len(accounts) for column in zip(*parts, strict=True))
