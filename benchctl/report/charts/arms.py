"""The arms and runs that charts draw."""

from collections.abc import Iterable, Sequence
from typing import Final

from benchctl.analysis.attribution.breakdown import CLOCK_NOTE
from benchctl.analysis.summary.analyzed import AnalyzedExperiment
from benchctl.analysis.summary.summary import CellSummary, RunSummary
from benchctl.records.schema import Clock
from benchctl.report.charts.figure import MAX_SERIES

MAX_RUNS_BY_BLOCK: Final = 72
"""Charts of single runs hold no more than this, in whole blocks."""


def arms_of(analysis: AnalyzedExperiment) -> list[CellSummary]:
    """Every arm with a usable run, the baseline first, at most as many as can be told apart."""
    return [cell for cell in analysis.cells if cell.runs][:MAX_SERIES]


def runs_by_block(
    arms: Sequence[CellSummary], runs: Sequence[RunSummary], max_runs: int = MAX_RUNS_BY_BLOCK
) -> dict[int, list[RunSummary]]:
    """One of ``runs`` for each arm in each block; the first of the blocks that most belong to comes first.

    Where these are more than ``max_runs``, the other blocks are chosen at equal distances.
    """
    blocks = [run.record.block for run in runs]
    if not blocks:
        return {}
    first = max(sorted(set(blocks)), key=blocks.count)
    others = sorted(set(blocks) - {first})
    room = max(0, max_runs // len(arms) - 1)
    chosen = others if len(others) <= room else [others[i * len(others) // room] for i in range(room)]
    result = {}
    for block in (first, *chosen):
        by_label = {run.label: run for run in runs if run.record.block == block}
        result[block] = [by_label[arm.label] for arm in arms if arm.label in by_label]
    return result


def runs_with_steps(arms: Sequence[CellSummary]) -> list[RunSummary]:
    """The usable runs of these arms whose step log has steps after the warm-up and times whole steps."""
    runs = [run for arm in arms for run in arm.runs if run.record.times_whole_steps]
    return [run for run in runs if len(run.run.columns)]


def clock_note(clocks: Iterable[Clock]) -> str:
    """The clock of step times in a few words: ``device time``."""
    return ", ".join(CLOCK_NOTE[clock].split(",")[0] for clock in sorted(set(clocks)))
