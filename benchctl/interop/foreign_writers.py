"""A result directory in the files of another tool: one directory for each arm, in it its runs as repeats.

vllm     OUT/<arm>/<run>.json
aiperf   OUT/<arm>/<run>/profile_export_aiperf.json and profile_export.jsonl
lenvm    OUT/summary.csv, a row per run

Each of several loads of a server has files of its own: <run>.json, <run>-2.json.

AIPerf: each latency is an object with unit, avg, min, max, std, count, sum and percentiles; counts and rates have
unit and avg alone. An unknown value has no key, as there. ``inter_token_latency`` is what is called tpot here, and
``inter_chunk_latency`` pools the gaps between chunks. Throughputs divide by ``benchmark_duration``, from the first
send to the last output. Keys under ``benchctl`` are our own. Requests of several choices give one value for each.

LenVM: names are theirs and definitions benchctl's, which differ in three: ``wall_clock_s`` leaves the client's
start out, ``n_requests`` counts requests and not choices, and ``n_steps`` includes greedy steps.
"""

import csv
import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from benchctl import __version__
from benchctl.analysis.analyzed import AnalyzedExperiment
from benchctl.analysis.experiment.columns import SUMMARY_COLUMNS, Value, number_of
from benchctl.analysis.experiment.summary import RunSummary
from benchctl.analysis.metrics.chunks import Answer, chunks_of, latencies_ns
from benchctl.analysis.metrics.latency import (
    is_completed,
    measured,
    percentiles,
    standard_deviation,
)
from benchctl.analysis.metrics.run import run_metrics
from benchctl.errors import RecordError
from benchctl.interop.vllm_result import total_throughput, vllm_result
from benchctl.profile.arrival import Arrival
from benchctl.records.directory import arm_label
from benchctl.records.files import document_bytes, encode, write_bytes_atomic
from benchctl.records.loaded import LoadedRun
from benchctl.records.loads import server_id
from benchctl.records.record import Manifest, RequestRecord
from benchctl.units import MS_PER_S, ms_from_ns
from benchctl.untrusted.files import make_folder
from benchctl.untrusted.text import csv_cell

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
    lengths = {
        "input_sequence_length": [request.prompt_tokens for request in completed],
        "output_sequence_length": [request.completion_tokens for request in completed],
    }
    blocks |= {
        name: _distribution([float(value) for value in values if value is not None], "tokens", len(completed))
        for name, values in lengths.items()
    }
    return {
        # The version of AIPerf's shape that this follows
        "schema_version": "1.4",
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
    requests = sorted(measured(run.requests), key=lambda request: request.index)
    chunks = chunks_of(requests)
    for request, answer, gaps_ns in zip(requests, chunks.answers, chunks.gaps_of_requests, strict=True):
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
            "metrics": _request_metrics(request, answer, gaps_ns.tolist(), factor),
            "error": None
            if request.error is None
            else {"code": request.error.status, "type": request.error.kind, "message": request.error.message},
        }


def _request_metrics(
    request: RequestRecord, answer: Answer, gaps_ns: Sequence[int], factor: float
) -> dict[str, Any]:
    if not is_completed(request):
        return {} if request.prompt_tokens is None else {"error_isl": _value(request.prompt_tokens, "tokens")}
    tpots = [ms_from_ns(value * factor) for value in answer.tpots_ns]
    times = {"request_latency": answer.e2el_ns, "time_to_first_token": answer.ttft_ns}
    counts = {"input_sequence_length": request.prompt_tokens, "output_sequence_length": request.completion_tokens}
    return {
        **{name: _value(ms_from_ns(value * factor), "ms") for name, value in times.items() if value is not None},
        **{name: _value(value, "tokens") for name, value in counts.items() if value is not None},
        **({"inter_token_latency": _value(tpots[0] if len(tpots) == 1 else tpots, "ms")} if tpots else {}),
        "inter_chunk_latency": _value([ms_from_ns(gap * factor) for gap in gaps_ns], "ms"),
    }


def _value(value: float | Sequence[float], unit: str) -> dict[str, Any]:
    return {"value": value, "unit": unit}


def _distribution(values: Sequence[float], unit: str, num_requests: int) -> dict[str, Any] | None:
    """None of no values. A tail that too few requests bear out has no key."""
    if not values:
        return None
    tails = percentiles(values, num_requests, (1, 5, 10, 25, 50, 75, 90, 95, 99))
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
    totals = {
        "request_count": (metrics["num_completed"], "requests"),
        "error_request_count": (metrics["num_failed"], "requests"),
        "request_throughput": (metrics["request_throughput"], "requests/sec"),
        "output_token_throughput": (metrics["output_throughput"], "tokens/sec"),
        "total_token_throughput": (total_throughput(metrics), "tokens/sec"),
        "total_isl": (metrics["prompt_tokens"], "tokens"),
        "total_osl": (metrics["output_tokens"], "tokens"),
        "benchmark_duration": (metrics["wall_s"], "sec"),
    }
    return {name: {"unit": unit, "avg": value} for name, (value, unit) in totals.items() if value is not None}


