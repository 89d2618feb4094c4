"""Every derived number: its name, unit, formula, good direction, and what it needs.

Names and definitions are vLLM's where vLLM has them. Numbers that a changed decode path leaves meaningful even
when a step yields several tokens are ``step_ms`` and ``tokens_per_step``.

Durations that the client measured are multiplied by ``time_scale`` if the engine's clock is virtual, to compare
with its steps; ``client_wall_s``, ``ready_s`` and ``warmup_s`` are not.
"""

from dataclasses import dataclass, replace
from typing import Final, Literal

from benchctl.analysis.metrics.latency import PERCENTS, smallest_sample
from benchctl.errors import UsageError
from benchctl.profile.files import did_you_mean
from benchctl.profile.objective import SLO_METRICS

Direction = Literal["lower", "higher", "none"]


@dataclass(frozen=True, slots=True)
class Metric:
    """A derived number. ``direction`` is the better one, ``none`` if neither is.

    ``is_exact`` marks a count without noise, which is compared exactly. ``needs`` names the required records.
    """

    name: str
    unit: str
    formula: str
    direction: Direction = "none"
    is_exact: bool = False
    needs: str = "completed requests"


_SCALED = " (* time_scale on a virtual clock)"
_ARRIVALS = "completed requests with arrival times"
_STEPS = "a step log"
_CLIENT = "samples of the client"
_DRAFTS = "steps or server's counters of drafts"
_GPU = "GPU samples taken during the load"

_LATENCIES: Final = {
    "ttft": ("first output of any choice - send, per request", f"{_ARRIVALS}, read in time"),
    "tpot": (
        "(last - first output) / (output tokens - 1), per choice; tokens as the engine counted them",
        "completed requests with arrival times, read in time, and more than one token",
    ),
    "itl": (
        "gaps between successive chunks of a choice, pooled; 0 between chunks that came in one read",
        "completed requests of several chunks, read in time",
    ),
    "e2el": ("last output of any choice - send, per request", _ARRIVALS),
}
LATENCIES: Final = tuple(_LATENCIES)


_LATENCY_METRICS: Final = [
    Metric(f"{prefix}{latency}_ms", "ms", f"{statistic} of {formula}{_SCALED}", "lower", needs=f"{number}{needs}")
    for latency, (formula, needs) in _LATENCIES.items()
    for prefix, statistic, number in (
        ("", "mean", ""),
        *((f"p{percent}_", f"p{percent}", f"{smallest_sample(percent)} ") for percent in PERCENTS),
    )
]

_OBJECTIVE = "slo in the profile; request records with arrival times, read in time"
_LOAD_METRICS: Final = [
    Metric("wall_s", "s", "last output - first send" + _SCALED, "lower", needs=_ARRIVALS),
    Metric("client_wall_s", "s", "last output - first send, on the client's clock", "lower", needs=_ARRIVALS),
    Metric("ready_s", "s", "server ready - server launched", "lower", needs="the times of launch and readiness"),
    Metric("warmup_s", "s", "first send - start of the warm-up", "lower", needs="a warm-up"),
    Metric("num_requests", "requests", "requests, completed or not", is_exact=True, needs="request records"),
    Metric("num_completed", "requests", "requests answered to their end", "higher", True, "request records"),
    Metric("num_failed", "requests", "num_requests - num_completed", "lower", True, "request records"),
    Metric("prompt_tokens", "tokens", "Σ usage.prompt_tokens, once per request", "none", True, "usage"),
    Metric("output_tokens", "tokens", "Σ usage.completion_tokens, once per request", needs="usage"),
    Metric(
        "past_eos_frac",
        "1",
        "Σ max(0, output tokens - natural tokens) / Σ output tokens: output past the end of the baseline's answers",
        needs="natural lengths: stop replay-natural, or workload.lengths_from",
    ),
    Metric("cached_tokens", "tokens", "Σ prompt tokens found in the prefix cache", needs="cached tokens in usage"),
    Metric(
        "prefix_hit_frac",
        "1",
        "growth of the server's counter of prefix hits, else cached_tokens / Σ usage.prompt_tokens",
        needs="usage, and the server's counters or cached tokens in it",
    ),
    Metric("output_throughput", "tokens/s", "output_tokens / wall_s", "higher", needs="usage and arrival times"),
    Metric("request_throughput", "requests/s", "num_completed / wall_s", "higher", needs=_ARRIVALS),
    Metric("goodput", "requests/s", "requests that kept all limits of slo / wall_s", "higher", needs=_OBJECTIVE),
    Metric(
        "slo_attained_frac", "1", "requests that kept all limits of slo / num_requests", "higher", needs=_OBJECTIVE
    ),
    Metric(
        "slo_ratio",
        "1",
        "least factor of all limits of slo at which slo.share of the requests keep them",
        "lower",
        needs=f"{_OBJECTIVE}; as many requests as a percentile at slo.share",
    ),
]

