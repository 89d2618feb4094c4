"""Questions of capacity, answered in virtual time: the largest load under an objective, the best setting for it."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, product
from math import fsum, sqrt
from pathlib import Path
from typing import Final, Literal, TypeAlias

import numpy as np

from benchctl.analysis.metrics.run import run_metrics
from benchctl.analysis.metrics.table import METRICS
from benchctl.engines.engine import own_options
from benchctl.engines.sim.options import SimOptions
from benchctl.errors import UsageError
from benchctl.measure.run import noise_seed
from benchctl.measure.tokens import planning_tokenizer, prepare_counted
from benchctl.measure.virtual import simulating_processes
from benchctl.measure.warmup import prime_bursts, warmup_bursts
from benchctl.profile.arrival import Arrival
from benchctl.profile.files import did_you_mean
from benchctl.profile.model import Profile, VariantSettings
from benchctl.profile.planning import arms, plan_runs, variant_settings
from benchctl.profile.settings import under_load
from benchctl.records.columns import columns_from
from benchctl.records.directory import RequestSets, arm_label
from benchctl.records.loaded import LoadedRun
from benchctl.records.record import PreparedRequest, RunRecord, RunTimes
from benchctl.records.schema import SCHEMA_VERSION, Cell, Record, ResultWarning, StepRecord
from benchctl.sim.predict import draft_warnings
from benchctl.sim.virtual import VirtualServer, config_of
from benchctl.steptime.model import read_model
from benchctl.units import MS_PER_S
from benchctl.workload.opening import opening_of


@dataclass(frozen=True, slots=True)
class Objective:
    """At most ``limit`` where less of the metric is better, else at least."""

    metric: str
    limit: float

    @property
    def is_upper(self) -> bool:
        return METRICS[self.metric].direction == "lower"

    def __str__(self) -> str:
        return f"{self.metric} {'<=' if self.is_upper else '>='} {self.limit:g} {METRICS[self.metric].unit}"

    def holds(self, metrics: Mapping[str, float | None]) -> bool:
        """True if the metric keeps the limit. Raises UsageError where the load leaves it unknown."""
        value = metrics.get(self.metric)
        if value is None:
            raise UsageError(
                f"--slo {self.metric}: unknown for this load (needs {METRICS[self.metric].needs}; a p99 needs 299 "
                "requests); raise workload.num_prompts, or choose another metric"
            )
        return value <= self.limit if self.is_upper else value >= self.limit


def parse_objective(text: str) -> Objective:
    """``METRIC=LIMIT``. Raises UsageError for a metric that there is none of, or one without a better direction."""
    name, separator, limit = text.partition("=")
    if not separator:
        raise UsageError(f"--slo {text!r}: expected METRIC=LIMIT, such as p99_ttft_ms=200")
    if name not in METRICS:
        reordered = [metric for metric in METRICS if sorted(metric.split("_")) == sorted(name.split("_"))]
        hint = did_you_mean(name, reordered or METRICS) or f"known are {', '.join(METRICS)}"
        raise UsageError(f"--slo {text!r}: no metric is called {name!r}; {hint}")
    if METRICS[name].direction == "none":
        raise UsageError(f"--slo {text!r}: neither more nor less of {name} is better; choose another metric")
    try:
        return Objective(name, float(limit))
    except ValueError:
        raise UsageError(f"--slo {text!r}: {limit!r} is not a number") from None


_WIDTH: Final = 1.02
"""Rates are bisected until the enclosing ones differ by at most this factor."""


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest size that holds the objectives, and the smallest seen to break them; None where there is none."""

    holds: float | None
    breaks: float | None


def enclosed(outcomes: Mapping[float, bool | None]) -> Largest:
    """The result of a grid: the largest size below the first that breaks an objective, and that one.

    ``outcomes`` says of each size if it holds the objectives; None where its load was too short to tell.
    """
    bad = min((size for size, holds in outcomes.items() if holds is False), default=None)
    below = [size for size, holds in outcomes.items() if holds and (bad is None or size < bad)]
    return Largest(max(below, default=None), bad)


def find_largest(tries: Callable[[float], bool | None], start: Largest, *, is_whole: bool) -> Largest:
    """Narrow ``start`` down by calling ``tries``, which says of a size what ``enclosed`` takes."""
    good, bad = start.holds, start.breaks
    for _ in range(40):
        size = _next_size(good, bad, is_whole=is_whole)
        outcome = None if size is None else tries(size)
        if outcome is None:
            break
        good, bad = (size, bad) if outcome else (good, size)
    return Largest(good, bad)


def _next_size(good: float | None, bad: float | None, *, is_whole: bool) -> float | None:
    """The size to try next; None where nothing is left to find."""
    if good is None:
        size = (bad or 2.0) / 2
        return None if is_whole and size < 1 else size // 1 if is_whole else size
    if bad is None:
        return good * 2
    if is_whole:
        return None if bad - good <= 1 else (good + bad) // 2
    return None if bad <= good * _WIDTH else sqrt(good * bad)