def _input_config(model: Any, arrival: Arrival | None, num_requests: int) -> dict[str, Any]:
    """Model and load, in the shape of AIPerf's configuration."""
    phase: dict[str, Any] = {"name": "profiling", "kind": "profiling", "requests": num_requests}
    if arrival is not None:
        kind = "concurrency" if arrival.kind == "closed-loop" else arrival.kind
        load = {"type": kind, "concurrency": arrival.max_concurrency, "rate": arrival.rate}
        phase |= {name: value for name, value in load.items() if value is not None}
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


_OUR_NAMES: Final[Mapping[str, str]] = {
    "tag": "variant",
    "wall_clock_s": "wall_s",
    "throughput_output_tokens_per_s": "output_throughput",
    "total_output_tokens": "output_tokens",
    "total_prompt_tokens": "prompt_tokens",
    "n_requests": "num_requests",
    "n_steps": "num_steps",
    "batch_size_mean": "mean_batch_size",
    "latency_s_mean": "e2el_ms",
    "latency_s_p95": "p95_e2el_ms",
}
"""Published columns that benchctl calls otherwise."""
_SHARED: Final = (
    "n_steps_with_lvm",
    "batch_size_p",
    "output_tokens_",
    "t_",
    "base_",
    "lvm_",
    "theoretical_",
    "achieved_",
)
LENVM_COLUMNS: Final = (
    *_OUR_NAMES,
    *(column for column in SUMMARY_COLUMNS if column.startswith(_SHARED)),
    "top_k",
    "value_scale",
)


def lenvm_csv(runs: Iterable[RunSummary]) -> bytes:
    """The table, a row per run; an unknown value is an empty cell."""
    text = io.StringIO()
    writer = csv.DictWriter(text, LENVM_COLUMNS)
    writer.writeheader()
    writer.writerows({column: csv_cell(_value_lenvm(run, column)) for column in LENVM_COLUMNS} for run in runs)
    return text.getvalue().encode()


def _value_lenvm(run: RunSummary, column: str) -> Value:
    value = run.values[_OUR_NAMES.get(column, column)]
    if column.startswith("latency_s_"):
        latency_ms = number_of(value)
        return None if latency_ms is None else latency_ms / MS_PER_S
    return value


Format: TypeAlias = Literal["vllm", "aiperf", "lenvm"]


def write_foreign(analysis: AnalyzedExperiment, form: Format, out: Path) -> tuple[Path, ...]:
    """Write every finished run that can be read whole. Raises RecordError when there is none.

    Inside the result directory nothing is written through a link; another ``out`` is its user's own.
    """
    usable = [run for run in analysis.runs if run.is_usable]
    if not usable:
        problem = f"{analysis.results.path}: no run is finished and whole; 'benchctl show' says why"
        raise RecordError("\n".join([*analysis.damage, problem]))
    root, manifest = analysis.results.path, analysis.results.manifest
    within = root if out.is_relative_to(root) else None
    if form == "lenvm":
        _make(out, within)
        write_bytes_atomic(out / "summary.csv", lenvm_csv(usable), within=within)
        return (out / "summary.csv",)
    written: list[Path] = []
    for summary, load in [(run, load) for run in usable for load in run.run.loads]:
        folder, name = out / arm_directory(summary), f"{server_id(load.record)}{load.suffix}"
        arrival = analysis.experiment.arrival_of(load.record)
        if form == "vllm":
            result = vllm_result(load, run_metrics(load, arrival), manifest, arrival)
            files = {f"{name}.json": document_bytes(result)}
        else:
            folder /= name
            files = {
                "profile_export_aiperf.json": document_bytes(aiperf_result(load, manifest, arrival)),
                "profile_export.jsonl": b"".join(encode(line) + b"\n" for line in aiperf_records(load)),
            }
        _make(folder, within)
        for file, content in files.items():
            write_bytes_atomic(folder / file, content, within=within)
            written.append(folder / file)
    return tuple(written)


def _make(folder: Path, within: Path | None) -> None:
    if within is None:
        folder.mkdir(parents=True, exist_ok=True)
    else:
        make_folder(folder, within=within)


def arm_directory(run: RunSummary) -> str:
    """``guided-top_k5``: the arm as one part of a path."""
    label = arm_label(run.record.variant, run.record.cell).replace(" ", "-").replace("=", "")
    # What a part of a path cannot hold, or must not begin with
    return re.sub(r"[/\\\x00-\x1f]|^\.+", "_", label)
