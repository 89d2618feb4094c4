"""A measured experiment in memory: its records, its profile, its arms, and all that is derived from single runs."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from benchctl.analysis.attribution.breakdown import RunTimeBreakdown, break_down_run_time
from benchctl.analysis.attribution.flops import RunFlops, count_run_flops, mean_flops
from benchctl.analysis.attribution.work import peaks_of, shapes_of
from benchctl.analysis.experiment.columns import (
    CLIENT_COLUMNS,
    TIME_COLUMNS,
    Value,
    mean_row,
    number_of,
    summary_row,
)
from benchctl.analysis.metrics.loads import mean_metrics
from benchctl.analysis.metrics.run import drafter_of, metrics_and_tails
from benchctl.analysis.metrics.table import METRICS
from benchctl.analysis.statistics.carry_over import CarryOver
from benchctl.analysis.statistics.estimate import (
    DEFAULT_ESTIMATOR,
    Estimator,
    PooledSlope,
    RunKey,
    SideRatio,
    pooled_slope,
)
from benchctl.analysis.validity.answers import Check
from benchctl.analysis.validity.checks import checks_of_loads, failed_checks, reconcile
from benchctl.analysis.validity.machines import scattered_blocks, side_by_side_warning
from benchctl.analysis.validity.steadiness import steadiness_warnings
from benchctl.analysis.validity.usable import Usability, redaction_warnings, usability_of
from benchctl.costs.hardware import Hardware, hardware_or_none
from benchctl.errors import ProfileError, RecordError, UsageError
from benchctl.profile.arrival import Arrival
from benchctl.profile.choices import DEFAULT_THRESHOLD, NO_REQUESTS
from benchctl.profile.engine_table import is_virtual
from benchctl.profile.load import parse_profile
from benchctl.profile.model import Profile, VariantSettings
from benchctl.profile.planning import variant_settings
from benchctl.profile.settings import load_part, under_load
from benchctl.records.directory import arm_label, arm_order, cell_name
from benchctl.records.integrity import Verification, verify_directory
from benchctl.records.loaded import LoadedResults, LoadedRun, load_results
from benchctl.records.peaks import PEAKS, MeasuredPeaks
from benchctl.records.record import PlannedRun, RunRecord
from benchctl.records.schema import Cell, ResultWarning


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One variant in one cell, by block."""

    variant: str
    cell: Cell
    runs: dict[int, LoadedRun]
    """Usable runs."""
    excluded: dict[int, str]
    """Reasons why the other runs are not usable."""
    client_excluded: dict[int, str]
    """Of usable runs: reasons why nothing counts that the client timed."""

    @property
    def key(self) -> tuple[str, str]:
        """Identity of the arm, in this and other experiments."""
        return self.variant, cell_key(self.cell)

    @property
    def label(self) -> str:
        return arm_label(self.variant, self.cell)


def cell_key(cell: Cell) -> str:
    """Name of a cell, whatever the order of its factors."""
    return cell_name(dict(sorted(cell.items())))


def key_of(run: LoadedRun) -> RunKey:
    """Block and arm of a run."""
    return run.record.block, arm_label(run.record.variant, run.record.cell)


Metrics = Mapping[str, float | None]
T = TypeVar("T")


def _derive_once(derive: Callable[["Experiment", LoadedRun], T]) -> Callable[["Experiment", LoadedRun], T]:
    """A method whose value is derived once for each run, and for each of several loads of its server."""

    @wraps(derive)
    def derive_once(self: "Experiment", run: LoadedRun) -> T:
        values: dict[tuple[str, int | None], T] = self._derived[derive.__name__]
        key = run.record.run_id, run.load
        if key not in values:
            values[key] = derive(self, run)
        return values[key]

    return derive_once


