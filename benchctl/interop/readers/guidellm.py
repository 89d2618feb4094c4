"""GuideLLM's ``benchmarks.json``: a report of one or several benchmarks, one for each load.

Latencies are in milliseconds. Three differ from the metrics of the same name here. ``time_per_output_token_ms``
counts from the send and includes the first token: it is left out. ``request_latency`` lasts until the stream ends,
not until the last output; ``inter_token_latency_ms`` is tpot, but the report's mean weighs each request by its
tokens. End-to-end latency and tpot are therefore computed from the requests in the file, if it has all of them.
Percentiles come from a cumulative distribution instead of interpolation between ranks, which differs for few
requests: they are left out.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, Final

from benchctl.errors import RecordError
from benchctl.interop.readers.latencies import Latencies, known_latencies
from benchctl.interop.readers.run import ForeignRun, Setting, drop_unknown, number_at, setting_at, unanswered
from benchctl.untrusted.text import visible_value

_NO_TPOT: Final = (
    "GuideLLM's time_per_output_token_ms includes the first token and is not compared; tpot_ms is the mean of its "
    "inter_token_latency_ms over requests, and e2el_ms ends with the last token, not with the stream"
)
_SAMPLED: Final = (
    "the report keeps only some of the requests (sample size), so tpot_ms and e2el_ms are unknown: its own "
    "means are defined differently"
)
_TRIMMED: Final = (
    "warm-up and cool-down were cut off: the throughputs are those of the time between, and wall_s is unknown"
)
_WHOLE_S: Final = 0.001
"""A shorter part does not count as trimmed."""


def is_guidellm(document: Mapping[str, Any]) -> bool:
    benchmarks = document.get("benchmarks")
    return isinstance(benchmarks, list) and all(isinstance(b, dict) and "metrics" in b for b in benchmarks)


def guidellm_runs(document: Mapping[str, Any], where: str) -> tuple[ForeignRun, ...]:
    """Every benchmark of a report. Raises RecordError when it has none, or a part of one is missing."""
    if not document["benchmarks"]:
        raise RecordError(f"{where}: the report has no benchmark; run GuideLLM again")
    return tuple(_run(each, f"{where}#{index}") for index, each in enumerate(document["benchmarks"]))


def _run(benchmark: Mapping[str, Any], where: str) -> ForeignRun:
    metrics = _object(benchmark, "metrics", where)
    totals = _object(metrics, "request_totals", where)
    counts = {key: number_at(totals, key, f"{where}: request_totals") for key in ("successful", "errored", "total")}
    cut = number_at(totals, "incomplete", where) or 0.0
    completed, planned = counts["successful"], counts["total"]
    prompt, output = (_successful(metrics, f"{kind}_token_count", where) for kind in ("prompt", "output"))
    prompt_tokens, output_tokens = (number_at(block, "total_sum", where) for block in (prompt, output))
    window_s = number_at(benchmark, "duration", where)
    trimmed_s = (number_at(benchmark, f"{part}_duration", where) or 0.0 for part in ("warmup", "cooldown"))
    is_trimmed = any(duration_s > _WHOLE_S for duration_s in trimmed_s)
    ttft = _successful(metrics, "time_to_first_token_ms", where)
    requests = _all_requests(benchmark, completed)
    failed = None if completed is None or planned is None else planned - completed
    why = f" ({cut:.0f} of them cut off when the benchmark ended)" if cut else ""
    latencies_ms = _latencies(requests or [], where)
    metrics_by_name = {
        "num_requests": planned,
        "num_completed": completed,
        "num_failed": failed,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "wall_s": None if is_trimmed else window_s,
        "request_throughput": _rate(completed, window_s),
        "output_throughput": _rate(output_tokens, window_s),
        "ttft_ms": number_at(ttft, "mean", f"{where}: time_to_first_token_ms"),
        "tpot_ms": _mean(latencies_ms, "tpot"),
        "e2el_ms": _mean(latencies_ms, "e2el"),
    }
    return ForeignRun(
        source="guidellm",
        where=where,
        metrics=drop_unknown(metrics_by_name),
        settings=_settings(benchmark) | {"num_prompts": planned, "total_input_tokens": prompt_tokens},
        failure=unanswered(failed, planned, why),
        notes=(_NO_TPOT, *([_SAMPLED] if requests is None else []), *([_TRIMMED] if is_trimmed else [])),
        latencies_ms=latencies_ms,
    )


def _rate(count: float | None, duration_s: float | None) -> float | None:
    return count / duration_s if count is not None and duration_s else None


def _all_requests(benchmark: Mapping[str, Any], completed: float | None) -> list[Mapping[str, Any]] | None:
    """The answered requests; None if the report does not have all of them."""
    requests = benchmark.get("requests")
    answered = requests.get("successful") if isinstance(requests, dict) else None
    if not isinstance(answered, list) or len(answered) != completed:
        return None
    return answered if all(isinstance(request, dict) for request in answered) else None


def _latencies(requests: Sequence[Mapping[str, Any]], where: str) -> Latencies:
    """Of each request in ms: tpot where it has more than one token, and e2el = ttft + (tokens - 1) * tpot."""
    ttfts, tpots, e2els = [], [], []
    for request in requests:
        ttft, gap, tokens = (
            number_at(request, key, where)
            for key in ("time_to_first_token_ms", "inter_token_latency_ms", "output_tokens")
        )
        gap = gap if tokens is not None and tokens > 1 else None
        if gap is not None:
            tpots.append(gap)
        if ttft is not None:
            ttfts.append(ttft)
            e2els.append(ttft + (0.0 if gap is None or tokens is None else (tokens - 1) * gap))
    return known_latencies({"ttft": ttfts, "tpot": tpots, "e2el": e2els})


def _mean(latencies_ms: Latencies, name: str) -> float | None:
    return fmean(latencies_ms[name]) if name in latencies_ms else None


def _successful(metrics: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    """The distribution over answered requests; empty if the report has none, or one without values."""
    block = metrics.get(key)
    distribution = block.get("successful") if isinstance(block, dict) else None
    if distribution is None:
        return {}
    if not isinstance(distribution, dict):
        text = visible_value(distribution)
        raise RecordError(f"{where}: metrics.{key}.successful is {text}; expected an object with mean")
    return distribution if distribution.get("count", 1) else {}


def _object(document: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    value = document.get(key)
    if not isinstance(value, dict):
        raise RecordError(f"{where}: {key} is missing; a report of GuideLLM 0.4 or newer has it in every benchmark")
    return value


def _settings(benchmark: Mapping[str, Any]) -> dict[str, Setting]:
    config = benchmark.get("config")
    strategy = config.get("strategy") if isinstance(config, dict) else None
    backend = config.get("backend") if isinstance(config, dict) else None
    settings: dict[str, Setting] = {}
    if isinstance(strategy, dict):
        kind = setting_at(strategy, "type_")
        streams = 1 if kind == "synchronous" else strategy.get("streams", strategy.get("max_concurrency"))
        rate = setting_at(strategy, "rate") if "rate" in strategy else "inf"
        settings |= {"strategy": kind, "request_rate": rate}
        settings["max_concurrency"] = setting_at({"streams": streams}, "streams")
    if isinstance(backend, dict):
        settings["model_id"] = setting_at(backend, "model")
    return settings
