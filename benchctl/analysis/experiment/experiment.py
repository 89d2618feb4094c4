"""A measured experiment in memory: its records, its profile, and what each run says, each derived once.

Everything that reads a result directory starts here. The profile is parsed when the directory is opened; settings,
metrics, checks and FLOPs of a run are derived when they are first asked for.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import msgspec

from benchctl.analysis.attribution.flops import RunFlops, account_run
from benchctl.analysis.attribution.peaks import peaks_of
from benchctl.analysis.attribution.roofline import work_model
from benchctl.analysis.attribution.run_time import Latency, RunAnatomy, anatomy_of, request_latencies
from benchctl.analysis.metrics.bounds import Bounds, run_bounds
from benchctl.analysis.metrics.run_metrics import run_metrics
from benchctl.analysis.metrics.table import CLIENT_TIMED, POSITION_ADJUSTED
from benchctl.analysis.statistics.block_ratio import DEFAULT_ESTIMATOR, Estimator, PooledSlope
from benchctl.analysis.statistics.position_effect import PositionEffects, RunKey
from benchctl.analysis.validity.reconcile import Check, expected_of, reconcile
from benchctl.analysis.validity.usability import Usability, usability_of
from benchctl.costs.hardware import Hardware
from benchctl.costs.shapes import shape_for
from benchctl.errors import ProfileError, RecordError, UsageError
from benchctl.profile.load import parse_profile
from benchctl.profile.model import Profile, VariantSettings
from benchctl.profile.planning.plan import variant_settings
from benchctl.profile.workload import Arrival
from benchctl.records.directory import arm_label
from benchctl.records.loaded import LoadedResults, LoadedRun, load_results
from benchctl.records.record import ResultWarning
from benchctl.records.run import RunRecord

Metrics = Mapping[str, float | None]
T = TypeVar("T")
K = TypeVar("K")


@dataclass(frozen=True, eq=False, kw_only=True)
class Experiment:
    """A loaded result directory with everything that is derived from single runs of it."""

    results: LoadedResults
    profile_or_none: Profile | None
    """None where the stored profile cannot be read: settings and FLOPs are then unknown."""
    profile_problem: str | None = None
    hardware: Hardware | None = None
    """The device whose peaks FLOP/s may be compared with."""
    warnings: tuple[ResultWarning, ...] = ()
    allow_suspect: bool = False
    """Suspect runs count."""
    _settings: dict[str, VariantSettings | None] = field(default_factory=dict, repr=False)
    _metrics: dict[str, Metrics] = field(default_factory=dict, repr=False)
    _bounds: dict[str, Mapping[str, Bounds]] = field(default_factory=dict, repr=False)
    _checks: dict[str, tuple[Check, ...]] = field(default_factory=dict, repr=False)
    _flops: dict[str, tuple[RunFlops | None, tuple[ResultWarning, ...]]] = field(default_factory=dict, repr=False)
    _usability: dict[str, Usability] = field(default_factory=dict, repr=False)
    _anatomies: dict[str, RunAnatomy] = field(default_factory=dict, repr=False)
    _latencies: dict[str, Mapping[str, Latency] | None] = field(default_factory=dict, repr=False)

    @property
    def path(self) -> Path:
        return self.results.path

    @property
    def profile(self) -> Profile:
        """The profile. Raises RecordError where ``profile.yaml`` was damaged since it was written."""
        if self.profile_or_none is None:
            raise RecordError(
                f"{self.path / 'profile.yaml'} cannot be read as the profile of these results; restore it:\n"
                f"{self.profile_problem}"
            )
        return self.profile_or_none

    @property
    def estimator(self) -> Estimator:
        """How block ratios are averaged, as the profile declares it."""
        return DEFAULT_ESTIMATOR if self.profile_or_none is None else self.profile_or_none.comparison.estimator

    def first_blocks(self, num_blocks: int) -> "Experiment":
        """The experiment as it was after so many blocks; what is derived from single runs is not derived again."""
        plan = msgspec.structs.replace(
            self.results.plan, runs=tuple(run for run in self.results.plan.runs if run.block < num_blocks)
        )
        runs = tuple(run for run in self.results.runs if run.record.block < num_blocks)
        return replace(self, results=replace(self.results, plan=plan, runs=runs))

    def settings(self, record: RunRecord) -> VariantSettings | None:
        """What the arm of a run used; None where the profile does not say so."""
        return _once(self._settings, arm_label(record.variant, record.cell), lambda: self._settings_of(record))

    def metrics(self, run: LoadedRun) -> Metrics:
        """Every metric of a run, whatever it is worth."""
        return _once(self._metrics, run.record.run_id, lambda: run_metrics(run, self._arrival))

    def counted_metrics(self, run: LoadedRun) -> Metrics:
        """The metrics of a run that count: what the client timed is unknown where its times are excluded, and what
        rests on bounds where they are not.
        """
        left_out = CLIENT_TIMED if self.usability(run).client_excluded is not None else self.bounds(run).keys()
        return {name: None if name in left_out else value for name, value in self.metrics(run).items()}

    def bounds(self, run: LoadedRun) -> Mapping[str, Bounds]:
        """The metrics of a run that rest on arrivals which are only known between bounds."""
        return _once(self._bounds, run.record.run_id, lambda: run_bounds(run))

    def checks(self, run: LoadedRun) -> tuple[Check, ...]:
        """Whether the records of a run agree with one another and with what was declared."""
        return _once(self._checks, run.record.run_id, lambda: self._checks_of(run))

    def usability(self, run: LoadedRun) -> Usability:
        """What of a run counts, by its state, its warnings and the gates of the profile."""
        gates = () if self.profile_or_none is None else self.profile_or_none.gates
        return _once(
            self._usability,
            run.record.run_id,
            lambda: usability_of(run, gates, allow_suspect=self.allow_suspect),
        )

    def flops(self, run: LoadedRun) -> tuple[RunFlops | None, tuple[ResultWarning, ...]]:
        """Published and observed FLOPs of a run; None when its settings or the shape of a model are unknown."""
        return _once(self._flops, run.record.run_id, lambda: self._flops_of(run))

    def anatomy(self, run: LoadedRun) -> RunAnatomy:
        """Where the time of a run went, as measured."""

        def anatomy() -> RunAnatomy:
            metrics = self.counted_metrics(run)
            return anatomy_of(run, metrics, work_model(self.settings(run.record), self.hardware))

        return _once(self._anatomies, run.record.run_id, anatomy)

    def latencies(self, run: LoadedRun) -> Mapping[str, Latency] | None:
        """What the latency of each request of a run consists of, as measured; None where that does not count."""
        if self.counted_metrics(run)["e2el_ms"] is None:
            return None
        return _once(self._latencies, run.record.run_id, lambda: request_latencies(run))

    @cached_property
    def counted_runs(self) -> Mapping[RunKey, LoadedRun]:
        """The runs that count, by block and arm, in plan order."""
        begun = {run.record.run_id: run for run in self.results.runs}
        return {
            (planned.block, arm_label(planned.variant, planned.cell)): run
            for planned in self.results.plan.runs
            if (run := begun.get(planned.run_id)) is not None and self.usability(run).is_usable
        }

    @cached_property
    def position_effects(self) -> PositionEffects:
        """Planned positions of the runs that count."""
        planned = {(run.block, arm_label(run.variant, run.cell)): run.position for run in self.results.plan.runs}
        return PositionEffects({key: planned[key] for key in self.counted_runs})

    @cached_property
    def is_pooled(self) -> bool:
        """More than two arms share one effect of the position; two estimate it with their ratio."""
        return len({arm for _, arm in self.counted_runs}) > 2

    @cached_property
    def position_slopes(self) -> Mapping[str, PooledSlope]:
        """What one position later adds to the logarithm of each metric, where that can be told."""
        metrics = {key: self.counted_metrics(run) for key, run in self.counted_runs.items()}
        slopes = {
            name: self.position_effects.log_slope({key: values[name] for key, values in metrics.items()})
            for name in POSITION_ADJUSTED
        }
        return {name: slope for name, slope in slopes.items() if slope is not None}

    def position_scale(self, run: LoadedRun, metric: str) -> float:
        """What brings a time of a run to the middle of its block: exp(-β offset), with the β of ``metric``.

        1 for a run that does not count, and where no effect can be told.
        """
        slope = self.position_slopes.get(metric)
        return 1.0 if slope is None else math.exp(-slope.log_per_position * self.offset(run))

    def offset(self, run: LoadedRun) -> float:
        """Planned position of a run less the middle of its block; 0 for one that does not count."""
        position = self._planned_positions.get(run.record.run_id)
        if position is None or not self.usability(run).is_usable:
            return 0.0
        return position - self.position_effects.centre

    @property
    def _arrival(self) -> Arrival | None:
        return None if self.profile_or_none is None else self.profile_or_none.workload.arrival

    @cached_property
    def _planned_positions(self) -> Mapping[str, int]:
        return {planned.run_id: planned.position for planned in self.results.plan.runs}

    def slope_of(self, value_of: Callable[[LoadedRun], float | None]) -> PooledSlope | None:
        """What one position later adds to the logarithm of any other value of a run."""
        values = {key: value_of(run) for key, run in self.counted_runs.items()}
        return self.position_effects.log_slope(values)

    def _settings_of(self, record: RunRecord) -> VariantSettings | None:
        if self.profile_or_none is None or record.variant not in self.profile_or_none.variants:
            return None
        try:
            return variant_settings(self.profile_or_none, record.variant, record.cell)
        except UsageError:
            return None

    def _checks_of(self, run: LoadedRun) -> tuple[Check, ...]:
        settings = self.settings(run.record)
        if settings is None:
            settings = variant_settings(self.profile, run.record.variant, run.record.cell)
        manifest = self.results.manifest
        return reconcile(run, expected_of(self.profile, settings, self.results.requests, manifest.stop))

    def _flops_of(self, run: LoadedRun) -> tuple[RunFlops | None, tuple[ResultWarning, ...]]:
        """A value model counts where the run's requests asked for guidance, not where one lay idle."""
        settings = self.settings(run.record)
        if settings is None:
            return None, ()
        guided_by = settings.server.guides_with if settings.guidance is not None else None
        try:
            base = shape_for(settings.model)
            value_model = None if guided_by is None else shape_for(guided_by)
        except UsageError as error:
            unknown = ResultWarning(
                code="model-shape-unknown", message=f"no FLOPs: {error}", where=run.record.run_id
            )
            return None, (unknown,)
        flops = account_run(
            run,
            base=base,
            value_model=value_model,
            top_k=settings.sampling.top_k,
            hardware=self.hardware,
            prepared=self.results.requests,
        )
        return flops, flops.warnings