_CHUNKS = "chunks of measured requests"
_SENT = "sent requests"
_REFILLS = "a closed loop that filled slots again, and when these became free"
_GAP = "send - last byte of the stream that had the slot before, by the kernel's stamp"
_CLIENT_METRICS: Final = [
    Metric("p50_send_lag_ms", "ms", "p50 of send - schedule, client's clock", needs=_SENT),
    Metric("p99_send_lag_ms", "ms", "p99 of send - schedule, client's clock", needs=_SENT),
    Metric("max_send_lag_ms", "ms", "max of send - schedule, client's clock", "lower", needs=_SENT),
    Metric(
        "offered_load_frac",
        "1",
        "open requests / slots of a closed loop while requests remain; requests/s sent / planned of an open one",
        "higher",
        needs="a load of more than one wave whose schedule is known",
    ),
    Metric(
        "slot_idle_frac",
        "1",
        "idle / all slot time of a closed loop until its last send; idle: min(empty slots, unsent requests)",
        "lower",
        needs=_REFILLS,
    ),
    Metric("p50_refill_gap_ms", "ms", f"p50 of {_GAP}", "lower", needs=_REFILLS),
    Metric("p99_refill_gap_ms", "ms", f"p99 of {_GAP}", "lower", needs=f"{smallest_sample(99)} refills of slots"),
    Metric(
        "p99_refill_connect_ms",
        "ms",
        "p99 of what of these gaps passed until a connection was open; 0 where one was used again",
        "lower",
        needs=f"{smallest_sample(99)} refills of slots",
    ),
    Metric("kernel_stamp_frac", "1", "chunks whose arrival the kernel stamped / chunks", needs=_CHUNKS),
    Metric(
        "coalesced_chunk_frac",
        "1",
        "chunks read together with the next of their choice, so that their time is an upper bound / chunks",
        needs=_CHUNKS,
    ),
    Metric(
        "p99_read_delay_ms",
        "ms",
        "p99 of read - arrival over chunks, client's clock",
        needs=f"{smallest_sample(99)} chunks stamped by the kernel",
    ),
    Metric("max_loop_lag_ms", "ms", "max of wake-up - due of the client's event loop", needs=_CLIENT),
    Metric(
        "client_cpu_cores",
        "cores",
        "Σ over the load generator's processes of CPU time / time",
        "lower",
        needs=_CLIENT,
    ),
]
CLIENT_METRICS: Final = tuple(metric.name for metric in _CLIENT_METRICS)
"""Metrics of the load generator, which do not depend on the server."""

