"""One run under the names of AIPerf: ``profile_export_aiperf.json`` and ``profile_export.jsonl``.

What each request has is an object with unit, avg, min, max, std, count, sum and percentiles; counts and rates have
unit and avg alone. An unknown value has no key, as there. ``inter_token_latency`` is what is called tpot here, and
``inter_chunk_latency`` pools the gaps between chunks. Throughputs divide by ``benchmark_duration``, from the first
send to the last output. Keys under ``benchctl`` are our own. Requests of several choices give one value for each.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from benchctl import __version__
from benchctl.analysis.metrics.latency import (
    e2el_ns,
    is_completed,
    itls_ns,
    latencies_ns,
    measured,
    percentiles,
    standard_deviation,
    tpots_ns,
    ttft_ns,
)
from benchctl.analysis.metrics.run import run_metrics
from benchctl.interop.writers.vllm import total_throughput
from benchctl.profile.model import Arrival
from benchctl.records.loaded import LoadedRun
from benchctl.records.record import Manifest, RequestRecord
from benchctl.units import MS_PER_S, ms_from_ns

_SCHEMA: Final = "1.4"
"""The version of AIPerf's shape that this follows."""
_PERCENTS: Final = (1, 5, 10, 25, 50, 75, 90, 95, 99)
_LATENCIES: Final = {
    "request_latency": "e2el",
    "time_to_first_token": "ttft",
    "inter_token_latency": "tpot",
    "inter_chunk_latency": "itl",
}
_RUN_FIELDS: Final = ("variant", "cell", "block", "state", "clock", "time_scale")


def aiperf_result(run: LoadedRun, manifest: Manifest, arrival: Arrival | None) -> dict[str, Any]:
    """The summary of one run. ``arrival`` is the profile's, or None when the profile cannot be read."""
    requests, record = measured(run.requests), run.record
    completed = [request for request in requests if is_completed(request)]
    durations, factor = latencies_ns(completed), record.clock_factor
    blocks = {
        theirs: _distribution([ms_from_ns(value * factor) for value in durations[ours]], "ms", len(completed))
        for theirs, ours in _LATENCIES.items()
    }
    rates = [MS_PER_S / ms for value in durations["tpot"] if (ms := ms_from_ns(value * factor)) > 0]
    blocks["output_token_throughput_per_user"] = _distribution(rates, "tokens/sec/user", len(completed))
    for name, values in {
        "input_sequence_length": [request.prompt_tokens for request in completed],
        "output_sequence_length": [request.completion_tokens for request in completed],
    }.items():
        blocks[name] = _distribution([float(v) for v in values if v is not None], "tokens", len(completed))
    return {
        "schema_version": _SCHEMA,
        "benchmark_id": record.run_id,
        **{name: block for name, block in blocks.items() if block is not None},
        **_totals(run_metrics(run)),
        "input_config": _input_config(record.effective_config.get("model"), arrival, len(requests)),
        "was_cancelled": False,
        "error_summary": _error_summary(requests),
        "start_time": record.started_at or manifest.created_at,
        "benchctl": {"version": __version__, **{name: getattr(record, name) for name in _RUN_FIELDS}},
    }


def aiperf_records(run: LoadedRun) -> Iterator[dict[str, Any]]:
    """One line for each measured request, in the order of the request set; times are nanoseconds since 1970.

    Where the run does not say what the wall clock was, they are those of the monotonic clock.
    """
    offset_ns = next((s.offset.realtime_less_monotonic_ns for s in run.client if s.offset is not None), 0)
    factor = run.record.clock_factor
    for request in sorted(measured(run.requests), key=lambda request: request.index):
        yield {
            "metadata": {
                "session_num": request.index,
                "x_request_id": request.request_id,
                "conversation_id": request.request_id,
                "turn_index": 0,
                "request_start_ns": None if request.sent_ns is None else request.sent_ns + offset_ns,
                "request_end_ns": None if request.done_ns is None else request.done_ns + offset_ns,
                "benchmark_phase": "profiling",
                "was_cancelled": request.error is not None and request.error.kind == "cancelled",
            },
            "metrics": _request_metrics(request, factor),
            "error": None
            if request.error is None
            else {"code": request.error.status, "type": request.error.kind, "message": request.error.message},
        }


