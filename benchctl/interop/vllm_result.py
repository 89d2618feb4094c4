"""``result.json``: one run under the key names of ``vllm bench serve``, so that existing tools read it.

Aggregates are in milliseconds and details in seconds, as there. ``itls`` of a request with several choices holds
the gaps of each choice in turn. Two things differ on purpose: unknown is null, never 0, and the texts stay in
the run's ``requests.jsonl``. Keys after ``errors`` are benchctl's own.

The sweep plots of vLLM 0.32 read a list of such documents in a file ``summary.json``, in a directory that has no
other file of that name; a column that is null in every run, such as the p99 of few requests, they cannot draw.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from benchctl.analysis.metrics.latency import (
    PERCENTS,
    is_completed,
    measured,
    ms_or_none,
    standard_deviation,
)
from benchctl.analysis.metrics.table import CLIENT_METRICS, LATENCIES, METRICS
from benchctl.profile.arrival import Arrival
from benchctl.records.loaded import LoadedRun
from benchctl.records.record import Manifest, RequestRecord
from benchctl.records.schema import SCHEMA_VERSION
from benchctl.units import s_from_ns

_RUN_FIELDS: Final = ("run_id", "variant", "cell", "block", "state", "clock", "time_scale")


def vllm_result(
    run: LoadedRun, metrics: Mapping[str, float | None], manifest: Manifest, arrival: Arrival | None
) -> dict[str, Any]:
    """The document of one run with its metrics; ``arrival`` is the profile's, or None when that cannot be read."""
    from benchctl.analysis.metrics.chunks import latencies_ns  # noqa: PLC0415 - numpy; a load's schedule needs none

    requests = measured(run.requests)
    record = run.record
    durations_ns = latencies_ns([request for request in requests if is_completed(request)])
    deviations = {
        f"std_{latency}_ms": ms_or_none(standard_deviation(durations_ns[latency]), record.clock_factor)
        for latency in LATENCIES
    }
    return {
        "date": record.started_at or manifest.created_at,
        "endpoint_type": record.engine or manifest.engine,
        "backend": record.engine or manifest.engine,
        "label": manifest.label,
        "model_id": record.effective_config.get("model"),
        "tokenizer_id": record.effective_config.get("server.tokenizer"),
        **vllm_figures({**metrics, **deviations}, arrival, num_requests=len(requests)),
        **_details(requests, record.clock_factor),
        "schema_version": SCHEMA_VERSION,
        **{name: getattr(record, name) for name in _RUN_FIELDS},
        "step_ms": metrics["step_ms"],
        "tokens_per_step": metrics["tokens_per_step"],
        "client": {name: metrics[name] for name in CLIENT_METRICS},
        "definitions": {f"{latency}_ms": METRICS[f"{latency}_ms"].formula for latency in LATENCIES}
        | {name: METRICS[name].formula for name in ("step_ms", "tokens_per_step", *CLIENT_METRICS)},
    }


def vllm_figures(
    metrics: Mapping[str, float | None],
    arrival: Arrival | None,
    *,
    num_requests: int,
) -> dict[str, Any]:
    """Arrival, counts, throughput, and {mean,median,std,pNN}_{ttft,tpot,itl,e2el}_ms; a tail with too few requests
    is null. ``metrics`` are those of a run and the standard deviations of its latencies.
    """
    tails = {f"p{percent}": f"p{percent}_" for percent in PERCENTS}
    return {
        "num_prompts": num_requests,
        **schedule(arrival),
        "duration": metrics["wall_s"],
        "completed": metrics["num_completed"],
        "failed": metrics["num_failed"],
        "total_input_tokens": metrics["prompt_tokens"],
        "total_output_tokens": metrics["output_tokens"],
        "request_throughput": metrics["request_throughput"],
        "request_goodput": metrics.get("goodput"),
        "output_throughput": metrics["output_throughput"],
        "total_token_throughput": total_throughput(metrics),
        **{
            f"{moment}_{latency}_ms": metrics[f"{prefix}{latency}_ms"]
            for latency in LATENCIES
            for moment, prefix in {"mean": "", "median": "p50_", "std": "std_", **tails}.items()
        },
    }


def schedule(arrival: Arrival | None) -> dict[str, Any]:
    """As vLLM writes them: the rate is ``inf`` where requests are sent as soon as they may be."""
    if arrival is None:
        return {"request_rate": None, "burstiness": None, "max_concurrency": None}
    return {
        "request_rate": arrival.request_rate if arrival.is_open_loop else "inf",
        "burstiness": arrival.burstiness,
        "max_concurrency": arrival.max_concurrency,
    }


def total_throughput(metrics: Mapping[str, float | None]) -> float | None:
    """Prompt and output tokens per second of wall time; None where one of them is unknown."""
    wall_s, prompt, output = metrics["wall_s"], metrics["prompt_tokens"], metrics["output_tokens"]
    return None if not wall_s or prompt is None or output is None else (prompt + output) / wall_s


def _details(requests: Sequence[RequestRecord], factor: float) -> dict[str, Any]:
    """One entry for each request, failed ones included, in the order of the request set."""
    from benchctl.analysis.metrics.chunks import chunks_of  # noqa: PLC0415 - numpy; a load's schedule needs none

    ordered = sorted(requests, key=lambda request: request.index)
    chunks = chunks_of(ordered)
    answers = chunks.answers
    first = min((request.sent_ns for request in ordered if request.sent_ns is not None), default=None)
    return {
        "input_lens": [request.prompt_tokens for request in ordered],
        "output_lens": [request.completion_tokens for request in ordered],
        "ttfts": [_scaled_s(answer.ttft_ns, factor) for answer in answers],
        "itls": [[_seconds(gap_ns * factor) for gap_ns in gaps.tolist()] for gaps in chunks.gaps_of_requests],
        "latencies": [_scaled_s(answer.e2el_ns, factor) for answer in answers],
        "start_times": [
            None if request.sent_ns is None or first is None else _scaled_s(request.sent_ns - first, factor)
            for request in ordered
        ],
        "errors": ["" if request.error is None else request.error.message for request in ordered],
    }


def _scaled_s(duration_ns: float | None, factor: float) -> float | None:
    return None if duration_ns is None else _seconds(duration_ns * factor)


def _seconds(duration_ns: float) -> float:
    """Seconds to the nanosecond, which is what was measured: half the digits, half the file."""
    return round(s_from_ns(duration_ns), 9)