@dataclass(frozen=True, eq=False, kw_only=True)
class Experiment:
    """A loaded result directory with everything derived from its runs."""

    results: LoadedResults
    profile_or_none: Profile | None
    """None where the stored profile cannot be read; settings and FLOPs are then unknown."""
    profile_problem: str | None = None
    hardware: Hardware | None = None
    """The device of runs, but for variants that simulate another (``hardware_of``); None where it is unknown."""
    warnings: tuple[ResultWarning, ...] = ()
    allow_suspect: bool = False
    """Suspect runs count as well."""
    _derived: dict[str, dict[Any, Any]] = field(default_factory=lambda: defaultdict(dict), repr=False)
    """Values of runs by method and run or arm, shared with ``first_blocks``."""
    ratios: dict[tuple[Any, ...], SideRatio | None] = field(default_factory=dict, init=False, repr=False)
    """The ratios that were estimated, each once (``ArmPair.ratio``)."""
    carry_over: dict[str, CarryOver] = field(default_factory=dict, init=False, repr=False)
    """What ``carry_over_of`` has estimated."""
    _slopes: dict[tuple[str, bool, str], PooledSlope | None] = field(default_factory=dict, init=False, repr=False)

    @property
    def path(self) -> Path:
        return self.results.path

    @property
    def profile(self) -> Profile:
        """The stored profile. Raises RecordError where it cannot be read."""
        if self.profile_or_none is None:
            raise RecordError(
                f"{self.path / 'profile.yaml'} cannot be read as the profile of these results; restore it:\n"
                f"{self.profile_problem}"
            )
        return self.profile_or_none

    @cached_property
    def verified(self) -> Verification:
        """Its files beside their digests. Raises RecordError where plan or manifest cannot be read."""
        return verify_directory(self.path, {run.record.run_id: run.record for run in self.results.runs})

    @property
    def estimator(self) -> Estimator:
        """The estimator of block ratios that the profile declares."""
        return DEFAULT_ESTIMATOR if self.profile_or_none is None else self.profile_or_none.comparison.estimator

    @property
    def margin_frac(self) -> float:
        """The smallest change that counts, as the profile declares it."""
        return DEFAULT_THRESHOLD if self.profile_or_none is None else self.profile_or_none.comparison.threshold

    def first_blocks(self, num_blocks: int) -> "Experiment":
        """The experiment as it was after ``num_blocks`` blocks; values of single runs are not derived again."""
        plan = msgspec.structs.replace(
            self.results.plan, runs=tuple(run for run in self.results.plan.runs if run.block < num_blocks)
        )
        runs = tuple(run for run in self.results.runs if run.record.block < num_blocks)
        return replace(self, results=replace(self.results, plan=plan, runs=runs))

    def settings(self, record: RunRecord | PlannedRun | Arm) -> VariantSettings | None:
        """Settings of an arm, or of that of a run; None where the profile does not have them."""
        profile = self.profile_or_none
        if profile is None or record.variant not in profile.variants:
            return None
        try:
            return variant_settings(profile, record.variant, record.cell)
        except UsageError:
            return None

    def profile_of(self, record: RunRecord | Arm) -> Profile | None:
        """The profile under the load of a run or an arm; None where the profile cannot be read or has no such load.

        Whoever needs the workload of a run takes it from here.
        """
        with suppress(ProfileError):
            return None if self.profile_or_none is None else under_load(self.profile_or_none, record.cell)
        return None

    def arrival_of(self, record: RunRecord | Arm) -> Arrival | None:
        """The arrival of the load of a run or an arm; None as of ``profile_of``."""
        profile = self.profile_of(record)
        return None if profile is None else profile.workload.arrival

    def hardware_of(self, record: RunRecord | PlannedRun | Arm) -> Hardware | None:
        """The device of a run or an arm: the one that its server simulates, else that of the machine."""
        settings = self.settings(record)
        is_simulated = is_virtual(self.results.manifest.engine)
        if settings is None or not is_simulated or settings.server.simulated_hardware is None:
            return self.hardware
        return hardware_or_none(settings.server.simulated_hardware)

    def metrics(self, run: LoadedRun) -> Metrics:
        """Every metric of a run, including those that do not count; of several loads the mean of logarithms."""
        return self._metrics_and_tails(run)[0]

    @_derive_once
    def _metrics_and_tails(self, run: LoadedRun) -> tuple[Metrics, Mapping[str, float]]:
        if run.several:
            of_loads = [self._metrics_and_tails(load) for load in run.several]
            tails = mean_metrics([tails for _, tails in of_loads])
            known_tails = {name: value for name, value in tails.items() if value is not None}
            return mean_metrics([metrics for metrics, _ in of_loads]), known_tails
        profile = self.profile_of(run.record)
        return (
            metrics_and_tails(run)
            if profile is None
            else metrics_and_tails(run, profile.workload.arrival, profile.slo)
        )

    @_derive_once
    def row(self, run: LoadedRun) -> Mapping[str, Value]:
        """The value of a run in every column of ``SUMMARY_COLUMNS``, including those that do not count."""
        if run.several:
            return mean_row(run, [self.row(load) for load in run.several], self.settings(run.record))
        return summary_row(run, *self._metrics_and_tails(run), self.settings(run.record), self.flops(run))

    def counted(self, run: LoadedRun, column: str, *, of_few: bool = False) -> float | None:
        """A number of a run; None where it is unknown, or timed by a client whose times are excluded.

        ``of_few``: with percentiles of too few requests, which are only shown.
        """
        is_metric = column in METRICS and not of_few
        return (self.counted_metrics(run) if is_metric else self.counted_columns(run)).get(column)

    @_derive_once
    def counted_columns(self, run: LoadedRun) -> Metrics:
        """The numbers of a run in all columns, as ``counted`` has them with percentiles of too few requests."""
        return self._without_excluded(run, {name: number_of(value) for name, value in self.row(run).items()})

    @_derive_once
    def counted_metrics(self, run: LoadedRun) -> Metrics:
        """The metrics of a run, None for those that do not count."""
        return self._without_excluded(run, self.metrics(run))

    def load_metrics(self, run: LoadedRun) -> tuple[Metrics, ...]:
        """The metrics of each load of a run that counts, in order, None for those that do not count."""
        return tuple(self._without_excluded(run, self.metrics(load)) for load in run.loads)

    def _without_excluded(self, run: LoadedRun, numbers: Metrics) -> Metrics:
        if self.usability(run).client_excluded is None:
            return numbers
        return {name: None if name in CLIENT_COLUMNS else number for name, number in numbers.items()}

    @_derive_once
    def checks(self, run: LoadedRun) -> tuple[Check, ...]:
        """Checks of the records of a run against one another and against the profile, load by load."""
        if run.several:
            return checks_of_loads([(load.load, self.checks(load)) for load in run.several])
        settings = self.settings(run.record)
        if settings is None:
            settings = variant_settings(self.profile, run.record.variant, run.record.cell)
        profile, requests = self.profile_of(run.record) or self.profile, self.results.sets.of(run.record.cell)
        return reconcile(run, profile, settings, requests, self.results.manifest.stop)

    @_derive_once
    def contradictions(self, run: LoadedRun) -> tuple[ResultWarning, ...]:
        """A warning for each check that fails now and did not when the run ended."""
        if run.record.state not in {"done", "suspect"} or self.settings(run.record) is None:
            return ()
        if run.several:
            new = [(load.load, warning) for load in run.several for warning in self.contradictions(load)]
            return tuple(msgspec.structs.replace(each, message=f"load {i}: {each.message}") for i, each in new)
        return tuple(one for one in failed_checks(run, self.checks(run)) if one not in run.warnings)

    @_derive_once
    def unsteadiness(self, run: LoadedRun) -> tuple[ResultWarning, ...]:
        """Warnings about a server that was not warm or steady under the loads of a run that ended."""
        has_ended = bool(run.requests) and run.record.state in {"done", "suspect"}
        return steadiness_warnings(run, self.arrival_of(run.record)) if has_ended else ()

    def usability(self, run: LoadedRun) -> Usability:
        """The parts of a run that count, by its state, its warnings, the gates of the profile and its block."""
        usability = self._usability_alone(run)
        reason = self.scattered_blocks.get(run.record.block) if usability.is_usable else None
        return usability if reason is None else Usability(f"block {run.record.block}: {reason}")

    @cached_property
    def scattered_blocks(self) -> Mapping[int, str]:
        """The blocks of which runs that count were measured at several sites, which are left out, with reasons."""
        usable = [run.record for run in self.results.runs if self._usability_alone(run).is_usable]
        return scattered_blocks((record, self.settings(record)) for record in usable)

    @property
    def block_warnings(self) -> tuple[ResultWarning, ...]:
        """A warning for each block that is left out for the sites of its runs, and one of unchecked neighbours."""
        scattered = tuple(
            ResultWarning(code="block-on-several-nodes", message=f"block {block} is left out: {reason}")
            for block, reason in self.scattered_blocks.items()
        )
        beside = side_by_side_warning(run.record for run in self.results.runs)
        return scattered if beside is None else (*scattered, beside)

    @_derive_once
    def _usability_alone(self, run: LoadedRun) -> Usability:
        """The parts of a run that count, whatever became of the other runs of its block."""
        gates = () if self.profile_or_none is None else self.profile_or_none.gates
        return usability_of(run, gates, allow_suspect=self.allow_suspect)

    @_derive_once
    def flops(self, run: LoadedRun) -> RunFlops | None:
        """Published and observed FLOPs of a run, of several loads their mean; None of forward passes and where
        settings or model are unknown.

        The model of someone else's server is ``unknown`` where nobody named it, which deserves no warning.
        """
        if run.several:
            return mean_flops([each for load in run.several if (each := self.flops(load)) is not None])
        settings = self.settings(run.record)
        if settings is None or settings.model == "unknown" or self.results.manifest.dataset == NO_REQUESTS:
            return None
        try:
            base, value_model = shapes_of(settings)
        except UsageError as error:
            where, message = run.record.run_id, f"no FLOPs: {error}"
            return RunFlops(warnings=(ResultWarning(code="model-shape-unknown", message=message, where=where),))
        return count_run_flops(
            run,
            base=base,
            value_model=value_model,
            top_k=settings.sampling.top_k,
            prepared=self.results.sets.of(run.record.cell),
            drafter=drafter_of(settings.server),
        )

    @_derive_once
    def run_time(self, run: LoadedRun) -> RunTimeBreakdown:
        """Breakdown of the time of a run, as measured."""
        metrics, settings = self.counted_metrics(run), self.settings(run.record)
        return break_down_run_time(run, metrics, settings, self.hardware_of(run.record))

    @cached_property
    def arms(self) -> tuple[Arm, ...]:
        """Every arm of the plan: the baseline first, then by variant and factor values."""
        begun = {run.record.run_id: run for run in self.results.runs}
        arms: dict[tuple[str, str], Arm] = {}
        for planned in self.results.plan.runs:
            fresh = Arm(variant=planned.variant, cell=planned.cell, runs={}, excluded={}, client_excluded={})
            arm, run = arms.setdefault(fresh.key, fresh), begun.get(planned.run_id)
            if run is None:
                arm.excluded[planned.block] = f"{planned.run_id}: not begun"
                continue
            usability = self.usability(run)
            if usability.excluded is not None:
                arm.excluded[planned.block] = f"{planned.run_id}: {usability.excluded}"
                continue
            arm.runs[planned.block] = run
            if usability.client_excluded is not None:
                arm.client_excluded[planned.block] = f"{planned.run_id}: {usability.client_excluded}"
        baseline = self.results.manifest.baseline
        return tuple(sorted(arms.values(), key=lambda arm: arm_order(arm.variant, arm.cell, baseline)))

    @cached_property
    def counted_runs(self) -> Mapping[RunKey, LoadedRun]:
        """The runs that count, by block and arm, in plan order."""
        return {key_of(run): run for run in self.results.runs if self.usability(run).is_usable}

    @cached_property
    def offsets(self) -> Mapping[RunKey, float]:
        """Planned position of each run that counts, minus the middle of its block."""
        middle = max((run.record.position for run in self.counted_runs.values()), default=0) / 2
        return {key: run.record.position - middle for key, run in self.counted_runs.items()}

    @cached_property
    def has_ladder(self) -> bool:
        """Servers got several load points, which share the position of their server."""
        return any(planned.ladder for planned in self.results.plan.runs)

    def point_of(self, cell: Cell) -> str:
        """The load point of a cell where servers got several of them, else empty.

        Effects of the position are estimated within a point: pooled over the points of one server they would look
        as certain as if each had a server of its own.
        """
        return cell_key(load_part(cell)) if self.has_ladder else ""

    @cached_property
    def _counted_by_point(self) -> Mapping[str, Mapping[RunKey, LoadedRun]]:
        """The runs that count, by load point."""
        points = defaultdict[str, dict[RunKey, LoadedRun]](dict)
        for key, run in self.counted_runs.items():
            points[self.point_of(run.record.cell)][key] = run
        return points

    def _counted_at(self, cell: Cell) -> Mapping[RunKey, LoadedRun]:
        """The runs that count, of a ladder those at the load point of a cell."""
        return self._counted_by_point.get(self.point_of(cell), {})

    def is_pooled(self, cell: Cell) -> bool:
        """More than two arms, which share one effect of the position; two arms estimate it with their ratio."""
        return len({arm for _, arm in self._counted_at(cell)}) > 2

    def position_slope(self, column: str, cell: Cell, *, of_few: bool = False) -> PooledSlope | None:
        """Effect of one position later on the logarithm of a column, of a ladder at the load point of ``cell``.

        None where it cannot be estimated, and of columns that do not drift with the machine.
        """
        if column not in TIME_COLUMNS:
            return None
        key = column, of_few, self.point_of(cell)
        if key not in self._slopes:
            runs = self._counted_at(cell)
            values = {run_key: self.counted(run, column, of_few=of_few) for run_key, run in runs.items()}
            positions = {run_key: run.record.position for run_key, run in runs.items()}
            self._slopes[key] = pooled_slope(values, positions)
        return self._slopes[key]

    def position_scale(self, run: LoadedRun, metric: str) -> float:
        """Factor that moves a time of a run to the middle of its block: exp(-β offset), with the β of ``metric``.

        1 for a run that does not count, and where no effect can be estimated.
        """
        slope = self.position_slope(metric, run.record.cell)
        return 1.0 if slope is None else math.exp(-slope.log_per_position * self.offset(run))

    def offset(self, run: LoadedRun) -> float:
        """Planned position of a run minus the middle of its block; 0 for one that does not count."""
        return self.offsets.get(key_of(run), 0.0)


