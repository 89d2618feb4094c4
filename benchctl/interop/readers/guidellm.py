"""GuideLLM's ``benchmarks.json``: a report of one or several benchmarks, one for each load that was driven.

Latencies are in milliseconds. Three are not what the same word means here. ``time_per_output_token_ms`` counts from
the send and includes the first token: not taken over. ``request_latency`` lasts until the stream ends, not until
the last output; ``inter_token_latency_ms`` is what is called tpot here, yet the mean of the report weighs each
request by its tokens. End-to-end latency and tpot are therefore made from the requests in the file, where all are
kept. Percentiles are read off a cumulative distribution, not interpolated between ranks: of few requests they are
others, and not taken.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, Final

from benchctl.errors import RecordError
from benchctl.interop.readers.run import ForeignRun, Setting, known, number_at, setting_at, unanswered

_NO_TPOT: Final = (
    "GuideLLM's time_per_output_token_ms includes the first token and is not compared; tpot_ms is the mean of its "
    "inter_token_latency_ms over requests, and e2el_ms ends with the last token, not with the stream"
)
_SAMPLED: Final = (
    "the report keeps only some of the requests (sample size), so that tpot_ms and e2el_ms are unknown: its own "
    "means are others"
)
_TRIMMED: Final = (
    "warm-up and cool-down were cut off: the throughputs are those of what ended in between, and wall_s is unknown"
)
_WHOLE_S: Final = 0.001
"""A trimmed part shorter than this is none."""


def is_guidellm(document: Mapping[str, Any]) -> bool:
    benchmarks = document.get("benchmarks")
    return isinstance(benchmarks, list) and all(isinstance(b, dict) and "metrics" in b for b in benchmarks)


def guidellm_runs(document: Mapping[str, Any], where: str) -> tuple[ForeignRun, ...]:
    """Every benchmark of a report. Raises RecordError when it has none, or a part of one is missing."""
    if not document["benchmarks"]:
        raise RecordError(f"{where}: the report holds no benchmark; run GuideLLM again")
    return tuple(_run(each, f"{where}#{index}") for index, each in enumerate(document["benchmarks"]))


def _run(benchmark: Mapping[str, Any], where: str) -> ForeignRun:
    metrics = _object(benchmark, "metrics", where)
    totals = _object(metrics, "request_totals", where)
    counts = {key: number_at(totals, key, f"{where}: request_totals") for key in ("successful", "errored", "total")}
    cut = number_at(totals, "incomplete", where) or 0.0
    completed, planned = counts["successful"], counts["total"]
    prompt, output = (_successful(metrics, f"{kind}_token_count", where) for kind in ("prompt", "output"))
    prompt_tokens, output_tokens = (number_at(block, "total_sum", where) for block in (prompt, output))
    window_s, is_trimmed = number_at(benchmark, "duration", where), _is_trimmed(benchmark, where)
    kept = _kept_requests(benchmark, completed)
    failed = None if completed is None or planned is None else planned - completed
    why = f" ({cut:.0f} of them cut off when the benchmark ended)" if cut else ""
    found = {
        "num_requests": planned,
        "num_completed": completed,
        "num_failed": failed,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "wall_s": None if is_trimmed else window_s,
        "request_throughput": _rate(completed, window_s),
        "output_throughput": _rate(output_tokens, window_s),
        "ttft_ms": _mean(metrics, "time_to_first_token_ms", where),
        **_of_requests(kept or [], where),
    }
    return ForeignRun(
        source="guidellm",
        where=where,
        metrics=known(found),
        settings=_settings(benchmark) | {"num_prompts": planned, "total_input_tokens": prompt_tokens},
        failure=unanswered(failed, planned, why),
        notes=(_NO_TPOT, *([_SAMPLED] if kept is None else []), *([_TRIMMED] if is_trimmed else [])),
    )


def _rate(count: float | None, duration_s: float | None) -> float | None:
    return count / duration_s if count is not None and duration_s else None


def _is_trimmed(benchmark: Mapping[str, Any], where: str) -> bool:
    return any(
        (number_at(benchmark, f"{part}_duration", where) or 0.0) > _WHOLE_S for part in ("warmup", "cooldown")
    )


def _kept_requests(benchmark: Mapping[str, Any], completed: float | None) -> list[Mapping[str, Any]] | None:
    """The answered requests, where the report has all of them."""
    requests = benchmark.get("requests")
    answered = requests.get("successful") if isinstance(requests, dict) else None
    return answered if isinstance(answered, list) and len(answered) == completed else None


def _of_requests(requests: Sequence[Mapping[str, Any]], where: str) -> dict[str, float | None]:
    """Means over requests: tpot of those with more than one token; e2el = ttft + (tokens - 1) * tpot of each."""
    tpots, e2els = [], []
    for request in requests:
        ttft, gap, tokens = (
            number_at(request, key, where)
            for key in ("time_to_first_token_ms", "inter_token_latency_ms", "output_tokens")
        )
        gap = gap if tokens is not None and tokens > 1 else None
        if gap is not None:
            tpots.append(gap)
        if ttft is not None:
            e2els.append(ttft + (0.0 if gap is None or tokens is None else (tokens - 1) * gap))
    return {"tpot_ms": fmean(tpots) if tpots else None, "e2el_ms": fmean(e2els) if e2els else None}


def _mean(metrics: Mapping[str, Any], theirs: str, where: str) -> float | None:
    block = _successful(metrics, theirs, where)
    return number_at(block, "mean", f"{where}: {theirs}")


def _successful(metrics: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    """The distribution over answered requests; empty where the report has none, or it is one of no values."""
    block = metrics.get(key)
    found = block.get("successful") if isinstance(block, dict) else None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise RecordError(f"{where}: metrics.{key}.successful is {found!r}; an object with mean belongs there")
    return found if found.get("count", 1) else {}


def _object(document: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    value = document.get(key)
    if not isinstance(value, dict):
        raise RecordError(f"{where}: {key} is missing; a report of GuideLLM 0.4 or newer has it in every benchmark")
    return value


def _settings(benchmark: Mapping[str, Any]) -> dict[str, Setting]:
    config = benchmark.get("config")
    strategy = config.get("strategy") if isinstance(config, dict) else None
    backend = config.get("backend") if isinstance(config, dict) else None
    found: dict[str, Setting] = {}
    if isinstance(strategy, dict):
        kind = setting_at(strategy, "type_")
        streams = 1 if kind == "synchronous" else strategy.get("streams", strategy.get("max_concurrency"))
        rate = setting_at(strategy, "rate") if "rate" in strategy else "inf"
        found |= {"strategy": kind, "request_rate": rate}
        found["max_concurrency"] = setting_at({"streams": streams}, "streams")
    if isinstance(backend, dict):
        found["model_id"] = setting_at(backend, "model")
    return found
