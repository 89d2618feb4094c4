"""Pictures of stacked bars: the sections of a step, what guidance consists of, and FLOPs by their account."""

from collections.abc import Sequence
from typing import Final

from benchctl.analysis.analyzed import AnalyzedExperiment
from benchctl.analysis.summary.runs import CellSummary
from benchctl.costs.flops import FlopsAccount
from benchctl.report.charts.palette import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION, YELLOW
from benchctl.report.charts.sections import NO_SECTIONS, NO_STEPS, SectionPart, guidance_parts, section_bars
from benchctl.report.plots.style import Part, Plot, stacked_bars
from benchctl.units import PETA, TERA

_FLOPS_PARTS: Final = (
    ("base: projections", BLUE),
    ("base: attention", SKY),
    ("base: vocabulary head", PURPLE),
    ("value model: prefill", YELLOW),
    ("value model: extend prefixes", ORANGE),
    ("value model: score candidates", VERMILION),
    ("draft model", GREEN),
)


def draw_sections(analysis: AnalyzedExperiment) -> tuple[Plot, ...]:
    """``per_step_breakdown.png``: the time of a step by its sections."""
    name = "per_step_breakdown.png"
    if analysis.passes is not None:
        return (Plot(name=name, skipped=NO_SECTIONS),)
    bars = section_bars(_cells(analysis))
    if bars is None:
        return (Plot(name=name, skipped=NO_STEPS),)
    title = bars.title if bars.covers_steps else f"{bars.title} (not of whole steps)"
    x_label = f"{bars.axis} (sum / all steps; {bars.clock})"
    return (Plot(name=name, png=stacked_bars(title, x_label, bars.labels, _parts(bars.parts))),)


def draw_guidance(analysis: AnalyzedExperiment) -> tuple[Plot, ...]:
    """``lvm_apply_breakdown.png``: the sections of applying guidance."""
    name = "lvm_apply_breakdown.png"
    cells, parts, clock = guidance_parts(_cells(analysis))
    if not cells:
        return (Plot(name=name, skipped="no finished run has steps in which guidance was applied"),)
    x_label = f"time per step, ms (sum / all steps; {clock})"
    labels = [cell.label for cell in cells]
    return (
        Plot(name=name, png=stacked_bars("Time of applying guidance by section", x_label, labels, _parts(parts))),
    )


def draw_flops(analysis: AnalyzedExperiment) -> tuple[Plot, ...]:
    """``flops_breakdown.png``: FLOPs as the published rule charges them, and as the step log shows them."""
    name = "flops_breakdown.png"
    bars: list[tuple[str, str, tuple[float, ...]]] = []
    for cell in _cells(analysis):
        flops = [run.flops for run in cell.runs if run.flops is not None]
        published = [account.published for account in flops if account.published is not None]
        observed = [account.observed for account in flops if account.observed is not None]
        for kind, accounts in (("published", published), ("observed", observed)):
            if accounts and len(accounts) == len(cell.runs):
                bars.append((cell.label, f"{cell.label}, {kind}", _mean_parts(accounts)))
    if not bars:
        reason = "FLOPs are unknown: no finished run with known model shapes and token counts"
        return (Plot(name=name, skipped=reason),)
    largest = max(sum(values) for _, _, values in bars)
    unit, unit_name = (PETA, "PFLOPs") if largest >= PETA / 2 else (TERA, "TFLOPs")
    parts = [
        Part(label=label, color=color, values=[values[i] / unit for _, _, values in bars])
        for i, (label, color) in enumerate(_FLOPS_PARTS)
    ]
    png = stacked_bars(
        "FLOPs of a run: charged by the published rule, and observed in the step log",
        f"{unit_name} per run (model FLOPs, not a measurement)",
        [label for _, label, _ in bars],
        [part for part in parts if any(part.values)],
        group=[cell for cell, _, _ in bars],
    )
    return (Plot(name=name, png=png),)


def _cells(analysis: AnalyzedExperiment) -> list[CellSummary]:
    return [cell for cell in analysis.cells if cell.runs]


def _parts(parts: Sequence[SectionPart]) -> list[Part]:
    return [
        Part(label=part.name, color=part.color, values=part.values_ms, hatch=part.pattern and 4 * part.pattern)
        for part in parts
    ]


def _mean_parts(accounts: Sequence[FlopsAccount]) -> tuple[float, ...]:
    parts = [
        (
            account.base.linear,
            account.base.attention,
            account.base.head,
            account.value_prefill.total,
            account.value_extend.total,
            account.value_candidates.total,
            account.draft.total,
        )
        for account in accounts
    ]
    return tuple(sum(column) / len(accounts) for column in zip(*parts, strict=True))
