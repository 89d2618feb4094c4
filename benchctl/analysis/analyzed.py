"""A result directory with everything that is derived from it: runs, arms, ratios, findings, warnings.

Also the two parts that only some experiments have: forward passes (the time of one pass by point and mode, and the
cost of its launches), and latencies of requests (values for a distribution, percentiles with their intervals).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from benchctl.analysis.attribution.estimate import Split, logarithmic_mean
from benchctl.analysis.bonus import MeasuredBonus, bonus_of
from benchctl.analysis.compare.cells import NodeResults, decompose_pair, nodes_of_variants
from benchctl.analysis.experiment.capacity import ArmCapacity, arm_capacities
from benchctl.analysis.experiment.carry_over import carry_over_of, carry_over_warnings
from benchctl.analysis.experiment.columns import Value
from benchctl.analysis.experiment.curves import Curve, curves_of
from benchctl.analysis.experiment.experiment import Arm, Experiment, experiment_of
from benchctl.analysis.experiment.ladder import Ladder, divide_ladders
from benchctl.analysis.experiment.looks import looked_confidence
from benchctl.analysis.experiment.pairing import ArmPair, baseline_pairs
from benchctl.analysis.experiment.scatter import scatter_by_metric
from benchctl.analysis.experiment.summary import (
    SWEEP_COLUMNS,
    CellSummary,
    RunSummary,
    SweepRow,
    summarise_cells,
)
from benchctl.analysis.findings import Finding, collect_findings
from benchctl.analysis.metrics.chunks import latencies_ns
from benchctl.analysis.metrics.latency import PERCENTS, is_completed, measured
from benchctl.analysis.metrics.table import LATENCIES, OF_SLO
from benchctl.analysis.planning import precision_of
from benchctl.analysis.statistics.carry_over import CarryOver
from benchctl.analysis.statistics.components import Components
from benchctl.analysis.statistics.estimate import level_interval
from benchctl.analysis.statistics.intervals import Interval
from benchctl.analysis.validity.machines import gpu_names, machines_of
from benchctl.analysis.validity.usable import alteration_warnings
from benchctl.costs.hardware import hardware_or_none
from benchctl.errors import InvalidDataError
from benchctl.profile.choices import NO_REQUESTS
from benchctl.profile.model import Profile
from benchctl.records.directory import cell_name
from benchctl.records.loaded import LoadedResults, load_results
from benchctl.records.record import PlannedRun
from benchctl.records.schema import ResultWarning
from benchctl.units import NS_PER_MS, ms_from_ns, us_from_ms

LEVEL: Final = "p50_step_ms"


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTimes:
    """One point in one mode; times in ms."""

    cell: CellSummary
    num_replays: int
    median_ms: float
    interval_ms: Interval | None
    """Of the median; None for one block."""
    p5_ms: float
    p95_ms: float
    floor_ms: float | None
    """The least time of such a pass by its FLOPs and bytes; None where the peaks of the device are unknown."""

    @property
    def times_floor(self) -> float | None:
        """The median over the floor."""
        return self.median_ms / self.floor_ms if self.floor_ms else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchCost:
    """One point in the baseline's mode and in another; times in ms."""

    label: str
    num_blocks: int
    baseline_ms: float
    other_ms: float
    interval_ms: Interval | None
    """Of the difference; None for one block."""
    ratio: float
    num_operators: int | None
    """Operators of one pass, each of which is a launch or a few; None where they were not counted."""

    @property
    def saved_ms(self) -> float:
        """The baseline less the other."""
        return self.baseline_ms - self.other_ms

    @property
    def us_per_operator(self) -> float | None:
        """Time that each operator adds to the pass, in microseconds."""
        return us_from_ms(self.saved_ms) / self.num_operators if self.num_operators else None


def summarise_passes(
    cells: Sequence[CellSummary], pairs: Sequence[ArmPair], confidence: float
) -> tuple[tuple[PassTimes, ...], tuple[LaunchCost, ...]]:
    """The passes of cells with usable runs, and the launch cost of each pair; decodes before prefills."""
    variants = list(dict.fromkeys(cell.variant for cell in cells))

    def order(arm: Arm | CellSummary) -> tuple[int, str]:
        return variants.index(arm.variant), str(arm.cell.get("phase", ""))

    times = [_times(cell, confidence) for cell in sorted(cells, key=order)]
    launches = [_launch_cost(paired) for paired in sorted(pairs, key=lambda paired: order(paired.b))]
    return tuple(each for each in times if each is not None), tuple(each for each in launches if each is not None)


