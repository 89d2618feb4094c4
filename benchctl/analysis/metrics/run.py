"""The metrics of one run: ``METRICS`` says what each is, ``run_metrics`` derives them all from its records.

Those of GPU and host are from samples that were taken between the first send and the last output. Drafted and
accepted tokens are counted in all and by position, of a run and of an arm.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, zip_longest
from statistics import fmean, stdev
from typing import Final

import numpy as np

from benchctl.analysis.metrics.arrivals import uncertain_metrics
from benchctl.analysis.metrics.chunks import Chunks, chunks_of, latencies_ns
from benchctl.analysis.metrics.client import OfferedLoad, busy_cores, client_metrics, offered_load, slot_occupancy
from benchctl.analysis.metrics.latency import (
    PERCENTS,
    is_completed,
    known_values,
    latency_metrics,
    mean_of_known,
    measured,
    ms_or_none,
    of_load,
    percentiles,
    quotient,
    send_lag_ns,
    smallest_sample,
    standard_deviation,
    total,
)
from benchctl.analysis.metrics.server_counters import (
    COUNTERS,
    measure_growth,
    measure_growth_by_position,
    prefix_hit_frac,
)
from benchctl.analysis.metrics.slo import request_ratios, slo_metrics
from benchctl.analysis.metrics.steady import Window, steady_metrics, steady_window
from benchctl.analysis.metrics.table import METRICS, OF_SLO, STEADY
from benchctl.analysis.statistics.intervals import Interval, t_quantile
from benchctl.costs.shapes import ModelShape, shape_for
from benchctl.errors import UsageError
from benchctl.profile.arrival import Arrival
from benchctl.profile.choices import ServerOptions
from benchctl.profile.objective import SLO_METRICS, Slo
from benchctl.records.columns import Integers, StepColumns, exact_sum
from benchctl.records.loaded import LoadedRun
from benchctl.records.record import RequestRecord, RunRecord
from benchctl.records.schema import GPU_LOST, GPU_UNREADABLE, GpuSample, HostInfo, HostSample
from benchctl.units import ms_from_ns, s_from_ns


def device_energy_j(samples: Sequence[GpuSample]) -> float | None:
    """Energy that one device used between its first and last sample.

    The growth of its counter where it has one; otherwise Σ (P_i + P_{i+1}) / 2 · (t_{i+1} - t_i) over the
    samples that read power.
    """
    counted = [sample.energy_j for sample in samples if sample.energy_j is not None]
    if len(counted) > 1:
        return counted[-1] - counted[0]
    read = [(sample.t_ns, sample.power_w) for sample in samples if sample.power_w is not None]
    if len(read) < 2:
        return None
    return sum((p1 + p2) / 2 * s_from_ns(t2 - t1) for (t1, p1), (t2, p2) in pairwise(read))


def _is_within(sample: GpuSample | HostSample, span: tuple[int, int] | None) -> bool:
    return span is not None and span[0] <= sample.t_ns <= span[1]


def gpu_metrics(
    samples: Sequence[GpuSample], span: tuple[int, int] | None, *, are_whole: bool = True
) -> dict[str, float | None]:
    """``gpu_*`` metrics except the energy per token; one that any device does not report is unknown.

    Without ``are_whole``, a device has no samples for all of the load, and all metrics are unknown: sums would lack
    what it used.
    """
    devices: dict[int, list[GpuSample]] = defaultdict(list)
    for sample in samples if are_whole else ():
        if _is_within(sample, span):
            devices[sample.index].append(sample)
    groups = [devices[index] for index in sorted(devices)]
    power = [mean_of_known([s.power_w for s in group]) for group in groups]
    busy = [mean_of_known([s.utilization_frac for s in group]) for group in groups]
    memory = [max(map(float, known_values(s.memory_used_bytes for s in group)), default=None) for group in groups]
    return {
        "gpu_energy_j": total([device_energy_j(group) for group in groups]),
        "gpu_power_w": total(power),
        "gpu_utilization_frac": quotient(total(busy), len(groups)),
        "gpu_peak_memory_bytes": total(memory),
    }


def run_metrics(run: LoadedRun, arrival: Arrival | None = None, slo: Slo | None = None) -> dict[str, float | None]:
    """Every metric of ``METRICS`` for one run; None if its records do not contain it, or between bounds only.

    ``arrival`` is the schedule of the load; metrics that need it are unknown without. Those of ``OF_SLO`` are there
    with ``slo``, the objective of its requests.
    """
    return metrics_and_tails(run, arrival, slo)[0]


def metrics_and_tails(
    run: LoadedRun, arrival: Arrival | None = None, slo: Slo | None = None
) -> tuple[dict[str, float | None], dict[str, float]]:
    """The metrics of a run, and percentiles of latencies that too few requests bear out: of these requests alone,
    near the slowest of them.

    The latter of virtual times alone, which no disturbance of a machine made longer; elsewhere they are unknown.
    """
    requests = measured(run.requests)
    chunks = chunks_of(requests)
    window, answered = steady_window(chunks), chunks.completed
    completed = answered.requests
    span, factor = load_window_ns(run), run.record.clock_factor
    num_enough = smallest_sample(max(PERCENTS)) if run.record.is_virtual else 0
    latencies = latency_metrics(answered.latencies_ns(answered.t_ns), max(len(completed), num_enough), factor)
    of_few = tuple(f"p{percent}_" for percent in PERCENTS if smallest_sample(percent) > len(completed))
    tails = {name: ms for name, ms in latencies.items() if name.startswith(of_few) and ms is not None}
    metrics: dict[str, float | None] = {
        **_load_metrics(run.record, requests, completed, span),
        "prefix_hit_frac": prefix_hit_frac(run.prometheus, requests),
        **client_metrics(chunks, run.client, arrival, of_load(run)),
        **latencies,
        **_step_metrics(run.columns, covers_steps=run.record.times_whole_steps),
        **steady_metrics(run, chunks, window),
        **run_drafts(run).metrics,
        **gpu_metrics(
            run.gpu,
            span,
            # A device of these warnings has no samples for all of the load
            are_whole={GPU_LOST, GPU_UNREADABLE}.isdisjoint(warning.code for warning in run.record.warnings),
        ),
        "server_cpu_cores": mean_of_known(
            sample.server_cpu_cores for sample in run.host if _is_within(sample, span)
        ),
    }
    if slo is not None:
        metrics |= _objective_metrics(chunks, window, slo, factor, metrics["wall_s"])
    uncertain = uncertain_metrics(run, answered)
    if slo is not None and any(name.endswith(tuple(f"{each}_ms" for each in slo.limits_ms)) for name in uncertain):
        uncertain |= dict.fromkeys(SLO_METRICS, (0.0, math.inf))
    metrics |= dict.fromkeys((*tails, *uncertain, *(STEADY[name] for name in uncertain if name in STEADY)))
    metrics["gpu_energy_per_token_j"] = quotient(metrics["gpu_energy_j"], metrics["output_tokens"])
    return {name: metrics[name] for name in METRICS if name in metrics}, tails


def _objective_metrics(
    chunks: Chunks, window: Window | None, slo: Slo, factor: float, wall_s: float | None
) -> dict[str, float | None]:
    """``OF_SLO``; in the window of the requests that were sent in it, and of those without a time of their send."""
    ratios = request_ratios(chunks.requests, slo.limits_ms, factor)
    metrics = slo_metrics(ratios, slo.share, wall_s)
    if window is None:
        return dict.fromkeys(OF_SLO) | metrics
    in_window = np.append(ratios[window.sent], ratios[chunks.sent_ns < 0])
    steady = slo_metrics(in_window, slo.share, quotient(len(in_window), window.sends_per_s(factor)))
    return metrics | {STEADY[name]: value for name, value in steady.items()}


def other_cores(runs: Iterable[LoadedRun], host: HostInfo) -> tuple[float, int] | None:
    """Cores of ``host`` that programs beside server and client kept busy while runs were loaded, the mean of all
    samples, and the number of its cores.

    None without samples, as of a server that another program started, and for runs of other machines.
    """
    num_cores, used = host.num_cores or 0, list[float]()
    for load in (load for run in runs for load in run.loads):
        span, of_workers = load_window_ns(load), busy_cores(load.client)
        # One worker is the sampled client itself
        of_load = sum(of_workers.values()) if len(of_workers) > 1 else 0.0
        used += [
            sample.host_cpu_frac * num_cores
            - (sample.server_cpu_cores or 0)
            - (sample.client_cpu_cores or 0)
            - of_load
            for sample in load.host
            if sample.host_cpu_frac is not None and _is_within(sample, span) and load.record.host == host.hostname
        ]
    return (max(0.0, fmean(used)), num_cores) if used and num_cores else None


def load_window_ns(run: LoadedRun) -> tuple[int, int] | None:
    """First send and last output on the client's clock, from the run's times or its requests."""
    times = run.record.times
    if times.first_send_ns is not None and times.last_token_ns is not None:
        return times.first_send_ns, times.last_token_ns
    answers = chunks_of(measured(run.requests)).answers
    sent = known_values(answer.sent_ns for answer in answers)
    last = known_values(answer.last_ns for answer in answers)
    return (min(sent), max(last)) if sent and last else None


def _load_metrics(
    record: RunRecord,
    requests: Sequence[RequestRecord],
    completed: Sequence[RequestRecord],
    span: tuple[int, int] | None,
) -> dict[str, float | None]:
    times = record.times
    client_wall_s = _seconds(*span) if span else None
    wall_s = None if client_wall_s is None else client_wall_s * record.clock_factor
    output_tokens = total([request.completion_tokens for request in completed])
    past_eos = [
        None
        if r.completion_tokens is None or r.natural_tokens is None
        else max(0, r.completion_tokens - r.natural_tokens)
        for r in completed
    ]
    return {
        "wall_s": wall_s,
        "client_wall_s": client_wall_s,
        "ready_s": _seconds(times.launch_ns, times.ready_ns),
        "warmup_s": _seconds(times.warmup_start_ns, times.first_send_ns),
        "num_requests": len(requests) if requests else None,
        "num_completed": len(completed) if requests else None,
        "num_failed": len(requests) - len(completed) if requests else None,
        "prompt_tokens": total([request.prompt_tokens for request in completed]),
        "output_tokens": output_tokens,
        "past_eos_frac": quotient(total(past_eos), output_tokens),
        "cached_tokens": total([request.cached_tokens for request in completed]),
        "output_throughput": quotient(output_tokens, wall_s),
        "request_throughput": quotient(len(completed), wall_s),
    }


def num_guided_steps(steps: StepColumns) -> int | None:
    """Steps in which a value model scored rows; unknown if any step does not count them."""
    rows = steps.known_values("guided_rows")
    return int((rows > 0).sum()) if 0 < len(rows) == len(steps) else None


def _step_metrics(steps: StepColumns, *, covers_steps: bool) -> dict[str, float | None]:
    """Metrics of the steps; without durations if the log times the sampler alone."""
    tails = percentiles(steps.dur_ns, len(steps), (50, 95))
    is_decode = steps.in_phase("decode")
    output_tokens = steps.total("output_tokens")
    blocks = steps.known_values("kv_used_blocks")
    names = ("value_reuse_tokens", "value_extend_tokens", "value_replayed", "value_recordings")
    reused, extended, replayed, recordings = (
        int(values.sum()) if len(values) else None for values in map(steps.known_values, names)
    )
    metrics = {
        "num_steps": len(steps) or None,
        "step_ms": _mean_ms(steps.dur_ns),
        "p50_step_ms": ms_or_none(tails[50]),
        "p95_step_ms": ms_or_none(tails[95]),
        "prefill_step_ms": _mean_ms(steps.dur_ns[steps.in_phase("prefill")]),
        "decode_step_ms": _mean_ms(steps.dur_ns[is_decode]),
        "mixed_step_ms": _mean_ms(steps.dur_ns[steps.in_phase("mixed")]),
        "tokens_per_step": quotient(steps.total("output_tokens", is_decode), exact_sum(steps.num_seqs[is_decode])),
        "batch_tokens_per_step": quotient(output_tokens, len(steps)),
        "mean_batch_size": quotient(exact_sum(steps.num_seqs), len(steps)),
        "greedy_step_frac": quotient(steps.total("is_greedy"), len(steps)),
        "guided_step_frac": quotient(num_guided_steps(steps), len(steps)),
        "candidates_per_token": quotient(steps.total("candidates"), output_tokens),
        # of the value model: from the steps that say so; those without a guided row do not
        "value_reuse_frac": quotient(reused, total([reused, extended])),
        "value_replay_frac": quotient(replayed, len(steps.known_values("value_replayed"))),
        "value_recordings": recordings,
        "preemptions": steps.total("preempted"),
        "peak_kv_blocks": int(blocks.max()) if len(blocks) else None,
    }
    return {n: value if covers_steps or not n.endswith("step_ms") else None for n, value in metrics.items()}


def _mean_ms(durations_ns: Integers) -> float | None:
    return ms_from_ns(exact_sum(durations_ns) / len(durations_ns)) if len(durations_ns) else None


def _seconds(start_ns: int | None, end_ns: int | None) -> float | None:
    return None if start_ns is None or end_ns is None else s_from_ns(end_ns - start_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFigures:
    """The outcome of one load, without its warm-up. Tokens and durations are those of completed requests."""

    metrics: Mapping[str, float | None]
    """Those of its run; ``std_`` and ``max_`` of each latency and the mean ``send_lag_ms`` beside them."""
    num_requests: int
    num_completed: int
    errors: Mapping[str, int]
    """Failed requests by kind of error."""
    limits_ms: Mapping[str, float]
    """Limits of each request; with any, the metrics have ``OF_SLO``."""
    offered: OfferedLoad | None

    @property
    def num_good(self) -> int | None:
        """Requests that kept all limits; None without limits, and where late reads leave it open."""
        share = self.metrics.get("slo_attained_frac")
        return None if share is None else round(share * self.num_requests)


def load_figures(run: LoadedRun, arrival: Arrival, slo: Slo | None = None) -> LoadFigures:
    """The figures of the load of ``run``; goodput counts the requests that kept the limits of ``slo``."""
    requests, metrics = measured(run.requests), run_metrics(run, arrival, slo)
    completed = [request for request in requests if is_completed(request)]
    metrics["send_lag_ms"] = ms_or_none(mean_of_known(map(send_lag_ns, requests)))
    for latency, durations_ns in latencies_ns(completed).items():
        metrics[f"std_{latency}_ms"] = ms_or_none(standard_deviation(durations_ns))
        metrics[f"max_{latency}_ms"] = ms_or_none(max(durations_ns, default=None))
    return LoadFigures(
        metrics=metrics,
        num_requests=len(requests),
        num_completed=len(completed),
        errors=Counter(request.error.kind for request in requests if request.error is not None),
        limits_ms={} if slo is None else slo.limits_ms,
        offered=offered_load(requests, arrival, slot_occupancy(of_load(run), arrival)),
    )


CONFIDENCE: Final = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCounts:
    """Sums over the load of a run, or of all runs of an arm; None where they are not counted."""

    drafts: int | None = None
    draft_tokens: int | None = None
    accepted_tokens: int | None = None
    accepted_by_position: tuple[int, ...] | None = None
    """Drafts whose first, second, … token was accepted."""

    @property
    def metrics(self) -> dict[str, float | None]:
        """Metrics of speculative decoding; unknown without the counts that they need."""
        accepted_per_draft = quotient(self.accepted_tokens, self.drafts)
        return {
            "drafts": self.drafts,
            "draft_tokens": self.draft_tokens,
            "accepted_tokens": self.accepted_tokens,
            "acceptance_rate": quotient(self.accepted_tokens, self.draft_tokens),
            "acceptance_length": None if accepted_per_draft is None else 1 + accepted_per_draft,
        }

    @property
    def positions(self) -> tuple["PositionAcceptance", ...]:
        """Acceptance at each position; empty where either count is unknown."""
        if self.drafts is None or self.accepted_by_position is None:
            return ()
        before = (self.drafts, *self.accepted_by_position)
        return tuple(
            PositionAcceptance(
                position=position,
                accepted=accepted,
                survival=quotient(accepted, self.drafts),
                conditional=quotient(accepted, before[position - 1]),
            )
            for position, accepted in enumerate(self.accepted_by_position, start=1)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionAcceptance:
    """Acceptance at one position of the drafts."""

    position: int
    """Counted from 1."""
    accepted: int
    """Drafts accepted up to it."""
    survival: float | None
    """Those over all drafts, the marginal rate; None without drafts."""
    conditional: float | None
    """Those over the drafts accepted up to the position before; None where these are none."""
    survival_interval: Interval | None = None
    """At 95 %, by Student's t over the runs of an arm, within 0 and 1; None for one run."""
    conditional_interval: Interval | None = None


