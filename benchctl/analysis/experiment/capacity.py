"""Capacities: the largest load at which an arm keeps the objective, by block, and the ratio of two arms."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import geometric_mean, median
from typing import NamedTuple

from benchctl.analysis.experiment.experiment import Arm, Experiment
from benchctl.analysis.experiment.pairing import ArmPair
from benchctl.analysis.metrics.latency import known_values
from benchctl.analysis.statistics.estimate import (
    BlockDesign,
    SideRatio,
    level_interval,
    scatter_of,
    side_ratio,
    unpaired_ratio,
)
from benchctl.analysis.statistics.intervals import Interval
from benchctl.analysis.statistics.isotone import Crossing, crossing
from benchctl.profile.sections import CAPACITIES
from benchctl.profile.settings import setting_of
from benchctl.profile.sizes import capacity_metric
from benchctl.records.directory import arm_label
from benchctl.records.loaded import LoadedRun
from benchctl.records.schema import Cell
from benchctl.units import count_of


class CapacityPoint(NamedTuple):
    """One load of one server."""

    size: float
    log_ratio: float | None
    """ln(slo_ratio), at most 0 where the objective holds; None where it is unknown."""
    breaks: bool = False
    """It breaks the objective without a latency of its own: a backlog grows, or too many requests failed."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """The capacity of one arm in one block."""

    points: tuple[CapacityPoint, ...]
    crossing: Crossing
    position: int | None
    """That of its server in the block; None where each load had a server of its own."""

    @property
    def size(self) -> float | None:
        """None where it is censored."""
        return None if self.why_censored else self.crossing.size

    @property
    def why_censored(self) -> str | None:
        """The reason why it has no size, with a remedy; None where it has one."""
        holds, breaks = self.crossing.holds, self.crossing.breaks
        for size, log_ratio, is_broken in self.points:
            if log_ratio is None and not is_broken and (holds or 0.0) < size < (breaks or math.inf):
                return f"has no latency at {size:g}: the load is too short, or does not count"
        if self.crossing.size is not None:
            return None
        if holds is not None:
            return f"holds at {holds:g}, the most that was sent: send more"
        return f"breaks at {breaks:g}, the least that was sent: send less, or raise the limits"


def size_of(cell: Cell, metric: str) -> float | None:
    """The size of the load of a cell, of which ``metric`` is the capacity; None where it is not swept."""
    return next((float(str(value)) for factor, value in cell.items() if _is_size(factor, metric)), None)


def without_size(cell: Cell, metric: str) -> Cell:
    """A cell without the size of its load: those that share it share a capacity."""
    return {factor: value for factor, value in cell.items() if not _is_size(factor, metric)}


def _is_size(factor: str, metric: str) -> bool:
    return setting_of(factor) == ("workload", "arrival", CAPACITIES[metric])


def capacities_of(experiment: Experiment, arms: Iterable[Arm], metric: str) -> dict[int, Capacity]:
    """The capacity by block of arms that differ in the size of their load alone."""
    runs: dict[int, list[LoadedRun]] = {}
    points: dict[int, list[CapacityPoint]] = {}
    for arm in arms:
        size = size_of(arm.cell, metric) or 0.0
        for block in arm.excluded:
            points.setdefault(block, []).append(CapacityPoint(size, None))
        for block, run in arm.runs.items():
            runs.setdefault(block, []).append(run)
            points.setdefault(block, []).append(point_of(experiment, run, size))
    return {block: _capacity(sorted(points[block]), runs[block]) for block in sorted(runs)}


def point_of(experiment: Experiment, run: LoadedRun, size: float) -> CapacityPoint:
    """A load by its steady window; without one by all of it, where the profile has it begin steady."""
    profile, metrics = experiment.profile, experiment.counted_metrics(run)
    begins_steady = profile.load.begin == "running" or profile.load.discard > 0
    ratio, attained = metrics["steady_slo_ratio"], metrics["slo_attained_frac"]
    if ratio is None and begins_steady:
        ratio = metrics["slo_ratio"]
    share = 1.0 if profile.slo is None else profile.slo.share
    is_overloaded = any(warning.code == "backlog-grows" for warning in experiment.unsteadiness(run))
    breaks = is_overloaded or (ratio is None and attained is not None and attained < share)
    return CapacityPoint(size, math.log(ratio) if ratio and not breaks else None, breaks)


def _capacity(points: Sequence[CapacityPoint], runs: Sequence[LoadedRun]) -> Capacity:
    fitting = [(point.size, point.log_ratio) for point in points if point.log_ratio is not None]
    breaks_from = min((point.size for point in points if point.breaks), default=None)
    fitted = crossing([size for size, _ in fitting], [ratio for _, ratio in fitting], breaks_from)
    positions = {run.record.position for run in runs}
    return Capacity(tuple(points), fitted, positions.pop() if len(positions) == 1 else None)


@dataclass(frozen=True, eq=False, kw_only=True)
class CapacityPair:
    """Two arms whose capacities are compared; ``pairs`` are their loads."""

    metric: str
    pairs: tuple[ArmPair, ...]

    @property
    def labels(self) -> tuple[str, str]:
        first = self.pairs[0]
        a, b = (arm_label(arm.variant, without_size(arm.cell, self.metric)) for arm in (first.a, first.b))
        return a, b

    @cached_property
    def capacities(self) -> tuple[dict[int, Capacity], dict[int, Capacity]]:
        """Those of both arms by block; of paired arms in the blocks that both have."""
        first = self.pairs[0]
        a, b = (
            capacities_of(side, arms_by_label(side, self.metric)[label], self.metric)
            for side, label in zip(first.sides, self.labels, strict=True)
        )
        if first.pairing == "unpaired":
            return a, b
        return {block: a[block] for block in a if block in b}, {block: b[block] for block in b if block in a}

    @property
    def values(self) -> tuple[tuple[float | None, ...], tuple[float | None, ...]]:
        """The capacities of each side, block by block."""
        a, b = (tuple(each.size for each in side.values()) for side in self.capacities)
        return a, b

    @cached_property
    def ratio(self) -> SideRatio | None:
        """B over A over the blocks; the effect of the position is removed where two servers share a block."""
        first, (a, b) = self.pairs[0], self.values
        if first.pairing == "unpaired":
            return unpaired_ratio(a, b, first.confidence)
        of_a, of_b = self.capacities
        positions = [(each.position, of_b[block].position) for block, each in of_a.items()]
        design = BlockDesign(tuple(of_a))
        if first.is_ordered and {frozenset(both) for both in positions} == {frozenset((0, 1))}:
            apart = tuple((later or 0) - (earlier or 0) for earlier, later in positions)
            design = BlockDesign(tuple(of_a), apart, tuple((earlier or 0) - 0.5 for earlier, _ in positions))
        return side_ratio(a, b, design, first.confidence, first.estimator)

    @property
    def censored(self) -> str | None:
        """The blocks without a capacity, in words; None where every block has one on both sides."""
        texts = (censored_text(*each) for each in zip(self.labels, self.capacities, strict=True))
        return "; ".join(filter(None, texts)) or None


def censored_text(label: str, capacities: Mapping[int, Capacity]) -> str | None:
    """``fast holds at 125, the most that was sent: send more (3 of 8 blocks)``; None where all have a capacity."""
    reasons = Counter(each.why_censored for each in capacities.values() if each.why_censored)
    blocks = count_of(len(capacities), "block")
    return "; ".join(f"{label} {reason} ({count} of {blocks})" for reason, count in reasons.items()) or None


def arms_by_label(experiment: Experiment, metric: str) -> dict[str, list[Arm]]:
    """The arms that differ in the size of their load alone, by the label of what they share."""
    groups: dict[str, list[Arm]] = {}
    for arm in experiment.arms:
        if size_of(arm.cell, metric) is not None:
            groups.setdefault(arm_label(arm.variant, without_size(arm.cell, metric)), []).append(arm)
    return groups


def capacity_pairs(pairs: Iterable[ArmPair], metric: str) -> tuple[CapacityPair, ...]:
    """Pairs of arms under one load, by what they share beside its size."""
    groups: dict[tuple[str, ...], list[ArmPair]] = {}
    for pair in pairs:
        if size_of(pair.b.cell, metric) is not None:
            keys = (arm_label(arm.variant, without_size(arm.cell, metric)) for arm in (pair.a, pair.b))
            groups.setdefault(tuple(keys), []).append(pair)
    return tuple(CapacityPair(metric=metric, pairs=tuple(group)) for group in groups.values())


class ArmCapacity(NamedTuple):
    """The capacity of an arm over its blocks."""

    label: str
    blocks: Mapping[int, Capacity]
    level: float | None
    """The centre, whose quotient is the ratio; None where a block is censored."""
    interval: Interval | None
    """Of these requests on another server; None for few blocks."""

    @property
    def scatter_frac(self) -> float | None:
        """Of servers and their loads, over the blocks."""
        return scatter_of(known_values(each.size for each in self.blocks.values()))

    @property
    def elasticity(self) -> float | None:
        """The median over the blocks."""
        of_blocks = known_values(each.crossing.elasticity for each in self.blocks.values())
        return median(of_blocks) if of_blocks else None


def arm_capacities(experiment: Experiment, pairs: Sequence[ArmPair], confidence: float) -> tuple[ArmCapacity, ...]:
    """The capacity of each arm, in the order of the arms; none where the profile asks for none.

    ``pairs`` are all arms against the baseline: the levels of two arms are those whose quotient their ratio is.
    """
    profile = experiment.profile_or_none
    metric = None if profile is None else capacity_metric(profile)
    if metric is None:
        return ()
    levels: dict[str, float] = {}
    for pair in capacity_pairs(pairs, metric):
        if pair.ratio is not None:
            levels = dict(zip(pair.labels, (pair.ratio.a, pair.ratio.b), strict=True)) | levels
    rows = []
    for label, arms in arms_by_label(experiment, metric).items():
        blocks = capacities_of(experiment, arms, metric)
        sizes = [each.size for each in blocks.values()]
        level = None if None in sizes or not sizes else levels.get(label, geometric_mean(known_values(sizes)))
        interval = None if level is None else level_interval(sizes, level, confidence)
        rows.append(ArmCapacity(label, blocks, level, interval))
    return tuple(rows)