def _times(cell: CellSummary, confidence: float) -> PassTimes | None:
    level = cell.centre(LEVEL)
    if level is None:
        return None
    durations = np.concatenate([run.run.columns.dur_ns for run in cell.runs])
    p5, p95 = np.percentile(durations, (5, 95))
    floors_ns = {run.record.floor_ns for run in cell.runs if run.record.floor_ns is not None}
    return PassTimes(
        cell=cell,
        num_replays=len(durations),
        median_ms=level,
        interval_ms=level_interval([run.counted(LEVEL) for run in cell.runs], level, confidence),
        p5_ms=ms_from_ns(float(p5)),
        p95_ms=ms_from_ns(float(p95)),
        floor_ms=ms_from_ns(max(floors_ns)) if floors_ns else None,
    )


def _launch_cost(paired: ArmPair) -> LaunchCost | None:
    ratio = paired.ratio(LEVEL)
    if ratio is None:
        return None
    mean_ms, bounds = logarithmic_mean(ratio.a, ratio.b), ratio.estimate.log_interval
    counts = {run.record.effective_config.get("server.operators") for run in paired.b.runs.values()}
    count = counts.pop() if len(counts) == 1 else None  # the same in every run of one point
    return LaunchCost(
        label=paired.label,
        num_blocks=ratio.estimate.num_blocks,
        baseline_ms=ratio.a,
        other_ms=ratio.b,
        interval_ms=None if bounds is None else (-bounds[1] * mean_ms, -bounds[0] * mean_ms),
        ratio=ratio.estimate.ratio,
        num_operators=count if isinstance(count, int) else None,
    )


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
    curves: tuple[Curve, ...]
    """Of each arm over its load; empty where no load was swept."""
    passes: tuple[PassTimes, ...] | None
    """The forward passes, each point in each mode; None for an experiment of requests."""
    launches: tuple[LaunchCost, ...]
    """Empty where only one mode was measured."""
    bonus: MeasuredBonus | None
    """Which way of backfill is cheaper; None for an experiment that does not compare them."""
    nodes: tuple[NodeResults, ...]
    """Each variant against the baseline by node, where its blocks ran on more than one."""
    scatter: Mapping[str, Components]
    """Variance components of the primary metrics; empty where no server got several loads."""
    capacities: tuple[ArmCapacity, ...]
    """The capacity of each arm; empty where the profile asks for none."""
    carry_over: Mapping[str, CarryOver]
    """By metric, and by ratio of a metric; empty where no server got several load points."""
    precision: str | None
    """What the declared precision costs, in words; None where scatter or costs are unknown."""
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
    def lacks(self) -> frozenset[str]:
        """Metrics that it does not have, because requests have no objective."""
        return OF_SLO if self.profile is None or self.profile.slo is None else frozenset()

    @property
    def floor_peaks(self) -> str | None:
        """The peaks that floors of passes were computed with, in words; None where no floor is known."""
        if all(times.floor_ms is None for times in self.passes or ()):
            return None
        sheet = next((hardware_or_none(name) for name in gpu_names(machines_of(self.results))), None)
        if sheet is not None:
            return f"{sheet.name}, {sheet.source}"
        hardware = self.experiment.hardware
        return None if hardware is None else f"the fastest rounds of {hardware.title}, less a margin"

    @property
    def runs_not_begun(self) -> tuple[PlannedRun, ...]:
        """Planned runs without any record."""
        begun = {run.record.run_id for run in self.runs}
        return tuple(planned for planned in self.results.plan.runs if planned.run_id not in begun)

    @property
    def missing_step_times_reason(self) -> str:
        """The reason why step times cannot be drawn, where no finished run that counts has them."""
        finished = [run for run in self.runs if run.is_usable and len(run.run.columns)]
        if not all(run.record.times_whole_steps for run in finished):
            return "the step log times the sampler alone: neither duration nor start of a step is known"
        suspect = [run for run in self.runs if run.record.state == "suspect"]
        if not suspect or any(run.is_usable for run in self.runs):
            return "no finished run has a step log"
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
        beyond: Iterator[dict[str, Value]] = (
            dict.fromkeys(SWEEP_COLUMNS)
            | {
                "results_dir": str(self.results.path),
                "variant": cell.variant,
                "cell": cell_name(cell.cell),
                "n_blocks": 0,
                "infeasible": cell.infeasible,
            }
            for cell in self.infeasible
        )
        return (*(row.values for row in self.sweep), *beyond)


def analyze_directory(path: Path, *, allow_suspect: bool = False) -> AnalyzedExperiment:
    """Open, load and analyse a result directory.

    Suspect runs count only with ``allow_suspect``.

    Raises UsageError when ``path`` is not one, SchemaVersionError when its schema is newer; all other damage
    is reported in ``damage``.
    """
    damage: list[str] = []
    return analyze(experiment_of(load_results(path, damage), allow_suspect=allow_suspect), damage)


