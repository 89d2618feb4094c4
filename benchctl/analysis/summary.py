"""Every run as one row of numbers, and every variant and cell as the mean over its blocks."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, Final

from benchctl.analysis.accounts import Accounts
from benchctl.analysis.breakdown import Breakdown, StepTally, break_down, tally_steps
from benchctl.analysis.flops_accounting import RunFlops
from benchctl.analysis.summary_columns import LABEL_COLUMNS, SUMMARY_COLUMNS, Value, number_of, summary_row
from benchctl.profile.model import VariantSettings
from benchctl.records.directory import LoadedResults, LoadedRun, arm_label, cell_order
from benchctl.records.run import Cell, ResultWarning, RunRecord

INFEASIBLE_CAUSES: Final = frozenset({"out-of-memory", "infeasible"})
"""Causes of failure that mark a cell and not a mishap: ``infeasible`` are the blocks not tried after the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """One run and its row: a value for every column of ``SUMMARY_COLUMNS``, None where it is unknown."""

    run: LoadedRun
    settings: VariantSettings | None
    flops: RunFlops | None
    values: Mapping[str, Value]
    tally: StepTally
    """Of its steps after the warm-up."""
    warnings: tuple[ResultWarning, ...]

    @property
    def record(self) -> RunRecord:
        return self.run.record

    @property
    def is_usable(self) -> bool:
        """Whether the run may stand in a mean: it ended as planned and every line of it can be read."""
        return self.record.state == "done" and not self.run.is_damaged

    @property
    def label(self) -> str:
        return arm_label(self.record.variant, self.record.cell)

    def number(self, column: str) -> float | None:
        """The value of a column that holds a number."""
        return number_of(self.values[column])


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A value over blocks. ``sd`` is that of a sample (n - 1), ``cv_frac`` = sd / mean; None below two blocks."""

    mean: float
    n: int
    sd: float | None = None
    cv_frac: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CellSummary:
    """One variant in one cell over its blocks; ``spreads`` holds the columns of which a number is known."""

    variant: str
    cell: Cell
    runs: tuple[RunSummary, ...]
    """Usable runs, by block."""
    num_unusable: int
    spreads: Mapping[str, Spread]
    infeasible: str | None = None
    """Why no server can do this cell, where that is why no run of it is usable: ``out of memory``."""

    @property
    def label(self) -> str:
        return arm_label(self.variant, self.cell)

    def mean(self, column: str) -> float | None:
        spread = self.spreads.get(column)
        return None if spread is None else spread.mean

    def breakdown(self) -> Breakdown | None:
        """Where the time of a step sits, over all usable runs."""
        return pooled_breakdown(self.runs)


def summarise_runs(results: LoadedResults, accounts: Accounts) -> tuple[RunSummary, ...]:
    """The row of every run that was begun, in plan order."""
    return tuple(_summarise(run, accounts) for run in results.runs)


def pooled_breakdown(runs: Iterable[RunSummary]) -> Breakdown | None:
    """Where the time of a step sits, over the steps of several runs; None without steps."""
    return break_down(run.tally for run in runs)


def _summarise(run: LoadedRun, accounts: Accounts) -> RunSummary:
    settings = accounts.settings(run.record)
    flops, warnings = accounts.flops(run)
    return RunSummary(
        run=run,
        settings=settings,
        flops=flops,
        values=summary_row(run, settings, flops),
        tally=tally_steps(run.columns, covers_steps=run.record.times_whole_steps),
        warnings=(*run.warnings, *warnings),
    )


def summarise_cells(runs: Iterable[RunSummary], baseline: str) -> tuple[CellSummary, ...]:
    """Each variant and cell over its blocks: the baseline first, then by variant and factor values."""
    groups: dict[str, list[RunSummary]] = {}
    for run in sorted(runs, key=lambda run: arm_order(run.record, baseline)):
        groups.setdefault(run.label, []).append(run)
    return tuple(_over_blocks(group) for group in groups.values())


def arm_order(record: RunRecord, baseline: str) -> tuple[Any, ...]:
    """Sort key: the baseline, then variant, factor values (numbers by size, words by spelling), block."""
    return record.variant != baseline, record.variant, cell_order(record.cell), record.block


def _over_blocks(group: Sequence[RunSummary]) -> CellSummary:
    usable = tuple(run for run in group if run.is_usable)
    spreads = {}
    for column in SUMMARY_COLUMNS:
        numbers = [number for run in usable if (number := run.number(column)) is not None]
        if numbers and column not in LABEL_COLUMNS:
            spreads[column] = _spread(numbers)
    first = group[0].record
    return CellSummary(
        variant=first.variant,
        cell=first.cell,
        runs=usable,
        num_unusable=len(group) - len(usable),
        spreads=spreads,
        infeasible=None if usable else _infeasibility(group),
    )


def _infeasibility(group: Sequence[RunSummary]) -> str | None:
    """What the failures say: a server that ran out of memory, and the runs that were then not tried again."""
    causes = {run.record.failure.cause for run in group if run.record.failure is not None}
    return "out of memory" if causes & INFEASIBLE_CAUSES else None


def _spread(numbers: Sequence[float]) -> Spread:
    mean = fmean(numbers)
    if len(numbers) < 2:
        return Spread(mean=mean, n=len(numbers))
    sd = stdev(numbers)
    return Spread(mean=mean, n=len(numbers), sd=sd, cv_frac=sd / abs(mean) if mean else None)