def load_experiment(path: Path, *, allow_suspect: bool = False) -> Experiment:
    """Load a whole result directory. Raises RecordError and SchemaVersionError as ``load_results`` does."""
    return experiment_of(load_results(path), allow_suspect=allow_suspect)


def experiment_of(results: LoadedResults, *, allow_suspect: bool = False) -> Experiment:
    """The experiment of a loaded directory, with a warning where its profile cannot be read."""
    source = str(results.path / "profile.yaml")
    profile = hardware = problem = None
    try:
        profile = parse_profile(results.profile_yaml, source)
    except (ProfileError, UsageError) as error:
        problem = str(error)
        message = f"settings and FLOPs of the runs are unknown, because the profile cannot be read: {problem}"
        warnings = [ResultWarning(code="profile-unreadable", message=message, where=source)]
    else:
        measured, peak_warnings = _measured_peaks(results.path)
        hardware, device_warnings = peaks_of(profile, results, measured)
        warnings = [*peak_warnings, *device_warnings, *redaction_warnings(results)]
    return Experiment(
        results=results,
        profile_or_none=profile,
        profile_problem=problem,
        hardware=hardware,
        warnings=tuple(warnings),
        allow_suspect=allow_suspect,
    )


def _measured_peaks(path: Path) -> tuple[MeasuredPeaks | None, tuple[ResultWarning, ...]]:
    """The peaks in a result directory; damaged ones are a warning, and the data sheet's stand for them."""
    try:
        return PEAKS.in_results(path), ()
    except RecordError as error:
        return None, (ResultWarning(code="peaks-unreadable", message=str(error), where=PEAKS.file),)