def _request_metrics(request: RequestRecord, factor: float) -> dict[str, Any]:
    if not is_completed(request):
        return {} if request.prompt_tokens is None else {"error_isl": _value(request.prompt_tokens, "tokens")}
    tpots = [ms_from_ns(value * factor) for value in tpots_ns(request)]
    times = {"request_latency": e2el_ns(request), "time_to_first_token": ttft_ns(request)}
    counts = {"input_sequence_length": request.prompt_tokens, "output_sequence_length": request.completion_tokens}
    return {
        **{name: _value(ms_from_ns(value * factor), "ms") for name, value in times.items() if value is not None},
        **{name: _value(value, "tokens") for name, value in counts.items() if value is not None},
        **({"inter_token_latency": _value(tpots[0] if len(tpots) == 1 else tpots, "ms")} if tpots else {}),
        "inter_chunk_latency": _value([ms_from_ns(gap * factor) for gap in itls_ns(request)], "ms"),
    }


def _value(value: float | Sequence[float], unit: str) -> dict[str, Any]:
    return {"value": value, "unit": unit}


def _distribution(values: Sequence[float], unit: str, num_requests: int) -> dict[str, Any] | None:
    """None of no values. A tail that too few requests bear out has no key."""
    if not values:
        return None
    tails = percentiles(values, num_requests, _PERCENTS)
    return {
        "unit": unit,
        "avg": sum(values) / len(values),
        **{f"p{percent}": value for percent, value in tails.items() if value is not None},
        "min": min(values),
        "max": max(values),
        "std": standard_deviation(values),
        "count": len(values),
        "sum": sum(values),
    }


def _totals(metrics: Mapping[str, float | None]) -> dict[str, Any]:
    prompt, output, wall_s = metrics["prompt_tokens"], metrics["output_tokens"], metrics["wall_s"]
    totals = {
        "request_count": (metrics["num_completed"], "requests"),
        "error_request_count": (metrics["num_failed"], "requests"),
        "request_throughput": (metrics["request_throughput"], "requests/sec"),
        "output_token_throughput": (metrics["output_throughput"], "tokens/sec"),
        "total_token_throughput": (total_throughput(metrics), "tokens/sec"),
        "total_isl": (prompt, "tokens"),
        "total_osl": (output, "tokens"),
        "benchmark_duration": (wall_s, "sec"),
    }
    return {name: {"unit": unit, "avg": value} for name, (value, unit) in totals.items() if value is not None}


def _input_config(model: Any, arrival: Arrival | None, num_requests: int) -> dict[str, Any]:
    """Model and load, in the shape of AIPerf's configuration."""
    phase: dict[str, Any] = {"name": "profiling", "kind": "profiling", "requests": num_requests}
    if arrival is not None:
        phase["type"] = "concurrency" if arrival.kind == "closed-loop" else arrival.kind
        phase |= {} if arrival.max_concurrency is None else {"concurrency": arrival.max_concurrency}
        is_rated = arrival.kind in {"constant", "poisson", "gamma"}
        phase |= {"rate": arrival.request_rate} if is_rated else {}
    return {
        "models": {"items": [] if model is None else [{"name": str(model)}]},
        "endpoint": {"streaming": True},
        "phases": [phase],
    }


def _error_summary(requests: Sequence[RequestRecord]) -> list[dict[str, Any]]:
    errors = Counter(
        (request.error.status, request.error.kind, request.error.message)
        for request in requests
        if request.error is not None
    )
    return [
        {"error_details": {"code": code, "type": kind, "message": message}, "count": count}
        for (code, kind, message), count in errors.most_common()
    ]
