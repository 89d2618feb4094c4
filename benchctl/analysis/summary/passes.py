"""Forward passes of a micro-benchmark: the time of one pass by point and mode, and the cost of its launches.

The level of a point is its median as a comparison has it: the centre over blocks of each block's median.
Its interval is that of the blocks, each of which is a process of its own; p5 and p95 are those of all replays.

launch cost = eager - graph: what the host adds by launching every kernel. Its interval is that of the ratio of
both, times the logarithmic mean of their levels.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np

from benchctl.analysis.attribution.factors import logarithmic_mean
from benchctl.analysis.experiment.arms import Arm
from benchctl.analysis.experiment.paired_runs import PairedRuns
from benchctl.analysis.statistics.intervals import Interval
from benchctl.analysis.statistics.side_ratio import level_interval
from benchctl.analysis.summary.runs import CellSummary
from benchctl.analysis.validity.comparability.machines import gpu_names, machines_of
from benchctl.costs.hardware import Hardware, hardware_or_none
from benchctl.profile.choices import NO_REQUESTS
from benchctl.records.loaded import LoadedResults
from benchctl.records.manifest import Manifest
from benchctl.units import ms_from_ns, us_from_ms

T = TypeVar("T")
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
    ratio_interval: Interval | None
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """The forward passes of an experiment."""

    times: tuple[PassTimes, ...]
    launches: tuple[LaunchCost, ...]
    """Empty where only one mode was measured."""


def has_requests(manifest: Manifest) -> bool:
    """False for an experiment of forward passes alone."""
    return manifest.dataset != NO_REQUESTS


def floor_peaks(passes: Passes, results: LoadedResults, hardware: Hardware | None) -> str | None:
    """The peaks that floors were computed with, in words; None where no floor is known.

    ``hardware`` are the experiment's own: measured ones, where the device has no data sheet.
    """
    if all(times.floor_ms is None for times in passes.times):
        return None
    sheet = next((hardware_or_none(name) for name in gpu_names(machines_of(results))), None)
    if sheet is not None:
        return f"{sheet.name}, {sheet.source}"
    return None if hardware is None else f"the fastest rounds of {hardware.title}, less a margin"


def summarise_passes(cells: Sequence[CellSummary], pairs: Sequence[PairedRuns], confidence: float) -> Passes:
    """The passes of cells with usable runs, and the launch cost of each pair; decodes before prefills."""
    times = [_times(cell, confidence) for cell in _by_phase(cells, lambda cell: cell)]
    launches = [_launch_cost(paired, confidence) for paired in _by_phase(pairs, lambda paired: paired.pair.b)]
    return Passes(
        times=tuple(each for each in times if each is not None),
        launches=tuple(each for each in launches if each is not None),
    )


def _by_phase(items: Sequence[T], arm_of: Callable[[T], Arm | CellSummary]) -> list[T]:
    """The items of one variant by phase, and otherwise in the order given."""
    variants = list(dict.fromkeys(arm_of(item).variant for item in items))

    def order(item: T) -> tuple[int, str]:
        arm = arm_of(item)
        return variants.index(arm.variant), str(arm.cell.get("phase", ""))

    return sorted(items, key=order)


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


def _launch_cost(paired: PairedRuns, confidence: float) -> LaunchCost | None:
    ratio = paired.ratio(LEVEL, confidence)
    if ratio is None:
        return None
    mean_ms, bounds = logarithmic_mean(ratio.a, ratio.b), ratio.estimate.log_interval
    return LaunchCost(
        label=paired.pair.label,
        num_blocks=ratio.estimate.num_blocks,
        baseline_ms=ratio.a,
        other_ms=ratio.b,
        interval_ms=None if bounds is None else (-bounds[1] * mean_ms, -bounds[0] * mean_ms),
        ratio=ratio.estimate.ratio,
        ratio_interval=None if bounds is None else (math.exp(bounds[0]), math.exp(bounds[1])),
        num_operators=_num_operators(paired),
    )


def _num_operators(paired: PairedRuns) -> int | None:
    """Operators of a pass, which are the same in every run of one point."""
    counts = {run.record.effective_config.get("server.operators") for run in paired.pair.b.runs.values()}
    count = counts.pop() if len(counts) == 1 else None
    return count if isinstance(count, int) else None
