"""The time of a step by its sections, one stacked bar for each arm."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from benchctl.analysis.attribution.sections import Breakdown
from benchctl.analysis.summary.runs import CellSummary
from benchctl.records.step import SECTION_PARENT
from benchctl.report.charts.arms import clock_note
from benchctl.report.charts.palette import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, YELLOW
from benchctl.units import ms_from_ns

NO_STEPS: Final = "no finished run has a step log"
NO_SECTIONS: Final = "a forward pass is one section"
UNNAMED: Final = "not named by any section"
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
    "value_model_load": YELLOW,
}
"""Two sections of one colour are never both leaves: one is the parent of the other, has another pattern, or is of
speculation and the other of guidance, which exclude each other."""
_PATTERNS: Final = {"value_model_load": "x", UNNAMED: "/"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionPart:
    """One section in every bar, in ms per step. ``pattern`` is empty, ``/`` or ``x``."""

    name: str
    values_ms: tuple[float, ...]

    @property
    def color(self) -> str:
        return _COLORS.get(self.name, GREY)

    @property
    def pattern(self) -> str:
        return _PATTERNS.get(self.name, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionBars:
    """One bar for each arm; its parts add up to the mean step, or to the sampler where a log times no more."""

    labels: tuple[str, ...]
    parts: tuple[SectionPart, ...]
    longest_ms: float
    clock: str
    clock_notes: tuple[str, ...]
    """The clocks in full sentences."""
    covers_steps: bool

    @property
    def whole(self) -> str:
        return "step" if self.covers_steps else "sampler"

    @property
    def title(self) -> str:
        return "Time per step by section" if self.covers_steps else "Time in the sampler by section"

    @property
    def axis(self) -> str:
        return "time per step, ms" if self.covers_steps else "time in the sampler per step, ms"


def section_bars(cells: Sequence[CellSummary]) -> SectionBars | None:
    """The bars of all cells with a step log; None where no cell has one."""
    pairs = [(cell.label, breakdown) for cell in cells if (breakdown := cell.breakdown()) is not None]
    if not pairs:
        return None
    breakdowns = [breakdown for _, breakdown in pairs]
    return SectionBars(
        labels=tuple(label for label, _ in pairs),
        parts=section_parts(breakdowns),
        longest_ms=max(ms_from_ns(breakdown.step.mean_ns) for breakdown in breakdowns),
        clock=clock_note(clock for breakdown in breakdowns for clock in breakdown.clocks),
        clock_notes=tuple(sorted({breakdown.clock_note for breakdown in breakdowns})),
        covers_steps=all(breakdown.covers_steps for breakdown in breakdowns),
    )


def section_parts(breakdowns: Sequence[Breakdown]) -> tuple[SectionPart, ...]:
    """Every leaf of the sections, and the unnamed rest last; parts that take no time anywhere are left out.

    The values of one breakdown add up to its mean step.
    """
    leaves = [breakdown.leaf_means_ns() for breakdown in breakdowns]
    names = [name for name in SECTION_PARENT if any(name in leaf for leaf in leaves)]
    values_ms = {name: tuple(ms_from_ns(leaf.get(name, 0.0)) for leaf in leaves) for name in names}
    values_ms[UNNAMED] = tuple(
        max(0.0, ms_from_ns(sum(mean for name, mean in leaf.items() if name not in names))) for leaf in leaves
    )
    return tuple(SectionPart(name=name, values_ms=values) for name, values in values_ms.items() if any(values))


def guidance_parts(cells: Sequence[CellSummary]) -> tuple[tuple[CellSummary, ...], tuple[SectionPart, ...], str]:
    """The cells that apply guidance, its parts in ms per step, and the clock; empty without such cells."""
    applying = [
        (cell, breakdown, section)
        for cell in cells
        if (breakdown := cell.breakdown()) is not None
        and (section := breakdown.section("lvm_apply_outer")) is not None
        and section.children
    ]
    means_ms = [{child.name: ms_from_ns(child.mean_ns) for child in section.children} for _, _, section in applying]
    names = [child for child, parent in SECTION_PARENT.items() if parent == "lvm_apply_outer"]
    parts = [SectionPart(name=name, values_ms=tuple(mean.get(name, 0.0) for mean in means_ms)) for name in names]
    rest_ms = [ms_from_ns(max(0, section.children[-1].total_ns) / section.num_steps) for _, _, section in applying]
    parts.append(SectionPart(name=UNNAMED, values_ms=tuple(rest_ms)))
    return (
        tuple(cell for cell, _, _ in applying),
        tuple(part for part in parts if any(part.values_ms)),
        clock_note(clock for _, breakdown, _ in applying for clock in breakdown.clocks),
    )
