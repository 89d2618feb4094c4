"""Step time and batch size over a run, which shows a steady state, a ramp, stalls and a tail."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from benchctl.analysis.analyzed import AnalyzedExperiment
from benchctl.analysis.summary.runs import RunSummary
from benchctl.records.columns.step_columns import Floats, StepColumns
from benchctl.report.charts.arms import (
    MAX_RUNS_BY_BLOCK,
    ArmStyle,
    arm_styles,
    clock_note,
    runs_by_block,
    runs_with_steps,
)
from benchctl.units import NS_PER_MS, NS_PER_S

MAX_STRETCHES: Final = 150
TITLE: Final = "Step time over the run"
_MIN_STEPS_PER_STRETCH: Final = 4
_MAX_BANDS: Final = 3
"""Bands of more arms than this cover one another."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Course:
    """The steps of one run in stretches of equal duration; stretches in which no step began are left out."""

    time_s: Floats
    """Mean start of the steps of each stretch."""
    count: Floats
    mean_ms: Floats
    """Weighted by ``count`` these add up to the mean step of the run."""
    low_ms: Floats
    """5th percentile of the steps of the stretch."""
    median_ms: Floats
    high_ms: Floats
    """95th percentile."""
    num_seqs: Floats
    """Mean batch size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """The courses of the arms in one block, and the moment from which their time counts."""

    courses: tuple[tuple[ArmStyle, Course], ...]
    block: int
    clock: str
    origin: str
    """``first send``, or ``first step`` where the steps have another clock than the client."""

    @property
    def has_bands(self) -> bool:
        return len(self.courses) <= _MAX_BANDS

    @property
    def time_axis(self) -> str:
        return f"time since the {self.origin}, s"

    def caption(self) -> str:
        """One sentence about lines and bands."""
        band = ", with the 5-95 % band of its steps" if self.has_bands else ", 5-95 % of its steps on hover"
        return (
            f"Median step time in ms ({self.clock}) and mean batch size in up to {MAX_STRETCHES} stretches of a "
            f"run{band}; warm-up excluded."
        )


def step_times(analysis: AnalyzedExperiment) -> StepTimes | None:
    """One course for each arm, from the block in which most arms have a step log; None without a step log."""
    return next(iter(step_times_by_block(analysis, max_runs=1)), None)


def step_times_by_block(analysis: AnalyzedExperiment, max_runs: int = MAX_RUNS_BY_BLOCK) -> tuple[StepTimes, ...]:
    """The courses of each block, at most ``max_runs`` in all; first the block in which most arms have a log."""
    arms = arm_styles(analysis)
    blocks = runs_by_block(arms, runs_with_steps(arms), max_runs)
    return tuple(_times_of_block(block, runs) for block, runs in blocks.items())


def _times_of_block(block: int, runs: Sequence[tuple[ArmStyle, RunSummary]]) -> StepTimes:
    logs = [(arm, run, run.run.columns) for arm, run in runs]
    origins_ns = [_first_send_ns(run, columns) for _, run, columns in logs]
    is_aligned = None not in origins_ns
    courses = []
    for (arm, _, columns), origin_ns in zip(logs, origins_ns, strict=True):
        start_ns = origin_ns if is_aligned and origin_ns is not None else int(columns.start_ns.min())
        courses.append((arm, course_of(columns, start_ns)))
    return StepTimes(
        courses=tuple(courses),
        block=block,
        clock=clock_note(clock for _, _, columns in logs for clock in columns.clocks),
        origin="first send" if is_aligned else "first step",
    )


def course_of(columns: StepColumns, origin_ns: int, max_stretches: int = MAX_STRETCHES) -> Course:
    """Shorten the log of a run to at most ``max_stretches`` stretches of at least four steps on average.

    Times count from ``origin_ns``. Raises ValueError without steps.
    """
    if not len(columns):
        raise ValueError("a run without steps has no course")
    since_ns = columns.start_ns - columns.start_ns.min()
    span_ns = int((since_ns + columns.dur_ns).max()) or 1
    num_bins = max(1, min(max_stretches, len(columns) // _MIN_STEPS_PER_STRETCH))
    bins = np.minimum(since_ns * num_bins // span_ns, num_bins - 1)
    order = np.argsort(bins, kind="stable")
    firsts = np.flatnonzero(np.diff(bins[order], prepend=-1))
    count = np.diff(firsts, append=len(columns)).astype(np.float64)
    dur_ms = columns.dur_ns[order] / NS_PER_MS
    percentiles = np.array([np.percentile(part, (5, 50, 95)) for part in np.split(dur_ms, firsts[1:])])
    return Course(
        time_s=np.add.reduceat((columns.start_ns[order] - origin_ns) / NS_PER_S, firsts) / count,
        count=count,
        mean_ms=np.add.reduceat(dur_ms, firsts) / count,
        low_ms=percentiles[:, 0],
        median_ms=percentiles[:, 1],
        high_ms=percentiles[:, 2],
        num_seqs=np.add.reduceat(columns.num_seqs[order], firsts) / count,
    )


def _first_send_ns(run: RunSummary, columns: StepColumns) -> int | None:
    """The first send on the clock of the steps; None where that clock is another than the client's."""
    first_ns, last_ns = run.record.times.first_send_ns, run.record.times.last_token_ns
    if first_ns is None or last_ns is None or "virtual" in columns.clocks:
        return None
    return first_ns if first_ns <= int(columns.start_ns.min()) <= last_ns else None
