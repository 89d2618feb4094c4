"""Time left of an experiment, from the durations of its runs that ended and the blocks that are measured at a time.

A block takes the sum of its runs, each the median of its arm times a factor of its node, which is faster or slower
than others, and one of its own. Blocks that wait go to the node that is free first. The range is that of 5 % to
95 % of draws in which these factors, and errors of the medians, vary as the ended runs do.
"""

import heapq
import math
import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Final, Literal, TypeAlias

from benchctl.records.directory import arm_label
from benchctl.records.record import RunRecord
from benchctl.units import s_from_ns

Source: TypeAlias = Literal["ended-runs", "earlier-experiments"]

_MOST_DRAWS, _FEWEST_DRAWS = 100, 40
_BLOCKS_DRAWN: Final = 10_000
"""Blocks in all draws together, which take some 40 ms."""
_LOW, _HIGH = 0.05, 0.95
_PRIOR_SD: Final = 0.1
_PRIOR_WEIGHT: Final = 2
"""Before runs are known: durations of an arm scatter by a tenth, as if that had been seen in two of them."""
_EARLIER_SD: Final = 0.3
"""Relative error of a duration that stems from earlier experiments: other requests, other settings."""
_UNKNOWN_ARM_SD: Final = 0.5
"""The same of an arm without a run, taken to last as long as the others."""
_NODE_SHARE: Final = 0.5
"""Of the variance of a run's duration that all runs of its node have in common."""
_AT_LEAST: Final = 1.25
"""An arm without an ended run is taken to last this many times as long as the longest of its runs has by now."""
_LEAST_REST_FRAC: Final = 0.02
"""A run that has gone on for longer than all others is about to end: this fraction of its duration is left."""
_LARGEST_LOG: Final = 50.0
_LONGEST_GAP_S: Final = 60.0
"""A longer time from one run of a block to the next lay between two processes, which no later run will wait for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmDuration:
    """Duration of the runs of one arm, from the start of one to the start of the next."""

    arm: str
    num_ended: int
    """Runs that ended regularly, whose median it is."""
    run_s: float | None
    """Median in seconds; of earlier experiments where no run ended; None where those are unknown, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLeft:
    """Seconds until the last run has ended: the median of the draws, and their range."""

    s: float
    low_s: float
    high_s: float
    num_at_a_time: int
    """Blocks measured at a time."""
    source: Source


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockWork:
    """Runs of one block that have not ended."""

    arms: tuple[str, ...]
    """Arm of each of them."""
    node: str | None = None
    """Node that measures the block now."""
    is_running: bool = False
    elapsed_s: float = 0.0
    """Seconds since the first of them began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Law:
    """Durations of an experiment: medians by arm with their relative errors, scatter, and residuals by node."""

    run_s: Mapping[str, float]
    error_sd: Mapping[str, float]
    sd: float
    weight: float
    node_residuals: Mapping[str | None, Sequence[float]]


def run_duration_s(record: RunRecord) -> float | None:
    """Seconds from the start of a run's server to its end; None where they are unknown, or of no clock of ours."""
    launch_ns, stop_ns = record.times.launch_ns, record.times.stop_ns
    if launch_ns is None or stop_ns is None or record.is_simulated or stop_ns < launch_ns:
        return None
    return s_from_ns(stop_ns - launch_ns)


def arm_durations(
    arms: Sequence[str],
    records: Iterable[RunRecord],
    earlier_s: Mapping[str, float] | None = None,
    elapsed_s: Mapping[str, Sequence[float]] | None = None,
) -> tuple[ArmDuration, ...]:
    """Median duration of each arm's runs in ``records`` that ended as done or suspect.

    Where none has ended it is that of earlier experiments, ``earlier_s``, times the median ratio of the ended ones
    to theirs. ``elapsed_s`` holds for each arm how long its running runs have taken: those that are over the median
    count as ended now, because otherwise the runs that end first would speak for all.
    """
    records = list(records)
    durations, gap_s = _durations(records), _gap_s(records)
    ended_s: dict[str, float] = {}
    for arm, of_arm in durations.items():
        middle_s = median(run_s for _, run_s in of_arm)
        longer_s = [run_s for run_s in (elapsed_s or {}).get(arm, ()) if run_s > middle_s]
        ended_s[arm] = median([*(run_s for _, run_s in of_arm), *longer_s]) + gap_s
    earlier_s = earlier_s or {}
    ratios = [run_s / earlier_s[arm] for arm, run_s in ended_s.items() if earlier_s.get(arm)]
    ratio = median(ratios) if ratios else 1.0
    expected_s = {arm: run_s * ratio for arm, run_s in earlier_s.items()} | ended_s
    return tuple(
        ArmDuration(arm=arm, num_ended=len(durations.get(arm, ())), run_s=expected_s.get(arm)) for arm in arms
    )


