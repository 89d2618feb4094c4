"""A sweep of loads over the arms of a profile, on several cores, and the largest load of each arm."""

import multiprocessing
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, product

from benchctl.measure.capacity.objective import Objective
from benchctl.measure.capacity.point import LoadKind, LoadPoint, Metrics, simulate_point
from benchctl.measure.capacity.search import Largest, enclosed, find_largest
from benchctl.profile.model import Profile
from benchctl.profile.planning.plan import arms


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedPoint:
    """A load with its metrics, and whether it holds all objectives."""

    point: LoadPoint
    metrics: Metrics
    holds: bool


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
    with _workers(min(jobs, len(points))) as pool:
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
    )


def _simulated(point: LoadPoint, objectives: Sequence[Objective]) -> SimulatedPoint:
    metrics = simulate_point(point)
    return SimulatedPoint(point=point, metrics=metrics, holds=all(each.holds(metrics) for each in objectives))


def _narrowed(group: list[SimulatedPoint], objectives: Sequence[Objective]) -> list[SimulatedPoint]:
    """The points of an arm, with those that a search for its largest load adds."""
    points, first = list(group), group[0].point

    def holds(size: float) -> bool:
        points.append(_simulated(replace(first, size=size), objectives))
        return points[-1].holds

    find_largest(holds, _capacity(group).largest, is_whole=first.kind == "max-concurrency")
    return points


def _capacity(group: Sequence[SimulatedPoint]) -> ArmCapacity:
    sizes = [each.point.size or 0.0 for each in group]
    return ArmCapacity(label=group[0].point.label, largest=enclosed(sizes, [each.holds for each in group]))


@contextmanager
def _workers(jobs: int) -> Iterator[ProcessPoolExecutor | None]:
    if jobs <= 1:
        yield None
        return
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(
        jobs, context, initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN)
    )
    try:
        yield executor
    except BaseException:
        for process in multiprocessing.active_children():
            process.terminate()
        raise
    finally:
        executor.shutdown(cancel_futures=True)
