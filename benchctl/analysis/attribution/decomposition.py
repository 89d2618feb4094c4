"""The latency of a request: time to first token, more tokens, or more time for each.

Decomposition of the difference between two sides: the wall time as factors and parts, the latency, the step.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import fmean
from types import MappingProxyType
from typing import Final

import numpy as np

from benchctl.analysis.attribution.breakdown import Latency, RunTimeBreakdown, TimeScales, at_middle_of_block
from benchctl.analysis.attribution.estimate import (
    Contribution,
    FlooredRun,
    PairDesign,
    StepFloor,
    WorkSplit,
    estimate_contributions,
    select_known_runs,
    split_work,
)
from benchctl.analysis.attribution.splits import (
    BatchSplit,
    SectionSplit,
    WallSplit,
    split_batches,
    split_sections,
    split_wall,
)
from benchctl.analysis.attribution.step_time_model import ModelledRun, ModelSplit, SourcedModel, split_by_model
from benchctl.analysis.statistics.estimate import SideRatio
from benchctl.records.record import StopMode
from benchctl.units import MS_PER_S

TTFT: Final = "time to first token"
TOKENS: Final = "number of tokens"
TIME_EACH: Final = "time per token"


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencySplit:
    """Invariant: ``parts`` add up to ``whole``, the difference of the mean latency of a request."""

    whole: Contribution
    parts: tuple[Contribution, ...]
    """In this order: ``TTFT``, ``TOKENS``, ``TIME_EACH``."""
    num_requests: int
    """Fewest requests that any two runs share."""
    warning: str | None = None


Requests = Mapping[str, Latency]


def split_latency(
    a: Sequence[RunTimeBreakdown], b: Sequence[RunTimeBreakdown], design: PairDesign
) -> LatencySplit | None:
    """Parts of the latency; None if the latency of a run's requests is unknown, or two runs share none."""
    a_latencies, b_latencies = ([run.latencies for run in side if run.latencies] for side in (a, b))
    if not a or not b or len(a_latencies) < len(a) or len(b_latencies) < len(b):
        return None
    combinations = (
        zip(a_latencies, b_latencies, strict=True) if design.is_paired else product(a_latencies, b_latencies)
    )
    pairs = [(x, y, x.keys() & y.keys()) for x, y in combinations]
    shared = min(len(common) for _, _, common in pairs)
    if not shared:
        return None
    names = ("request latency", TTFT, TOKENS, TIME_EACH)
    whole, *parts = estimate_contributions(names, a_latencies, b_latencies, _split, design)
    both = [
        fmean(side[name].ttft_s + side[name].span_s for side in (x, y) for name in common) for x, y, common in pairs
    ]
    middle, half = fmean(both), whole.added_s / 2
    bunched = sum(run.is_bunched for run in (*a, *b))
    return LatencySplit(
        whole=replace(whole, a_s=middle - half, b_s=middle + half),
        parts=tuple(parts),
        num_requests=shared,
        warning=f"tokens reached the client in bursts in {bunched} of {len(a) + len(b)} runs" if bunched else None,
    )


def _split(x: Requests, y: Requests) -> list[float]:
    """Differences of the shared requests' means: whole, time to first token, tokens, time per token."""
    names = sorted(x.keys() & y.keys())
    a, b = np.array([x[name] for name in names]).T, np.array([y[name] for name in names]).T
    m_a, m_b = a[2], b[2]
    t_a, t_b = (np.divide(span, m, out=np.full(len(names), np.nan), where=m > 0) for _, span, m in (a, b))
    t_a, t_b = np.where(np.isnan(t_a), t_b, t_a), np.where(np.isnan(t_b), t_a, t_b)
    ttft = b[0] - a[0]
    tokens = np.nan_to_num((m_b - m_a) * (t_a + t_b) / 2)
    time_per_token = np.nan_to_num((t_b - t_a) * (m_a + m_b) / 2)
    whole = ttft + b[1] - a[1]
    return [float(part.mean()) for part in (whole, ttft, tokens, time_per_token)]


