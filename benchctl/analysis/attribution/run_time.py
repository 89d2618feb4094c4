"""The time of one run, broken down into the quantities in which two sides are compared."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from benchctl.analysis.attribution.roofline import Floor, WorkModel, floor_of
from benchctl.analysis.attribution.sections import Breakdown, break_down, tally_steps
from benchctl.analysis.attribution.step_time_model import ModelledRun
from benchctl.analysis.metrics.request_timing import choice_tokens, e2el_ns, is_completed, measured, ttft_ns
from benchctl.analysis.metrics.unknown import known_values, total
from benchctl.analysis.validity.bunching import CLIENT_BUNCHING
from benchctl.records.columns.step_columns import StepColumns
from benchctl.records.columns.step_table import PHASES
from benchctl.records.loaded import LoadedRun
from benchctl.records.request import RequestRecord
from benchctl.records.step import StepPhase
from benchctl.units import s_from_ns


class Latency(NamedTuple):
    """One request: time to its first token, time from there to its last, tokens after the first.

    With several choices, tokens are those of the longest. A stream of more than one chunk has at least one token
    after its first, so span_s = tokens * (span_s / tokens) always holds.
    """

    ttft_s: float
    span_s: float
    tokens: float


class SizedSteps(NamedTuple):
    """Steps of one kind and one number of sequences."""

    num_steps: int
    total_s: float


@dataclass(frozen=True, slots=True)
class TimeScales:
    """Factors that adjust a run's times to the middle of its block: exp(-β offset) of each metric."""

    wall: float = 1.0
    step: float = 1.0
    latency: float = 1.0


SizeKey = tuple[StepPhase, int]
"""Kind of step, and the sequences in its batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTimeBreakdown:
    """One run without its warm-up, in seconds of the engine's clock; None without the necessary records.

    Invariant: ``step_s`` is the sum over ``phase_s`` and over the totals of ``sizes``.
    """

    run_id: str
    wall_s: float | None
    output_tokens: int | None
    num_steps: int
    step_s: float
    phase_s: Mapping[StepPhase, float]
    sizes: Mapping[SizeKey, SizedSteps]
    breakdown: Breakdown | None
    floor: Floor | str
    """Least time per step for its FLOPs and bytes, or the reason why it is unknown."""
    modelled: ModelledRun | str = "no step-time model was applied"
    """What a step-time model predicts for its steps, or the reason why it predicts nothing."""
    is_bunched: bool = False
    """Its tokens reached the client in bursts."""
    latencies: Mapping[str, Latency] | None = None
    """By request, of those that completed; None unless requested (``request_latencies``)."""
    covers_steps: bool = True
    """``step_s`` is the time of whole steps."""
    is_guided: bool = False
    """A value model scored candidates in some of its steps."""
    is_speculative: bool = False
    """Its steps verified draft tokens."""
    step_scale: float = 1.0
    """Factor of the step times for the run's position in its block; 1 if unadjusted. All times but ``breakdown``
    and ``floor`` are scaled already."""

    @property
    def num_passes(self) -> float:
        """Sequences, summed over the steps."""
        return float(sum(size * steps.num_steps for (_, size), steps in self.sizes.items()))

    @property
    def has_steps(self) -> bool:
        return self.num_steps > 0 and self.step_s > 0 and self.covers_steps


def break_down_run_time(
    run: LoadedRun, metrics: Mapping[str, float | None], work: WorkModel | str
) -> RunTimeBreakdown:
    """The breakdown of a run with its ``metrics``; ``work`` is its work model, or the reason why it is unknown."""
    columns = run.columns
    tokens = metrics["output_tokens"]
    return RunTimeBreakdown(
        run_id=run.record.run_id,
        wall_s=metrics["wall_s"],
        output_tokens=None if tokens is None else int(tokens),
        num_steps=len(columns),
        step_s=s_from_ns(int(columns.dur_ns.sum())),
        phase_s={phase: s_from_ns(int(columns.dur_ns[columns.in_phase(phase)].sum())) for phase in PHASES},
        sizes=_sizes(columns),
        breakdown=break_down([tally_steps(columns, covers_steps=run.record.times_whole_steps)]),
        floor=_floor(run, work),
        covers_steps=run.record.times_whole_steps,
        is_guided=bool((columns.known_values("guided_rows") > 0).any()),
        is_speculative=bool(metrics["draft_tokens"]),
        is_bunched=any(warning.code == CLIENT_BUNCHING for warning in run.record.warnings),
    )


def at_middle_of_block(run: RunTimeBreakdown, scales: TimeScales) -> RunTimeBreakdown:
    """The run adjusted to the middle of its block: times are scaled, counts unchanged."""
    latencies = run.latencies and {
        name: Latency(latency.ttft_s * scales.latency, latency.span_s * scales.latency, latency.tokens)
        for name, latency in run.latencies.items()
    }
    return replace(
        run,
        wall_s=None if run.wall_s is None else run.wall_s * scales.wall,
        step_s=run.step_s * scales.step,
        phase_s={phase: time_s * scales.step for phase, time_s in run.phase_s.items()},
        sizes={key: SizedSteps(steps.num_steps, steps.total_s * scales.step) for key, steps in run.sizes.items()},
        latencies=latencies,
        step_scale=run.step_scale * scales.step,
    )


def _floor(run: LoadedRun, work: WorkModel | str) -> Floor | str:
    if isinstance(work, str):
        return work
    if not run.record.times_whole_steps:
        return "the step log times the sampler alone, not the steps that a floor is compared with"
    return floor_of(run.columns, work)


def _sizes(columns: StepColumns) -> dict[SizeKey, SizedSteps]:
    steps_by_size: dict[SizeKey, SizedSteps] = {}
    for phase in PHASES:
        chosen = columns.in_phase(phase)
        sizes, where, counts = np.unique(columns.num_seqs[chosen], return_inverse=True, return_counts=True)
        totals = np.zeros(len(sizes), dtype=np.int64)
        np.add.at(totals, where, columns.dur_ns[chosen])
        for size, count, total_ns in zip(sizes.tolist(), counts.tolist(), totals.tolist(), strict=True):
            steps_by_size[phase, size] = SizedSteps(count, s_from_ns(total_ns))
    return steps_by_size


def request_latencies(run: LoadedRun) -> dict[str, Latency] | None:
    """Latencies by request; None if a completed request has no arrivals or no count of tokens."""
    latencies, factor = {}, run.record.clock_factor
    for request in measured(run.requests):
        if not is_completed(request):
            continue
        first_ns, last_ns = ttft_ns(request), e2el_ns(request)
        longest = _longest_choice(request)
        if first_ns is None or last_ns is None or longest is None:
            return None
        span_s = s_from_ns((last_ns - first_ns) * factor)
        tokens = max(longest - 1, 1.0 if span_s > 0 else 0.0)
        latencies[request.request_id] = Latency(s_from_ns(first_ns * factor), span_s, tokens)
    return latencies or None


def _longest_choice(request: RequestRecord) -> float | None:
    """Tokens of its longest choice; usage divided evenly if single choices are not counted."""
    counts = [choice_tokens(request, choice) for choice in request.choices]
    if total(counts) is not None:
        return max(known_values(counts))
    if request.completion_tokens is None or not counts:
        return None
    return request.completion_tokens / len(counts)
