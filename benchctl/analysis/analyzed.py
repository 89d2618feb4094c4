"""One result directory with everything that is derived from it.

A half-finished or damaged one yields everything that is readable and a list of the damage.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchctl.analysis.bonus.results import MeasuredBonus, bonus_of
from benchctl.analysis.compare.attribution import section_split, step_floor
from benchctl.analysis.compare.by_node import nodes_of_variants
from benchctl.analysis.experiment.experiment import Experiment, experiment_of
from benchctl.analysis.experiment.ladder import Ladder, divide_ladders
from benchctl.analysis.experiment.paired_runs import PairedRuns
from benchctl.analysis.experiment.pairing import baseline_pairs
from benchctl.analysis.experiment.stopping import num_looks_of
from benchctl.analysis.summary.columns import Value
from benchctl.analysis.summary.draft_findings import draft_findings
from benchctl.analysis.summary.finding import Finding
from benchctl.analysis.summary.findings import collect_findings
from benchctl.analysis.summary.floor_findings import floor_findings
from benchctl.analysis.summary.node_findings import node_findings
from benchctl.analysis.summary.nodes import NodeResults
from benchctl.analysis.summary.passes import Passes, has_requests, summarise_passes
from benchctl.analysis.summary.runs import CellSummary, RunSummary, summarise_cells, summarise_runs
from benchctl.analysis.summary.speculation_findings import speculation_findings
from benchctl.analysis.summary.sweep import SweepRow, infeasible_values, sweep_rows
from benchctl.analysis.validity.integrity import integrity_warnings
from benchctl.errors import RecordError
from benchctl.profile.model import Profile
from benchctl.records.claims.lock import current_manifest
from benchctl.records.directory import ResultDirectory, open_results
from benchctl.records.loaded import LoadedResults, LoadedRun, load_run, settled_runs
from benchctl.records.manifest import Plan, PlannedRun
from benchctl.records.record import ResultWarning
from benchctl.records.schema import SCHEMA_VERSION

if TYPE_CHECKING:
    from benchctl.records.request import PreparedRequest

CONFIDENCE: Final = 0.95
"""Of the intervals of tables, before a correction for the looks of a stopping rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalyzedExperiment:
    """A result directory with its summaries, comparisons with the baseline, findings and warnings.

    ``damage`` are messages about files that should be complete and cannot be read whole; no mean includes their
    runs. ``warnings`` are the experiment's; those of a run are with the run.
    """

    experiment: Experiment
    runs: tuple[RunSummary, ...]
    cells: tuple[CellSummary, ...]
    sweep: tuple[SweepRow, ...]
    ladders: tuple[Ladder, ...]
    passes: Passes | None
    """None for an experiment of requests."""
    bonus: MeasuredBonus | None
    """Which way of backfill is cheaper; None for an experiment that does not compare them."""
    nodes: tuple[NodeResults, ...]
    """Each variant against the baseline by node, where its blocks ran on more than one."""
    findings: tuple[Finding, ...]
    warnings: tuple[ResultWarning, ...]
    damage: tuple[str, ...]

    @property
    def results(self) -> LoadedResults:
        return self.experiment.results

    @property
    def profile(self) -> Profile | None:
        """None where it cannot be read."""
        return self.experiment.profile_or_none

    @property
    def runs_not_begun(self) -> tuple[PlannedRun, ...]:
        """Planned runs without any record."""
        begun = {run.record.run_id for run in self.runs}
        return tuple(planned for planned in self.results.plan.runs if planned.run_id not in begun)

    @property
    def missing_step_times_reason(self) -> str:
        """The reason why step times cannot be drawn, where no finished run has them."""
        finished = [run for run in self.runs if run.is_usable and len(run.run.columns)]
        if not all(run.record.times_whole_steps for run in finished):
            return "the step log times the sampler alone: neither duration nor start of a step is known"
        return self.missing_runs_reason("no finished run has a step log")

    def missing_runs_reason(self, reason: str) -> str:
        """``reason``, or that every run is suspect, and the command that draws them all the same."""
        suspect = [run for run in self.runs if run.record.state == "suspect"]
        if not suspect or any(run.is_usable for run in self.runs):
            return reason
        return (
            f"no run counts: {len(suspect)} of {len(self.runs)} are suspect ({suspect[0].usability.excluded}); "
            "'benchctl report --allow-suspect' draws them"
        )

    @property
    def infeasible(self) -> tuple[CellSummary, ...]:
        """Cells of other variants than the baseline that no server can run, in the order of all cells."""
        baseline = self.results.manifest.baseline
        return tuple(cell for cell in self.cells if cell.infeasible is not None and cell.variant != baseline)

    def sweep_values(self) -> tuple[Mapping[str, Value], ...]:
        """The rows of ``sweep_summary.csv``: every cell that was compared, then those that no server can run."""
        beyond = (infeasible_values(cell, str(self.results.source)) for cell in self.infeasible)
        return (*(row.values for row in self.sweep), *beyond)