def time_left(
    work: Sequence[BlockWork],
    records: Iterable[RunRecord],
    arms: Sequence[ArmDuration],
    num_at_a_time: int | None,
) -> TimeLeft | None:
    """Time until all of ``work`` is done, with ``num_at_a_time`` blocks at a time; zero without any.

    None where no arm's duration is known, or nothing is measured and nobody knows how many blocks will be.
    """
    if not work:
        return TimeLeft(s=0.0, low_s=0.0, high_s=0.0, num_at_a_time=0, source="ended-runs")
    law = _law(work, records, arms)
    num_running = sum(block.is_running for block in work)
    width = max(num_running, num_at_a_time or 0)
    if law is None or not width:
        return None
    generator = random.Random("time left")  # noqa: S311 - the same draws each time: a range that does not tremble
    num_draws = max(_FEWEST_DRAWS, min(_MOST_DRAWS, _BLOCKS_DRAWN // max(len(work), 1)))
    draws = sorted(_drawn_s(work, law, width, generator) for _ in range(num_draws))
    return TimeLeft(
        s=median(draws),
        low_s=draws[math.floor(_LOW * num_draws)],
        high_s=draws[math.ceil(_HIGH * num_draws) - 1],
        num_at_a_time=width,
        source="ended-runs" if any(arm.num_ended for arm in arms) else "earlier-experiments",
    )


def _durations(records: Iterable[RunRecord]) -> dict[str, list[tuple[str | None, float]]]:
    """Node and seconds of each run that ended regularly and took time, by arm."""
    durations: dict[str, list[tuple[str | None, float]]] = defaultdict(list)
    for record in records:
        if record.state in {"done", "suspect"} and (run_s := run_duration_s(record)):
            durations[arm_label(record.variant, record.cell)].append((record.node_name, run_s))
    return durations


def _gap_s(records: Iterable[RunRecord]) -> float:
    """Median time from the end of a run's server to the start of the next one's in the same block."""
    ends_ns = {(record.block, record.position): (record.host, record.times.stop_ns) for record in records}
    gaps_s = []
    for record in records:
        host, end_ns = ends_ns.get((record.block, record.position - 1), (None, None))
        if end_ns is not None and host == record.host and record.times.launch_ns is not None:
            gaps_s.append(s_from_ns(record.times.launch_ns - end_ns))
    gaps_s = [gap_s for gap_s in gaps_s if 0 <= gap_s <= _LONGEST_GAP_S]
    return median(gaps_s) if gaps_s else 0.0


def _law(work: Sequence[BlockWork], records: Iterable[RunRecord], arms: Sequence[ArmDuration]) -> _Law | None:
    known_s = {arm.arm: arm.run_s for arm in arms if arm.run_s is not None}
    if not known_s:
        return None
    residuals: dict[str | None, list[float]] = defaultdict(list)
    durations = _durations(records)
    for of_arm in durations.values():
        centre = fmean(math.log(seconds) for _, seconds in of_arm)
        for node, seconds in of_arm:
            residuals[node].append(math.log(seconds) - centre)
    freedom = sum(len(of_arm) - 1 for of_arm in durations.values())
    squares = sum(residual**2 for of_node in residuals.values() for residual in of_node)
    weight = _PRIOR_WEIGHT + freedom
    sd = math.sqrt((_PRIOR_WEIGHT * _PRIOR_SD**2 + squares) / weight)
    others_s = fmean(known_s.values())
    run_s = {arm.arm: known_s.get(arm.arm, others_s) for arm in arms}
    for block in work:
        if block.arms and block.arms[0] not in known_s:
            run_s[block.arms[0]] = max(run_s[block.arms[0]], _AT_LEAST * block.elapsed_s)
    return _Law(
        run_s=run_s,
        error_sd={
            arm.arm: sd / math.sqrt(arm.num_ended)
            if arm.num_ended
            else _EARLIER_SD
            if arm.arm in known_s
            else _UNKNOWN_ARM_SD
            for arm in arms
        },
        sd=sd,
        weight=weight,
        node_residuals=residuals,
    )


def _drawn_s(work: Sequence[BlockWork], law: _Law, width: int, generator: random.Random) -> float:
    """The end of all work in one draw: each block that waits goes to the first of ``width`` that is free."""
    weight = law.weight
    sd = law.sd * math.sqrt(weight / (2 * generator.gammavariate(weight / 2, 1)))  # sd of an unknown normal law
    run_s = {arm: seconds * _factor(generator.gauss(0, law.error_sd[arm])) for arm, seconds in law.run_s.items()}
    running = [block for block in work if block.is_running]
    free: list[tuple[float, float]] = []  # when, and the factor of the node
    for block in running:
        factor = _node_factor(law.node_residuals.get(block.node, ()), sd, generator)
        free.append((_block_s(block, run_s, factor, sd, generator), factor))
    free += [(0.0, _node_factor((), sd, generator)) for _ in range(width - len(running))]
    heapq.heapify(free)
    for block in work:
        if not block.is_running:
            free_s, factor = free[0]
            heapq.heapreplace(free, (free_s + _block_s(block, run_s, factor, sd, generator), factor))
    return max((end_s for end_s, _ in free), default=0.0)


def _factor(logarithm: float) -> float:
    """``exp``, within what a float holds whatever a record says."""
    return math.exp(max(-_LARGEST_LOG, min(logarithm, _LARGEST_LOG)))


def _node_factor(residuals: Sequence[float], sd: float, generator: random.Random) -> float:
    """Factor of a node's durations in one draw.

    Of k runs that ended there, the mean residual times k / (k + 1) is the best guess of its logarithm, when nodes
    vary as much as the runs of one node do.
    """
    shrunk = sum(residuals) / (len(residuals) + 1)
    return _factor(shrunk + generator.gauss(0, sd * math.sqrt(_NODE_SHARE / (len(residuals) + 1))))


def _block_s(
    block: BlockWork, run_s: Mapping[str, float], node_factor: float, sd: float, generator: random.Random
) -> float:
    """Seconds that the rest of a block takes in one draw, its current run at least a little."""
    if not block.arms:
        return 0.0
    own_sd = sd * math.sqrt((1 - _NODE_SHARE) / len(block.arms))
    factor = node_factor * _factor(generator.gauss(0, own_sd))
    first_s = run_s[block.arms[0]] * factor
    rest_s = sum(run_s[arm] for arm in block.arms[1:]) * factor
    return max(first_s - block.elapsed_s, _LEAST_REST_FRAC * first_s) + rest_s
