"""Speculative decoding of one arm over its blocks: counts in all, acceptance by position with its interval."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import zip_longest
from statistics import stdev
from typing import Final

from benchctl.analysis.metrics.speculation import (
    DraftCounts,
    PositionAcceptance,
    acceptance_by_position,
    run_drafts,
    speculation_metrics,
)
from benchctl.analysis.metrics.unknown import known_values
from benchctl.analysis.statistics.intervals import Interval, t_quantile
from benchctl.records.loaded import LoadedRun

CONFIDENCE: Final = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionOverBlocks:
    """One position of an arm's drafts: all its runs together, and the scatter of its runs."""

    pooled: PositionAcceptance
    survival_interval: Interval | None
    """At 95 %, by Student's t over the runs, within 0 and 1; None for one run."""
    conditional_interval: Interval | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmDrafts:
    """Drafts of all usable runs of an arm."""

    counts: DraftCounts
    """Summed over the runs."""
    acceptance_rate: float | None
    acceptance_length: float | None
    positions: tuple[PositionOverBlocks, ...]
    """Empty where a run does not count them."""


def arm_drafts(runs: Sequence[LoadedRun]) -> ArmDrafts | None:
    """The drafts of an arm; None where no run verified a draft token."""
    by_run = [run_drafts(run) for run in runs]
    counts = _summed(by_run)
    if not counts.draft_tokens:
        return None
    rates = speculation_metrics(counts)
    return ArmDrafts(
        counts=counts,
        acceptance_rate=rates["acceptance_rate"],
        acceptance_length=rates["acceptance_length"],
        positions=_positions(by_run, counts),
    )


def _summed(by_run: Sequence[DraftCounts]) -> DraftCounts:
    """Sums over the runs; None for a count that any run lacks."""
    sums: dict[str, int | None] = {}
    for name in (field.name for field in fields(DraftCounts) if field.name != "accepted_by_position"):
        values = [getattr(counts, name) for counts in by_run]
        sums[name] = None if None in values or not values else sum(values)
    positions = [each for counts in by_run if (each := counts.accepted_by_position) is not None]
    accepted = tuple(map(sum, zip_longest(*positions, fillvalue=0)))
    return DraftCounts(**sums, accepted_by_position=accepted if len(positions) == len(by_run) else None)


def _positions(by_run: Sequence[DraftCounts], counts: DraftCounts) -> tuple[PositionOverBlocks, ...]:
    runs = [acceptance_by_position(each) for each in by_run]
    return tuple(
        PositionOverBlocks(
            pooled=pooled,
            survival_interval=_interval(pooled.survival, [run[i].survival for run in runs if i < len(run)]),
            conditional_interval=_interval(
                pooled.conditional, [run[i].conditional for run in runs if i < len(run)]
            ),
        )
        for i, pooled in enumerate(acceptance_by_position(counts))
    )


def _interval(centre: float | None, shares: Sequence[float | None]) -> Interval | None:
    values = known_values(shares)
    if centre is None or len(values) < 2:
        return None
    quantile = t_quantile(1 - (1 - CONFIDENCE) / 2, len(values) - 1)
    half = quantile * stdev(values) / math.sqrt(len(values))
    return max(0.0, centre - half), min(1.0, centre + half)