_FEWEST_WAVES: Final = 5
LoadKind: TypeAlias = Literal["rate", "max-concurrency"]
"""The size of a load: requests per second of an open loop, or slots of a closed one."""
Metrics: TypeAlias = Mapping[str, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPoint:
    """One arm of a profile under one load. ``settings`` are the overrides that made the profile, as given."""

    profile: Profile
    settings: tuple[str, ...]
    variant: str
    cell: Cell
    kind: LoadKind | None
    size: float | None
    """Requests per second or slots; None for the profile's own load."""

    @property
    def label(self) -> str:
        return " ".join((arm_label(self.variant, self.cell), *self.settings))


def with_load(profile: Profile, kind: LoadKind, size: float) -> Profile:
    """The profile under another load: of its own kind of schedule, or Poisson where that has no rate."""
    arrival = profile.workload.arrival
    if kind == "max-concurrency":
        arrival = Arrival(kind="closed-loop", max_concurrency=round(size))
    elif arrival.rate is not None:
        arrival = arrival.model_copy(update={"request_rate": size})
    else:
        arrival = Arrival(kind="poisson", request_rate=size)
    return profile.model_copy(update={"workload": profile.workload.model_copy(update={"arrival": arrival})})


def simulate_point(point: LoadPoint) -> Metrics:
    """The metrics of a load, each the mean over the profile's blocks; None where a block does not know it."""
    profile = under_load(point.profile, point.cell)
    if point.kind is not None and point.size is not None:
        profile = with_load(profile, point.kind, point.size)
    settings = variant_settings(profile, point.variant, point.cell)
    requests = prepare_counted(profile, planning_tokenizer(profile)).requests
    plan = plan_runs(point.profile.model_copy(update={"per_server": "fresh"}))
    runs = [run for run in plan.runs if (run.variant, run.cell) == (point.variant, point.cell)]
    blocks = [metrics_of_life(profile, settings, requests, noise_seed(profile, run)) for run in runs]
    return {name: _mean([block[name] for block in blocks]) for name in blocks[0]}


def is_long(point: LoadPoint, metrics: Metrics) -> bool:
    """True if a queue has time to grow: the arrivals take five mean latencies, or the slots are filled five times.

    A shorter load is a burst, which a server may absorb at a rate that it cannot sustain.
    """
    num_requests, e2el_ms = metrics["num_requests"], metrics["e2el_ms"]
    if point.size is None:
        return True
    if num_requests is None or e2el_ms is None:
        return False
    if point.kind == "max-concurrency":
        return num_requests >= _FEWEST_WAVES * point.size
    return num_requests / point.size >= _FEWEST_WAVES * e2el_ms / MS_PER_S


def is_idle(point: LoadPoint, metrics: Metrics) -> bool:
    """True for a rate at which requests hardly meet: no smaller one gives better latencies."""
    e2el_ms = metrics["e2el_ms"]
    if point.kind != "rate" or point.size is None or e2el_ms is None:
        return False
    # Mean requests in flight, by Little's law, below which a server counts as idle
    return point.size * e2el_ms / MS_PER_S < 0.1


def metrics_of_life(
    profile: Profile, settings: VariantSettings, requests: Sequence[PreparedRequest], seed: int
) -> Metrics:
    """The metrics of one server life with the warm-up and the load of a profile; ``seed`` is that of its noise."""
    steps: list[StepRecord] = []
    server = VirtualServer(settings, noise_seed=seed, on_step=steps.append)
    priming = prime_bursts(requests, profile.workload.prefix)
    for burst in (*warmup_bursts(requests, profile, settings), *priming):
        list(server.send(burst))
    opening, num_warmups = opening_of(requests, profile)
    times = RunTimes(opening_ns=server.now_ns if num_warmups else None)
    records = tuple(server.send((*opening, *requests), profile.workload.arrival, num_warmups))
    record = RunRecord(
        schema_version=SCHEMA_VERSION,
        run_id=settings.variant,
        index=0,
        block=0,
        position=0,
        variant=settings.variant,
        clock="virtual",
        times=times,
    )
    run = LoadedRun(record=record, requests=records, columns=columns_from(steps))
    return run_metrics(run, profile.workload.arrival, profile.slo)


def _mean(values: list[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return fsum(numbers) / len(numbers) if len(numbers) == len(values) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedPoint:
    """A load with its metrics, and whether it holds all objectives; None where it is too short to tell."""

    point: LoadPoint
    metrics: Metrics
    holds: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """All points by arm and size, and the capacity of each arm where a load was swept."""

    objectives: tuple[Objective, ...]
    kind: LoadKind | None
    points: tuple[SimulatedPoint, ...]
    capacities: dict[str, Largest]
    """By the label of the arm."""
    warnings: tuple[ResultWarning, ...] = ()


def sweep_points(
    profiles: Sequence[tuple[tuple[str, ...], Profile]], kind: LoadKind | None, sizes: Sequence[float]
) -> tuple[LoadPoint, ...]:
    """Every arm of every profile under every load; with no sizes, under its own."""
    return tuple(
        LoadPoint(profile=profile, settings=settings, variant=variant, cell=cell, kind=kind, size=size)
        for settings, profile in profiles
        for (variant, cell), size in product(arms(profile), sizes or (None,))
    )


def run_sweep(points: Sequence[LoadPoint], objectives: Sequence[Objective], *, searches: bool, jobs: int) -> Sweep:
    """Simulate all points; with ``searches``, narrow the largest load of each arm down by further ones.

    Raises UsageError where a setting cannot be simulated or an objective stays unknown.
    """
    objectives, kind = tuple(objectives), points[0].kind
    jobs = min(jobs, len(points))
    with simulating_processes(jobs) if jobs > 1 else nullcontext() as pool:
        simulate = partial(_simulated, objectives=objectives)
        done = list(map(simulate, points) if pool is None else pool.map(simulate, points))
        groups = [list(group) for _, group in groupby(done, key=lambda each: each.point.label)]
        narrow = partial(_narrowed, objectives=objectives)
        if kind is not None and searches:
            groups = list(map(narrow, groups) if pool is None else pool.map(narrow, groups))
    has_limits = kind is not None and objectives
    return Sweep(
        objectives=objectives,
        kind=kind,
        points=tuple(each for group in groups for each in sorted(group, key=lambda each: each.point.size or 0)),
        capacities={group[0].point.label: _capacity(group) for group in groups} if has_limits else {},
        warnings=draft_warnings(
            config_of(variant_settings(each.profile, each.variant, each.cell)) for each in points
        ),
    )


def _simulated(point: LoadPoint, objectives: Sequence[Objective]) -> SimulatedPoint:
    metrics = simulate_point(point)
    holds: bool | None = all(each.holds(metrics) for each in objectives)
    if holds and not is_long(point, metrics):
        holds = None
    return SimulatedPoint(point=point, metrics=metrics, holds=holds)


def _narrowed(group: list[SimulatedPoint], objectives: Sequence[Objective]) -> list[SimulatedPoint]:
    """The points of an arm, with those that a search for its largest load adds."""
    first, by_size = group[0].point, {each.point.size: each for each in group}

    def holds(size: float) -> bool | None:
        if size not in by_size:
            by_size[size] = _simulated(replace(first, size=size), objectives)
        tried = by_size[size]
        return None if is_idle(tried.point, tried.metrics) and not tried.holds else tried.holds

    find_largest(holds, _capacity(group), is_whole=first.kind == "max-concurrency")
    return list(by_size.values())


def _capacity(group: Sequence[SimulatedPoint]) -> Largest:
    """The largest load of one arm under the objectives."""
    return enclosed({each.point.size or 0.0: each.holds for each in group})


class Predicted(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One metric of one arm: its value with the fitted coefficients, and between which values the draws lie."""

    value: float
    low: float
    high: float


class ArmPrediction(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The metrics of one arm that are known in every draw."""

    arm: str
    num_draws: int
    level: float
    metrics: dict[str, Predicted]


def predict_intervals(
    profile: Profile, requests: RequestSets, num_draws: int, level: float = 0.9
) -> tuple[ArmPrediction, ...]:
    """The interval of each metric of each arm, over at most ``num_draws`` draws.

    Raises UsageError where an arm is priced by anything but a fitted model with draws.
    """
    predictions = []
    for variant, cell in arms(profile):
        settings = variant_settings(profile, variant, cell)
        count = min(num_draws, _num_draws(settings))
        loaded, sent = under_load(profile, cell), requests.of(cell)
        value = metrics_of_life(loaded, _with_noise(settings, "none"), sent, 0)
        drawn = _with_noise(settings, "fitted")
        draws = [metrics_of_life(loaded, drawn, sent, seed) for seed in range(count)]
        metrics = {}
        for name, centre in value.items():
            numbers = [number for draw in draws if (number := draw[name]) is not None]
            if centre is not None and len(numbers) == count:
                low, high = np.quantile(numbers, ((1 - level) / 2, (1 + level) / 2))
                metrics[name] = Predicted(value=centre, low=float(low), high=float(high))
        predictions.append(
            ArmPrediction(arm=arm_label(variant, cell), num_draws=count, level=level, metrics=metrics)
        )
    return tuple(predictions)


def _with_noise(settings: VariantSettings, noise: str) -> VariantSettings:
    return settings.model_copy(update={"server": settings.server.model_copy(update={"noise": noise})})


def _num_draws(settings: VariantSettings) -> int:
    """Bootstrap draws of the model that prices an arm. Raises UsageError for fewer than two."""
    options = own_options(settings, SimOptions)
    if options.step_time_model is None:
        raise UsageError(
            f"{settings.variant}: cost model {options.cost_model} has no uncertainty to draw from; take cost_model "
            "fitted with a step_time_model, or leave --draws out"
        )
    count = len(read_model(Path(options.step_time_model).expanduser()).draws)
    if count < 2:
        raise UsageError(
            f"{options.step_time_model}: the model has no bootstrap draws; fit it with some, or leave --draws out"
        )
    return count