def analyze(experiment: Experiment, damage: Sequence[str] = ()) -> AnalyzedExperiment:
    """Analyse an experiment that is loaded already."""
    results = experiment.results
    manifest = results.manifest
    runs = tuple(RunSummary(run, experiment) for run in results.runs)
    confidence = looked_confidence(results, results, CONFIDENCE)
    pairs, scatter = baseline_pairs(experiment, confidence), scatter_by_metric(experiment)
    cells = summarise_cells(runs, experiment, pairs)
    rows = tuple(SweepRow(paired, _work_of(paired)) for paired in pairs)
    effects = carry_over_of(experiment)
    passes, launches = summarise_passes(cells, pairs, confidence) if manifest.dataset == NO_REQUESTS else (None, ())
    return AnalyzedExperiment(
        experiment=experiment,
        runs=runs,
        cells=cells,
        sweep=rows,
        ladders=divide_ladders(experiment, confidence),
        curves=curves_of(cells, experiment, confidence),
        passes=passes,
        launches=launches,
        bonus=bonus_of(experiment),
        nodes=nodes_of_variants(pairs),
        scatter=scatter,
        capacities=arm_capacities(experiment, pairs, confidence),
        carry_over=effects,
        precision=precision_of(experiment, scatter),
        findings=collect_findings(runs, cells, rows, manifest.baseline),
        warnings=(
            *_integrity_warnings(experiment),
            *manifest.warnings,
            *experiment.warnings,
            *experiment.block_warnings,
            *carry_over_warnings(effects),
            *(warning for paired in pairs for warning in paired.prompt_differences()),
        ),
        damage=tuple(dict.fromkeys(damage)),
    )


def _integrity_warnings(experiment: Experiment) -> tuple[ResultWarning, ...]:
    """Warnings about alterations of a result directory; none if its plan cannot be read."""
    try:
        return alteration_warnings(experiment.path, experiment.verified)
    except InvalidDataError:  # reading the directory reports it as damage
        return ()


def _work_of(paired: ArmPair) -> Split | str:
    """The mean step by the floors of the models, or the reason why these are unknown."""
    decomposition = decompose_pair(paired)
    return "neither wall times nor steps are known" if decomposition is None else decomposition.work


LATENCY_NAMES: Final = {
    "ttft": "time to first token (TTFT)",
    "tpot": "time per output token (TPOT)",
    "itl": "gap between chunks (ITL)",
    "e2el": "end-to-end latency (E2EL)",
}
Sorted: TypeAlias = NDArray[np.float64]
"""Values in ms that ascend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PercentileLevel:
    """One percentile of an arm, in ms."""

    level_ms: float
    interval_ms: Interval | None
    """None for one block."""
    num_requests: int | None = None
    """Fewest requests of a block, where they are too few for this percentile; None where they are not."""


def few_requests(runs: Iterable[RunSummary], percent: int) -> int | None:
    """The fewest requests of which a percentile is shown although it needs more; None where no run shows one."""
    few = (run.number("num_completed") for run in runs if f"p{percent}" in str(run.values["few_requests"]))
    return min((int(number) for number in few if number is not None), default=None)


def percentile_levels(cell: CellSummary, latency: str, confidence: float) -> tuple[PercentileLevel | None, ...]:
    """Those of ``PERCENTS`` over the blocks of an arm; None where no block knows one."""
    levels = []
    for percent in PERCENTS:
        name = f"p{percent}_{latency}_ms"
        level = level_of_blocks([run.counted(name) for run in cell.runs], cell.centre(name), confidence)
        levels.append(level and replace(level, num_requests=few_requests(cell.runs, percent)))
    return tuple(levels)


def level_of_blocks(
    values: Sequence[float | None], level_ms: float | None, confidence: float
) -> PercentileLevel | None:
    """The percentile at ``level_ms`` with the interval of the blocks' values; None where it is unknown."""
    if level_ms is None:
        return None
    return PercentileLevel(level_ms=level_ms, interval_ms=level_interval(values, level_ms, confidence))


def run_latencies(run: RunSummary) -> Mapping[str, Sorted]:
    """Every latency of the completed requests of a run, without warm-up; only latencies that count."""
    completed = [request for request in measured(run.run.requests) if is_completed(request)]
    durations_ns = {name: values for name, values in latencies_ns(completed).items() if len(values)}
    factor = run.record.clock_factor / NS_PER_MS
    return {
        name: np.sort(np.asarray(durations_ns[name], dtype=np.float64)) * factor
        for name in LATENCIES
        if name in durations_ns and run.counted(f"{name}_ms") is not None
    }
