"""Which runs and steps the charts show, and in which colour: the same arm looks the same in every chart."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from benchctl.analysis.analyzed import AnalyzedExperiment
from benchctl.analysis.attribution.sections import CLOCK_NOTE
from benchctl.analysis.summary.runs import CellSummary, RunSummary
from benchctl.records.step import Clock
from benchctl.report.page.charts.chart import DASHES, SERIES, color, dash

MAX_ARMS: Final = len(SERIES) * len(DASHES)
"""More lines than this cannot be told apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmLook:
    """An arm and how it is drawn."""

    cell: CellSummary
    color: str
    dash: str

    @property
    def label(self) -> str:
        return self.cell.label


def arm_looks(analysis: AnalyzedExperiment) -> tuple[ArmLook, ...]:
    """Every arm of which a run is usable, the baseline first, at most as many as can be told apart."""
    cells = [cell for cell in analysis.cells if cell.runs][:MAX_ARMS]
    return tuple(ArmLook(cell=cell, color=color(i), dash=dash(i)) for i, cell in enumerate(cells))


def shown_block(runs: Sequence[RunSummary]) -> int | None:
    """The first of the blocks that most of ``runs`` belong to, so that the arms shown stood side by side."""
    blocks = [run.record.block for run in runs]
    return max(sorted(set(blocks)), key=blocks.count, default=None)


def runs_of_block(looks: Sequence[ArmLook], runs: Sequence[RunSummary]) -> list[tuple[ArmLook, RunSummary]]:
    """One of ``runs`` for each arm that has one in the shown block."""
    block = shown_block(runs)
    found = {run.label: run for run in runs if run.record.block == block}
    return [(look, found[look.label]) for look in looks if look.label in found]


def with_steps(looks: Sequence[ArmLook]) -> list[RunSummary]:
    """The usable runs of these arms that have steps beside the warm-up, of which it is known how long they took."""
    runs = [run for look in looks for run in look.cell.runs if run.record.times_whole_steps]
    return [run for run in runs if len(run.run.columns)]


def clock_note(clocks: Iterable[Clock]) -> str:
    """What step times are, in a few words: ``device time``."""
    return ", ".join(CLOCK_NOTE[clock].split(",")[0] for clock in sorted(set(clocks)))
