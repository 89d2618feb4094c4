"""One result directory, read as far as it can be read, with everything that is derived from it.

``records.load_results`` insists on a whole directory. A person who asks what a half-finished or damaged one
holds is better served by all that is readable and a list of what is not: that is what is opened here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from benchctl.analysis.accounts import open_accounts
from benchctl.analysis.findings import Finding, find
from benchctl.analysis.summary import CellSummary, RunSummary, summarise_cells, summarise_runs
from benchctl.analysis.sweep import SweepRow, sweep_rows
from benchctl.errors import RecordError
from benchctl.records.directory import (
    LoadedResults,
    LoadedRun,
    ResultDirectory,
    RunDirectory,
    load_run,
    open_results,
)
from benchctl.records.run import Plan, PlannedRun, ResultWarning
from benchctl.records.schema import SCHEMA_VERSION

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A result directory and what follows from it.

    ``damage`` are the messages about files that say they are complete and cannot be read whole; nothing that
    rests on them is in a mean. ``warnings`` are the experiment's; those of a run are with the run.
    """

    results: LoadedResults
    runs: tuple[RunSummary, ...]
    cells: tuple[CellSummary, ...]
    sweep: tuple[SweepRow, ...]
    findings: tuple[Finding, ...]
    warnings: tuple[ResultWarning, ...]
    damage: tuple[str, ...]

    @property
    def unbegun(self) -> tuple[PlannedRun, ...]:
        """Planned runs of which nothing is there."""
        begun = {run.record.run_id for run in self.runs}
        return tuple(planned for planned in self.results.plan.runs if planned.run_id not in begun)


def read_results(path: Path) -> Reading:
    """Open, load and analyse a result directory.

    Raises RecordError when ``path`` is none, SchemaVersionError when it is of a newer schema; all other damage
    is reported in the reading.
    """
    results, damage = _load(open_results(path))
    accounts = open_accounts(results)
    runs = summarise_runs(results, accounts)
    baseline = results.manifest.baseline
    cells = summarise_cells(runs, baseline)
    rows = sweep_rows(runs, baseline=baseline, results_dir=str(path))
    return Reading(
        results=results,
        runs=runs,
        cells=cells,
        sweep=rows,
        findings=find(cells, rows, baseline),
        warnings=(*results.manifest.warnings, *accounts.warnings),
        damage=tuple(damage),
    )


def _load(directory: ResultDirectory) -> tuple[LoadedResults, list[str]]:
    damage: list[str] = []

    def readable(read: Callable[[], T], instead: T) -> T:
        try:
            return read()
        except RecordError as error:
            damage.append(str(error))
            return instead

    plan = readable(directory.plan, Plan(schema_version=SCHEMA_VERSION, runs=()))
    begun = [
        run for planned in plan.runs if (run := directory.run(planned.run_id)).path.joinpath("run.json").is_file()
    ]
    loaded = [readable(partial(_load_or_none, run), None) for run in begun]
    runs = tuple(run for run in loaded if run is not None)
    damage += [
        warning.message
        for run in runs
        if run.is_damaged
        for warning in run.warnings
        if warning.code == "damaged-line"
    ]
    results = LoadedResults(
        path=directory.path,
        manifest=directory.manifest(),
        profile_yaml=readable(partial(_profile_text, directory.path / "profile.yaml"), ""),
        plan=plan,
        requests=readable(directory.prepared_requests, ()),
        runs=runs,
    )
    return results, damage


def _load_or_none(directory: RunDirectory) -> LoadedRun | None:
    return load_run(directory)


def _profile_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"{path} cannot be read ({error}); copy the result directory again whole") from error
