"""Capacities: the largest load at which an arm keeps the objective, by block, and the ratio of two arms."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from statistics import geometric_mean, median
from typing import NamedTuple

from benchctl.analysis.experiment.experiment import Arm, Experiment
from benchctl.analysis.experiment.pairing import ArmPair
from benchctl.analysis.metrics.latency import known_values
from benchctl.analysis.statistics.estimate import (
    BlockDesign,
    SideRatio,
    Values,
    level_interval,
    side_ratio,
    unpaired_ratio,
)
from benchctl.analysis.statistics.intervals import Interval
from benchctl.analysis.statistics.isotone import Crossing, crossing
from benchctl.profile.sizes import capacity_metric, size_factor
from benchctl.records.loaded import LoadedRun
from benchctl.units import count_of


class CapacityPoint(NamedTuple):
    """One load of one server."""

    size: float
    log_ratio: float | None = None
    """ln(slo_ratio), at most 0 where the objective holds; None where it is unknown."""
    breaks: bool = False
    """It breaks the objective without a latency of its own: a backlog grows, or too many requests failed."""


class Capacity(NamedTuple):
    """The capacity of one arm in one block."""

    points: tuple[CapacityPoint, ...]
    crossing: Crossing
    size: float | None
    """None where it is censored, and where none of its loads counts, which says nothing about it."""
    limit: str | None
    """The reason why it is censored, with a remedy, or not exact; else None."""


class ArmCapacity(NamedTuple):
    """The capacity of an arm over its blocks."""

    arm: Arm
    """Without the size of its load; of each block it has the run of one load."""
    loads: tuple[Arm, ...]
    """The arms that differ in the size of their load alone."""
    blocks: Mapping[int, Capacity]
    level: float | None = None
    """The centre, whose quotient is the ratio; None where a block is censored."""
    interval: Interval | None = None
    """Of these requests on another server; None for few blocks."""

    @property
    def sizes(self) -> Values:
        """Those of the blocks."""
        return [each.size for each in self.blocks.values()]

    @property
    def is_censored(self) -> bool:
        """True where a block has loads that count and no capacity: the others are no fair sample."""
        return any(each.size is None and each.limit is not None for each in self.blocks.values())

    @property
    def elasticity(self) -> float | None:
        """The median over the blocks."""
        of_blocks = known_values(each.crossing.elasticity for each in self.blocks.values())
        return median(of_blocks) if of_blocks else None

    @property
    def limits(self) -> list[str]:
        """``fast holds at 125, the most that was sent: send more (3 of 8 blocks)`` for each limit of its blocks."""
        limits, blocks = Counter(each.limit for each in self.blocks.values()), count_of(len(self.blocks), "block")
        return [f"{self.arm.label} {limit} ({count} of {blocks})" for limit, count in limits.items() if limit]


def capacities_of(experiment: Experiment, metric: str) -> list[ArmCapacity]:
    """The capacity ``metric`` of each arm that has loads of several sizes, in each of its blocks."""
    arms: dict[str, Arm] = {}
    loads: dict[str, dict[float, Arm]] = {}
    for load in experiment.arms:
        factor = size_factor(load.cell, metric)
        if factor is not None:
            cell = {other: value for other, value in load.cell.items() if other != factor}
            arm = replace(load, cell=cell, runs={})
            arms.setdefault(arm.label, arm).runs.update(load.runs)
            loads.setdefault(arm.label, {})[float(str(load.cell[factor]))] = load
    capacities = []
    for label, arm in arms.items():
        of_sizes = sorted(loads[label].items(), key=lambda item: item[0])
        blocks = {
            block: capacity_of([point_of(experiment, load.runs.get(block), size) for size, load in of_sizes])
            for block in sorted(arm.runs)
        }
        capacities.append(ArmCapacity(arm, tuple(load for _, load in of_sizes), blocks))
    return capacities


def point_of(experiment: Experiment, run: LoadedRun | None, size: float) -> CapacityPoint:
    """A load by its steady window; without one by all of it, where the profile has it begin steady."""
    profile = experiment.profile
    if run is None or profile.slo is None:
        return CapacityPoint(size)
    metrics = experiment.counted_metrics(run)
    ratio, attained = metrics["steady_slo_ratio"], metrics["slo_attained_frac"]
    if ratio is None and (profile.load.begin == "running" or profile.load.discard > 0):
        ratio = metrics["slo_ratio"]
    is_overloaded = any(warning.code == "backlog-grows" for warning in experiment.unsteadiness(run))
    breaks = is_overloaded or (ratio is None and attained is not None and attained < profile.slo.share)
    return CapacityPoint(size, math.log(ratio) if ratio and not breaks else None, breaks)


def capacity_of(points: Sequence[CapacityPoint]) -> Capacity:
    """The capacity by the loads of one block, the smallest first.

    It is censored where the sizes do not bracket it, or where a load that may lie beside it has no latency; but not
    where no load counts.
    """
    fitting = [(point.size, point.log_ratio) for point in points if point.log_ratio is not None]
    breaks_from = min((point.size for point in points if point.breaks), default=None)
    fitted = crossing([size for size, _ in fitting], [ratio for _, ratio in fitting], breaks_from)
    size, holds, breaks, elasticity = fitted
    unknown = [
        each.size
        for each in points
        if each.log_ratio is None and not each.breaks and (holds or 0.0) < each.size < (breaks or math.inf)
    ]
    limit = None
    if len(unknown) == len(points):
        size = None
    elif unknown:
        size, limit = None, f"has no latency at {unknown[0]:g}: the load is too short, or does not count"
    elif size is None and holds is None:
        limit = f"breaks at {breaks:g}, the least that was sent: send less, or raise the limits"
    elif size is None:
        limit = f"holds at {holds:g}, the most that was sent: send more"
    elif elasticity is None:
        limit = f"lies between {holds:g} and {breaks:g}, where a backlog grows or requests fail"
    return Capacity(tuple(points), fitted, size, limit)


class CapacityPair(NamedTuple):
    """Two arms whose capacities are compared."""

    metric: str
    pair: ArmPair
    """Without the sizes of their loads."""
    loads: tuple[ArmPair, ...]
    """Under each load."""
    values: tuple[tuple[float | None, ...], tuple[float | None, ...]]
    """The capacities of each side, block by block."""
    ratio: SideRatio | None
    """B over A; the effect of the position is removed where two servers got all loads of a block."""
    censored: str | None
    """Limits of both sides; None where every block whose loads count has a capacity."""


def capacity_pairs(pairs: Sequence[ArmPair], metric: str) -> list[CapacityPair]:
    """The arms of which ``pairs`` are the loads."""
    capacities: list[CapacityPair] = []
    if not pairs:
        return capacities
    a_side, b_side = pairs[0].sides
    for a, b in product(capacities_of(a_side, metric), capacities_of(b_side, metric)):
        a_keys, b_keys = ({load.key for load in side.loads} for side in (a, b))
        loads = tuple(pair for pair in pairs if pair.a.key in a_keys and pair.b.key in b_keys)
        if not loads:
            continue
        pair = replace(loads[0], a=a.arm, b=b.arm)
        of_a, of_b = (
            tuple(side.blocks[run.record.block].size for run in runs)
            for side, runs in ((a, pair.a_runs), (b, pair.b_runs))
        )
        if pair.pairing == "unpaired":
            ratio = unpaired_ratio(of_a, of_b, pair.confidence)
        else:
            has_position = a_side.has_ladder and not a_side.is_pooled(loads[0].a.cell)
            design = pair.design if has_position else BlockDesign(pair.blocks)
            ratio = side_ratio(of_a, of_b, design, pair.confidence, pair.estimator)
        censored = "; ".join([*a.limits, *b.limits]) if a.is_censored or b.is_censored else None
        capacities.append(CapacityPair(metric, pair, loads, (of_a, of_b), ratio, censored))
    return capacities


def arm_capacities(experiment: Experiment, pairs: Sequence[ArmPair], confidence: float) -> tuple[ArmCapacity, ...]:
    """The capacity of each arm, in the order of the arms; none where the profile asks for none.

    ``pairs`` are all arms against the baseline: the levels of two arms are those whose quotient their ratio is.
    """
    profile = experiment.profile_or_none
    metric = None if profile is None else capacity_metric(profile)
    if metric is None:
        return ()
    levels: dict[str, float] = {}
    for _, pair, _, _, ratio, _ in capacity_pairs(pairs, metric):
        if ratio is not None:
            levels = {pair.a.label: ratio.a, pair.b.label: ratio.b} | levels
    rows = []
    for each in capacities_of(experiment, metric):
        sizes, interval = known_values(each.sizes), None
        level = levels.get(each.arm.label, geometric_mean(sizes)) if sizes and not each.is_censored else None
        if level is not None:
            interval = level_interval(sizes, level, confidence)
        rows.append(each._replace(level=level, interval=interval))
    return tuple(rows)