_STEP_METRICS: Final = [
    Metric("num_steps", "steps", "steps after the warm-up", "lower", needs=_STEPS),
    Metric("step_ms", "ms", "Σ step time / num_steps", "lower", needs=_STEPS),
    Metric("p50_step_ms", "ms", "p50 of step times", "lower", needs=_STEPS),
    Metric("p95_step_ms", "ms", "p95 of step times", "lower", needs=_STEPS),
    Metric("prefill_step_ms", "ms", "mean over steps that only prefill", "lower", needs="prefill steps"),
    Metric("decode_step_ms", "ms", "mean over steps that only decode", "lower", needs="decode steps"),
    Metric("mixed_step_ms", "ms", "mean over steps that prefill and decode", "lower", needs="mixed steps"),
    Metric(
        "tokens_per_step",
        "tokens",
        "Σ output tokens / Σ sequences over steps that only decode: what one sequence gains in one step",
        "higher",
        needs="decode steps that count their output tokens",
    ),
    Metric(
        "batch_tokens_per_step",
        "tokens",
        "Σ output tokens / num_steps: what the whole batch gains in one step",
        "higher",
        needs="steps that count their output tokens",
    ),
    Metric("mean_batch_size", "sequences", "Σ sequences / num_steps", needs=_STEPS),
    Metric("greedy_step_frac", "1", "greedy steps / num_steps", needs="steps that say whether they are greedy"),
    Metric("guided_step_frac", "1", "steps with guided rows / num_steps", needs="steps that count guided rows"),
    Metric(
        "candidates_per_token",
        "candidates",
        "Σ candidates scored / Σ output tokens",
        "lower",
        needs="steps that count candidates and output tokens",
    ),
    Metric(
        "value_reuse_frac",
        "1",
        "Σ reused tokens / Σ (reused + extended tokens): what of the answers the value model need not compute",
        "higher",
        needs="guided steps that count the tokens reused",
    ),
    Metric(
        "value_replay_frac",
        "1",
        "guided steps that repeated recorded passes / guided steps that say whether they did",
        "higher",
        needs="guided steps of a server that records passes of its value model",
    ),
    Metric(
        "value_recordings",
        "passes",
        "Σ passes of the value model that were recorded within steps",
        "lower",
        needs="guided steps of a server that records passes of its value model",
    ),
    Metric("drafts", "drafts", "Σ sequences for which a step verified a draft", needs=_DRAFTS),
    Metric("draft_tokens", "tokens", "Σ draft tokens verified", needs=_DRAFTS),
    Metric("accepted_tokens", "tokens", "Σ draft tokens accepted", needs=_DRAFTS),
    Metric(
        "acceptance_rate",
        "1",
        "accepted_tokens / draft_tokens",
        "higher",
        needs="draft tokens",
    ),
    Metric(
        "acceptance_length",
        "tokens",
        "1 + accepted_tokens / drafts, as vLLM defines it: it counts a bonus token even where a server computes "
        "none; tokens_per_step counts what sequences got",
        "higher",
        needs="drafts",
    ),
    Metric("preemptions", "sequences", "Σ sequences preempted", "lower", needs="steps that count preemptions"),
    Metric("peak_kv_blocks", "blocks", "max of KV blocks in use", "lower", needs="steps that count KV blocks"),
]

_DEVICE_METRICS: Final = [
    Metric(
        "gpu_energy_j",
        "J",
        "Σ over devices of the energy counter's growth during the load, or of power * time",
        "lower",
        needs=_GPU,
    ),
    Metric("gpu_energy_per_token_j", "J/token", "gpu_energy_j / output_tokens", "lower", needs=_GPU),
    Metric("gpu_power_w", "W", "Σ over devices of mean power during the load", "lower", needs=_GPU),
    Metric("gpu_utilization_frac", "1", "mean over devices and samples during the load", needs=_GPU),
    Metric("gpu_peak_memory_bytes", "bytes", "Σ over devices of the most memory in use", "lower", needs=_GPU),
    Metric("server_cpu_cores", "cores", "mean of cores kept busy by the server", "lower", needs="host samples"),
]