def draft_counts(steps: StepColumns) -> DraftCounts:
    """Tokens drafted and accepted in these steps."""
    positions = steps.accepted_by_position
    counts = {name: steps.known_values(name) for name in ("drafts", "draft_tokens", "accepted_tokens")}
    return DraftCounts(
        **{name: int(values.sum()) for name, values in counts.items() if len(values)},
        accepted_by_position=None
        if positions is None
        else tuple(np.nansum(positions, axis=0).astype(int).tolist()),
    )


def run_drafts(run: LoadedRun) -> DraftCounts:
    """The drafts of a run by its steps; by the growth of the server's counters where steps do not count them."""
    by_steps = draft_counts(run.columns)
    if by_steps.draft_tokens is not None:
        return by_steps
    if run.several:
        return sum_of_drafts([run_drafts(load) for load in run.several])
    counters = {name: getattr(COUNTERS, name) for name in ("drafts", "draft_tokens", "accepted_tokens")}
    grown = {name: measure_growth(run.prometheus, names) for name, names in counters.items()}
    return DraftCounts(
        **{name: growth.count for name, growth in grown.items() if growth is not None},
        accepted_by_position=measure_growth_by_position(run.prometheus, COUNTERS.accepted_by_position) or None,
    )


def sum_of_drafts(parts: Sequence[DraftCounts]) -> DraftCounts:
    """The drafts of several loads or runs together; a count that any of them lacks is None."""
    by_position = [each for counts in parts if (each := counts.accepted_by_position) is not None]
    accepted = tuple(map(sum, zip_longest(*by_position, fillvalue=0)))
    return DraftCounts(
        drafts=total([counts.drafts for counts in parts]),
        draft_tokens=total([counts.draft_tokens for counts in parts]),
        accepted_tokens=total([counts.accepted_tokens for counts in parts]),
        accepted_by_position=accepted if len(by_position) == len(parts) else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmDrafts:
    """Drafts of all usable runs of an arm."""

    counts: DraftCounts
    """Summed over the runs."""
    positions: tuple[PositionAcceptance, ...]
    """All runs together, with the scatter of the runs; empty where a run does not count them."""


def arm_drafts(runs: Sequence[LoadedRun]) -> ArmDrafts | None:
    """The drafts of an arm; None where no run verified a draft token."""
    by_run = [run_drafts(run) for run in runs]
    counts = sum_of_drafts(by_run)
    if not counts.draft_tokens:
        return None
    of_runs = [counts.positions for counts in by_run]
    positions = []
    for i, pooled in enumerate(counts.positions):
        reaching = [run[i] for run in of_runs if i < len(run)]
        survival = _interval(pooled.survival, [run.survival for run in reaching])
        conditional = _interval(pooled.conditional, [run.conditional for run in reaching])
        positions.append(replace(pooled, survival_interval=survival, conditional_interval=conditional))
    return ArmDrafts(counts=counts, positions=tuple(positions))


def _interval(centre: float | None, shares: Sequence[float | None]) -> Interval | None:
    values = known_values(shares)
    if centre is None or len(values) < 2:
        return None
    quantile = t_quantile(1 - (1 - CONFIDENCE) / 2, len(values) - 1)
    half = quantile * stdev(values) / math.sqrt(len(values))
    return max(0.0, centre - half), min(1.0, centre + half)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafter:
    """The source of the drafts of a run; without ``shape`` and ``problem``, no pass of any model."""

    shape: ModelShape | None = None
    problem: str | None = None
    """The reason why the shape of the model is unknown."""
    has_backfill: bool = True
    """See ``DraftSource``."""
    is_in_use: bool = True
    """The options say that the server speculates; False where they do not say."""


def drafter_of(server: ServerOptions) -> Drafter | None:
    """The drafter of a server with these options; None where they say that it does not speculate."""
    if server.speculates is False:
        return None
    source = server.draft_source
    shape, problem = None, source.problem
    try:
        shape = None if source.model is None else shape_for(source.model)
    except UsageError as error:
        problem = str(error)
    return Drafter(
        shape=shape, problem=problem, has_backfill=source.has_backfill, is_in_use=bool(server.speculates)
    )