def analyze_directory(path: Path, *, allow_suspect: bool = False) -> AnalyzedExperiment:
    """Open, load and analyse a result directory, or an archive of one.

    Suspect runs count only with ``allow_suspect``.

    Raises UsageError when ``path`` is not one, SchemaVersionError when its schema is newer; all other damage
    is reported in ``damage``.
    """
    results, damage = _load(open_results(path))
    return analyze(experiment_of(results, allow_suspect=allow_suspect), damage)


def analyze(experiment: Experiment, damage: Sequence[str] = ()) -> AnalyzedExperiment:
    """Analyse an experiment that is loaded already."""
    results = experiment.results
    manifest, directory = results.manifest, ResultDirectory(results.path, archive=results.archive)
    runs = summarise_runs(experiment)
    confidence = 1 - (1 - CONFIDENCE) / num_looks_of(manifest, manifest)
    pairs = [PairedRuns.of(pair, (experiment, experiment)) for pair in baseline_pairs(experiment)]
    cells = summarise_cells(runs, experiment, pairs)
    rows = sweep_rows(
        pairs,
        runs,
        confidence=confidence,
        results_dir=str(results.source),
        floor_of=lambda paired: step_floor(paired, confidence),
    )
    splits = {paired.pair.b.label: section_split(paired, confidence) for paired in pairs}
    nodes = nodes_of_variants(pairs, confidence)
    sections = {label: split for label, split in splits.items() if split is not None}
    return AnalyzedExperiment(
        experiment=experiment,
        runs=runs,
        cells=cells,
        sweep=rows,
        ladders=divide_ladders(experiment, confidence),
        passes=None if has_requests(manifest) else summarise_passes(cells, pairs, confidence),
        bonus=bonus_of(experiment),
        nodes=nodes,
        findings=(
            *node_findings(nodes),
            *collect_findings(cells, rows, manifest.baseline, sections),
            *floor_findings(rows),
            *draft_findings(runs, cells),
            *speculation_findings(cells, rows, manifest.baseline),
        ),
        warnings=(
            *integrity_warnings(directory),
            *manifest.warnings,
            *experiment.warnings,
            *experiment.block_warnings,
            *(warning for paired in pairs for warning in paired.prompt_differences()),
        ),
        damage=tuple(dict.fromkeys(damage)),
    )


def _load(directory: ResultDirectory) -> tuple[LoadedResults, list[str]]:
    damage: list[str] = []
    plan, profile_yaml = Plan(schema_version=SCHEMA_VERSION, runs=()), ""
    requests: tuple[PreparedRequest, ...] = ()
    runs: list[LoadedRun] = []
    with _collecting(damage):
        plan = directory.due_plan()
    for run in (directory.run(planned.run_id) for planned in plan.runs):
        with _collecting(damage):
            if run.is_begun():
                runs.append(load_run(run))
                damage += runs[-1].damage
    with _collecting(damage):
        profile_yaml = directory.profile_yaml()
    with _collecting(damage):
        requests = directory.prepared_requests()
    manifest = current_manifest(directory)
    results = LoadedResults(
        path=directory.path,
        archive=directory.archive,
        manifest=manifest,
        profile_yaml=profile_yaml,
        plan=plan,
        requests=requests,
        runs=settled_runs(runs, manifest),
    )
    return results, damage


@contextmanager
def _collecting(damage: list[str]) -> Iterator[None]:
    """Collects the message of a file that cannot be read, which is left out."""
    try:
        yield
    except RecordError as error:
        damage.append(str(error))
