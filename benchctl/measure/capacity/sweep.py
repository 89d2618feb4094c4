"""A sweep of loads over the arms of a profile, on several cores, and the largest load of each arm."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, product

from benchctl.measure.capacity.objective import Objective
from benchctl.measure.capacity.point import LoadKind, LoadPoint, Metrics, is_idle, is_long, simulate_point
from benchctl.measure.capacity.search import Largest, enclosed, find_largest
from benchctl.measure.simulated_runs import simulating_processes
from benchctl.profile.model import Profile
from benchctl.profile.planning import arms, variant_settings
from benchctl.records.schema import ResultWarning
from benchctl.sim.settings import config_of
from benchctl.sim.speculation.fitted_drafts import draft_warnings


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedPoint:
    """A load with its metrics, and whether it holds all objectives; None where it is too short to tell."""

    point: LoadPoint
    metrics: Metrics
    holds: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmCapacity:
    """The largest load of one arm under the objectives."""

    label: str
    largest: Largest


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """All points by arm and size, and the capacity of each arm where a load was swept."""

    objectives: tuple[Objective, ...]
    kind: LoadKind | None
    points: tuple[SimulatedPoint, ...]
    capacities: tuple[ArmCapacity, ...]
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
    capacities = () if kind is None or not objectives else tuple(map(_capacity, groups))
    return Sweep(
        objectives=objectives,
        kind=kind,
        points=tuple(each for group in groups for each in sorted(group, key=lambda each: each.point.size or 0)),
        capacities=capacities,
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

    find_largest(holds, _capacity(group).largest, is_whole=first.kind == "max-concurrency")
    return list(by_size.values())


def _capacity(group: Sequence[SimulatedPoint]) -> ArmCapacity:
    outcomes = {each.point.size or 0.0: each.holds for each in group}
    return ArmCapacity(label=group[0].point.label, largest=enclosed(outcomes))