_WHOLE: Final = {metric.name: metric for metric in [*_LATENCY_METRICS, *_STEP_METRICS, *_LOAD_METRICS]}
STEADY: Final[dict[str, str]] = {
    name: f"steady_{name}"
    for name in (
        *("ttft_ms", "p99_ttft_ms", "tpot_ms", "p99_tpot_ms", "e2el_ms", "step_ms", "decode_step_ms"),
        *("output_throughput", *SLO_METRICS),
    )
}
"""The metrics that a steady window has as well, with their names there."""
_WINDOW = "a load of which 200 requests ended before its last was sent, in its steady window"
_FORMULAS: Final = {
    "output_throughput": "tokens that arrived in the steady window / its length",
    "goodput": "requests sent per second of the steady window * steady_slo_attained_frac",
    "slo_attained_frac": "requests of the steady window that kept all limits of slo / its requests",
}
"""Of steady metrics that say more than those of the whole load."""
_STEADY_METRICS: Final = [
    replace(
        _WHOLE[name],
        name=steady,
        formula=_FORMULAS.get(name, f"{_WHOLE[name].formula.removesuffix(_SCALED)}, in the steady window"),
        needs=f"{_WHOLE[name].needs}; {_WINDOW}",
    )
    for name, steady in STEADY.items()
]

OF_SLO: Final = frozenset({*SLO_METRICS, *(STEADY[name] for name in SLO_METRICS)})
"""Metrics that only experiments with an objective have."""

METRICS: Final[dict[str, Metric]] = {
    metric.name: metric
    for metric in [
        *(*_LOAD_METRICS, *_CLIENT_METRICS, *_LATENCY_METRICS, *_STEP_METRICS, *_STEADY_METRICS),
        *_DEVICE_METRICS,
    ]
}

_OF_STEPS: Final = {metric.name for metric in _STEP_METRICS if metric.needs != _DRAFTS}
OF_STEPS: Final = frozenset(_OF_STEPS | {STEADY[name] for name in _OF_STEPS & STEADY.keys()})
"""Metrics that only a step log gives; drafts are in a server's counters as well."""

SERVER_RECORDED: Final = OF_STEPS | {metric.name for metric in (*_STEP_METRICS, *_DEVICE_METRICS)}
"""Metrics from what the server or its devices record beside the answers; not every server does."""

CLIENT_TIMED: Final = frozenset(
    {"wall_s", "client_wall_s", "output_throughput", "request_throughput", "steady_output_throughput"}
    | OF_SLO
    | {name for name in METRICS if name.endswith(tuple(f"{latency}_ms" for latency in LATENCIES))}
)
"""Metrics from the client's send and receive times; all others are the server's or counts."""

POSITION_ADJUSTED: Final = frozenset(
    name
    for name, metric in METRICS.items()
    if (metric.unit in {"ms", "s", "tokens/s", "requests/s", "J", "J/token"} or name.endswith("slo_ratio"))
    and name not in {*CLIENT_METRICS, "ready_s", "warmup_s"}
)
"""Metrics that drift of the machine within a block changes; counts and shares are compared unadjusted."""


_KEEPS = "keeps the objective of slo, where the isotonic fit of ln slo_ratio over ln size is 0, of one block"
_BRACKET = "loads that keep the objective of slo, and larger ones that do not"
ACROSS_LOADS: Final = {
    metric.name: metric
    for metric in (
        Metric("capacity_concurrency", "requests", f"largest concurrency that {_KEEPS}", "higher", needs=_BRACKET),
        Metric("capacity_rate", "requests/s", f"largest request rate that {_KEEPS}", "higher", needs=_BRACKET),
    )
}
"""Metrics of all loads of an arm in one block; no run alone has one."""

ALL_METRICS: Final = METRICS | ACROSS_LOADS
"""Those that can be compared."""


def deciding_metrics(names: tuple[str, ...]) -> tuple[str, ...]:
    """The metrics that make the verdict, each once.

    Raises UsageError for one that is unknown or has no better direction.
    """
    current, metrics = tuple(dict.fromkeys(names)), ALL_METRICS
    for name in current:
        if name not in metrics:
            hint = did_you_mean(name, metrics) or f"metrics are {', '.join(metrics)}"
            raise UsageError(f"no metric is called {name!r}; {hint}")
        if metrics[name].direction == "none" and not metrics[name].is_exact:
            raise UsageError(
                f"{name} cannot decide a comparison: neither more nor less of it is better. "
                "It is shown as exploratory; name others with --metrics, or as primary_metrics of the profile"
            )
    return current
