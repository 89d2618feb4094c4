"""The arms and runs that charts draw, each arm in the same colour everywhere."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from benchctl.analysis.analyzed import AnalyzedExperiment
from benchctl.analysis.attribution.sections import CLOCK_NOTE
from benchctl.analysis.summary.runs import CellSummary, RunSummary
from benchctl.records.step import Clock
from benchctl.report.charts.palette import DASHES, SERIES, series_color, series_dash

MAX_ARMS: Final = len(SERIES) * len(DASHES)
"""More lines than this cannot be told apart."""
MAX_RUNS_BY_BLOCK: Final = 72
"""Charts of single runs hold no more than this, in whole blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmStyle:
    """An arm with its colour and dash."""

    cell: CellSummary
    color: str
    dash: str

    @property
    def label(self) -> str:
        return self.cell.label


def arm_styles(analysis: AnalyzedExperiment) -> tuple[ArmStyle, ...]:
    """Every arm with a usable run, the baseline first, at most as many as can be told apart."""
    cells = [cell for cell in analysis.cells if cell.runs][:MAX_ARMS]
    return tuple(ArmStyle(cell=cell, color=series_color(i), dash=series_dash(i)) for i, cell in enumerate(cells))


def runs_of_one_block(arms: Sequence[ArmStyle], runs: Sequence[RunSummary]) -> list[tuple[ArmStyle, RunSummary]]:
    """One of ``runs`` for each arm, all from the block that most of them belong to (the first such block)."""
    blocks = [run.record.block for run in runs]
    block = max(sorted(set(blocks)), key=blocks.count, default=None)
    by_label = {run.label: run for run in runs if run.record.block == block}
    return [(arm, by_label[arm.label]) for arm in arms if arm.label in by_label]


def runs_by_block(
    arms: Sequence[ArmStyle], runs: Sequence[RunSummary], max_runs: int = MAX_RUNS_BY_BLOCK
) -> dict[int, list[tuple[ArmStyle, RunSummary]]]:
    """One of ``runs`` for each arm in each block; the block that most belong to comes first, empty without runs.

    Where these are more than ``max_runs``, the other blocks are chosen at equal distances.
    """
    first = runs_of_one_block(arms, runs)
    if not first:
        return {}
    first_block = first[0][1].record.block
    others = sorted({run.record.block for run in runs} - {first_block})
    room = max(0, max_runs // len(arms) - 1)
    chosen = others if len(others) <= room else [others[i * len(others) // room] for i in range(room)]
    blocks = {first_block: first}
    for block in chosen:
        by_label = {run.label: run for run in runs if run.record.block == block}
        blocks[block] = [(arm, by_label[arm.label]) for arm in arms if arm.label in by_label]
    return blocks


def runs_with_steps(arms: Sequence[ArmStyle]) -> list[RunSummary]:
    """The usable runs of these arms whose step log has steps after the warm-up and times whole steps."""
    runs = [run for arm in arms for run in arm.cell.runs if run.record.times_whole_steps]
    return [run for run in runs if len(run.run.columns)]


def clock_note(clocks: Iterable[Clock]) -> str:
    """The clock of step times in a few words: ``device time``."""
    return ", ".join(CLOCK_NOTE[clock].split(",")[0] for clock in sorted(set(clocks)))