NO_MODEL: Final = "no step-time model is named"
_ROUNDING: Final = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Decomposition:
    """Two sides of one cell. Parts without the necessary records are None."""

    label: str
    num_blocks: int
    """Of the smaller side."""
    wall: WallSplit | None
    """None if the client's times do not count."""
    latency: LatencySplit | None
    sections: SectionSplit | None
    batches: BatchSplit | None
    work: WorkSplit | None
    work_missing: str | None
    """The reason why ``work`` is None."""
    model: ModelSplit | None
    model_missing: str | None
    """The reason why ``model`` is None."""
    is_guided: bool = False
    """A value model scored candidates on a side."""

    @property
    def floor(self) -> StepFloor | str | None:
        """The ratio of the floors of both steps, or the reason why it is unknown; None where no side is guided."""
        if not self.is_guided:
            return None
        return self.work_missing if self.work is None else self.work.floor


def decompose(
    label: str,
    a: Sequence[RunTimeBreakdown],
    b: Sequence[RunTimeBreakdown],
    design: PairDesign,
    stop: StopMode,
    ratios: Mapping[str, SideRatio] = MappingProxyType({}),
    model: SourcedModel | str = NO_MODEL,
) -> Decomposition | None:
    """The decomposition of B against A; None if neither wall times nor steps are known on both sides.

    If paired, both sequences have the same blocks in the same order. ``ratios`` are those of the comparison,
    by metric.
    """
    timed_a, timed_b, timed = select_known_runs(
        a, b, design.of_times("wall"), lambda run: bool(run.wall_s and run.wall_s > 0)
    )
    has_wall = bool(timed_a and timed_b)
    has_steps = bool(a and b) and all(run.has_steps for run in (*a, *b))
    if not has_wall and not has_steps:
        return None
    of_steps, step = design.of_times("step"), ratios.get("step_ms")
    if has_steps:
        a, b = steps_at_level(a, b, step)
    work, missing = compare_work(a, b, of_steps, step)
    explained = _explain(model, a, b, of_steps) if has_steps else "the steps of a side are not known"
    return Decomposition(
        label=label,
        num_blocks=min(len(timed_a), len(timed_b)) if has_wall else min(len(a), len(b)),
        wall=split_wall(timed_a, timed_b, timed, stop, ratios) if has_wall else None,
        latency=split_latency(timed_a, timed_b, timed.of_times("latency")) if has_wall else None,
        sections=split_sections(a, b, of_steps) if has_steps else None,
        batches=split_batches(a, b, of_steps) if has_steps else None,
        work=work,
        work_missing=missing,
        model=None if isinstance(explained, str) else explained,
        model_missing=explained if isinstance(explained, str) else None,
        is_guided=any(run.is_guided for run in (*a, *b)),
    )


def steps_at_level(
    a: Sequence[RunTimeBreakdown], b: Sequence[RunTimeBreakdown], step: SideRatio | None
) -> tuple[list[RunTimeBreakdown], list[RunTimeBreakdown]]:
    """Both sides with step times scaled so that their arithmetic mean is the ``step_ms`` of the comparison.

    Parts then add up to the step that the comparison shows, which is a geometric centre.
    """
    sides = [list(a), list(b)]
    for i, level_ms in enumerate(() if step is None else (step.a, step.b)):
        scale = level_ms / MS_PER_S / fmean(run.step_s / run.num_steps for run in sides[i])
        if not math.isclose(scale, 1.0, rel_tol=_ROUNDING):
            sides[i] = [at_middle_of_block(run, TimeScales(step=scale)) for run in sides[i]]
    return sides[0], sides[1]


def compare_work(
    a: Sequence[RunTimeBreakdown], b: Sequence[RunTimeBreakdown], design: PairDesign, step: SideRatio | None
) -> tuple[WorkSplit | None, str | None]:
    """The mean steps of both sides beside their floors, or the reason why a floor is unknown."""
    for run in (*a, *b):
        if isinstance(run.floor, str):
            return None, run.floor
    sides = [
        [FlooredRun(run.step_s / run.num_steps, run.floor) for run in side if not isinstance(run.floor, str)]
        for side in (a, b)
    ]
    return split_work(sides[0], sides[1], design, step), None


def _explain(
    model: SourcedModel | str, a: Sequence[RunTimeBreakdown], b: Sequence[RunTimeBreakdown], design: PairDesign
) -> ModelSplit | str:
    """The difference of the mean steps by the model, or the reason why it says nothing."""
    if isinstance(model, str):
        return model
    sides: list[list[ModelledRun]] = [[], []]
    for modelled, side in zip(sides, (a, b), strict=True):
        for run in side:
            if isinstance(run.modelled, str):
                return run.modelled
            modelled.append(replace(run.modelled, step_s=run.step_s / run.num_steps))
    return split_by_model(model, sides[0], sides[1], design)