def load_experiment(path: Path, *, allow_suspect: bool = False) -> Experiment:
    """Read a whole result directory. Raises RecordError and SchemaVersionError as ``load_results`` does."""
    return experiment_of(load_results(path), allow_suspect=allow_suspect)


def experiment_of(results: LoadedResults, *, allow_suspect: bool = False) -> Experiment:
    """The experiment of a loaded directory; a warning says so where its profile cannot be read."""
    source = str(results.path / "profile.yaml")
    try:
        profile = parse_profile(results.profile_yaml, source)
    except (ProfileError, UsageError) as error:
        unreadable = ResultWarning(
            code="profile-unreadable",
            message=f"settings and FLOPs of the runs are unknown, because the profile cannot be read: {error}",
            where=source,
        )
        return Experiment(
            results=results,
            profile_or_none=None,
            profile_problem=str(error),
            warnings=(unreadable,),
            allow_suspect=allow_suspect,
        )
    hardware, warnings = peaks_of(profile, results.manifest)
    return Experiment(
        results=results,
        profile_or_none=profile,
        hardware=hardware,
        warnings=warnings,
        allow_suspect=allow_suspect,
    )


def _once(known: dict[K, T], key: K, derive: Callable[[], T]) -> T:
    """The value of ``key``, derived when it is first asked for."""
    if key not in known:
        known[key] = derive()
    return known[key]
