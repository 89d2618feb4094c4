"""``aiperf profile``: ``profile_export_aiperf.json``, one document per run.

Every metric is an object with a unit and, if each request has a value, avg, p1 to p99 and more; values are
converted by their unit. AIPerf's ``inter_token_latency`` is (latency - time to first token) / (tokens - 1) of each
request: what is called tpot here; itl is its ``inter_chunk_latency`` where that counts gaps and not requests. Its
throughputs divide by the time in which it was busy (0.13), which is longer than from the first send to the last
output: they are computed here, from its counts and its ``benchmark_duration``.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from benchctl.errors import RecordError
from benchctl.interop.readers.run import ForeignRun, Setting, drop_unknown, number_at, setting_at, unanswered
from benchctl.untrusted.text import visible_value

KEYS: Final = ("request_latency", "request_throughput")
"""Objects with a unit that identify such a document."""
_LATENCIES: Final = {"time_to_first_token": "ttft", "inter_token_latency": "tpot", "request_latency": "e2el"}
_GAPS: Final = "inter_chunk_latency"
_SCALARS: Final = {
    "request_count": "num_completed",
    "error_request_count": "num_failed",
    "total_isl": "prompt_tokens",
    "total_osl": "output_tokens",
    "benchmark_duration": "wall_s",
}
_TO_MS: Final = {"ms": 1.0, "us": 1e-3, "ns": 1e-6, "s": 1e3, "sec": 1e3}
_TO_S: Final = {unit: factor / 1e3 for unit, factor in _TO_MS.items()}
_TOKENIZED: Final = (
    "AIPerf counts tokens with its own tokenizer unless it is set to use those of the server; tpot_ms and the "
    "throughput of tokens rest on them"
)
_NAMES: Final = (
    "AIPerf's inter_token_latency is read as tpot_ms, which it is; throughputs are its counts over its "
    "benchmark_duration"
)


def is_aiperf(document: Mapping[str, Any]) -> bool:
    return all(isinstance(document.get(key), dict) and "unit" in document[key] for key in KEYS)


def aiperf_run(document: Mapping[str, Any], where: str) -> ForeignRun:
    """One export. Raises RecordError for text instead of a number, and for an unknown unit."""
    values = {ours: _scalar(document, theirs, ours, where) for theirs, ours in _SCALARS.items()}
    completed, failed = values["num_completed"], values["num_failed"]
    if failed is None and not document.get("error_summary"):
        failed = values["num_failed"] = 0.0
    planned = None if completed is None or failed is None else completed + failed
    wall_s = values["wall_s"]
    for ours, count in (("request_throughput", completed), ("output_throughput", values["output_tokens"])):
        values[ours] = count / wall_s if count is not None and wall_s else None
    for theirs, ours in _LATENCIES.items():
        values |= _distribution(document, theirs, ours, where)
    if (number_at(_block(document, _GAPS, where), "count", where) or 0) > (completed or 0):
        values |= _distribution(document, _GAPS, "itl", where)
    is_cut = document.get("was_cancelled") is True
    return ForeignRun(
        source="aiperf",
        where=where,
        metrics=drop_unknown(values | {"num_requests": planned}),
        settings=_settings(document) | {"num_prompts": planned, "total_input_tokens": values["prompt_tokens"]},
        failure="the run was cancelled" if is_cut else unanswered(failed, planned),
        notes=(_TOKENIZED, _NAMES),
    )


def _scalar(document: Mapping[str, Any], theirs: str, ours: str, where: str) -> float | None:
    block = _block(document, theirs, where)
    value = number_at(block, "avg", f"{where}: {theirs}")
    if value is None or ours != "wall_s":
        return value
    return value * _factor(block, _TO_S, theirs, where)


def _distribution(document: Mapping[str, Any], theirs: str, ours: str, where: str) -> dict[str, float | None]:
    block = _block(document, theirs, where)
    if not block:
        return {}
    factor = _factor(block, _TO_MS, theirs, where)
    our_names = {"avg": f"{ours}_ms"} | {f"p{percent}": f"p{percent}_{ours}_ms" for percent in (50, 90, 95, 99)}
    values = {name: number_at(block, key, f"{where}: {theirs}") for key, name in our_names.items()}
    return {name: None if value is None else value * factor for name, value in values.items()}


def _block(document: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    block = document.get(key)
    if block is None:
        return {}
    if not isinstance(block, dict):
        raise RecordError(f"{where}: {key} is {visible_value(block)}; expected an object with unit and avg")
    return block


def _factor(block: Mapping[str, Any], factors: Mapping[str, float], key: str, where: str) -> float:
    unit = str(block.get("unit"))
    if unit not in factors:
        raise RecordError(f"{where}: {key} has the unit {unit[:60]!r}; known are {', '.join(factors)}")
    return factors[unit]


def _settings(document: Mapping[str, Any]) -> dict[str, Setting]:
    """Model and load from the configuration in the export, which has had two forms."""
    config = document.get("input_config")
    if not isinstance(config, dict):
        return {}
    load = config.get("loadgen")
    if not isinstance(load, dict):
        load = _profiling(config.get("phases"))
    return {
        "model_id": _model(config),
        "request_rate": setting_at(load, "request_rate") or setting_at(load, "rate") or "inf",
        "max_concurrency": setting_at(load, "concurrency"),
    }


def _profiling(phases: Any) -> Mapping[str, Any]:
    """The phase that is measured, from phases by name or in a list."""
    if isinstance(phases, dict):
        phases = [{"name": name, **phase} for name, phase in phases.items() if isinstance(phase, dict)]
    if isinstance(phases, list):
        named = (phase for phase in phases if isinstance(phase, dict))
        return next((phase for phase in named if phase.get("name") == "profiling"), {})
    return {}


def _model(config: Mapping[str, Any]) -> str | None:
    endpoint, models = config.get("endpoint"), config.get("models")
    names: Any = endpoint.get("model_names") if isinstance(endpoint, dict) else None
    if names is None and isinstance(models, dict):
        names = models.get("items")
    names = models if names is None else names
    if isinstance(names, str) or not isinstance(names, Sequence):
        return names if isinstance(names, str) else None
    return ", ".join(str(name.get("name") if isinstance(name, dict) else name) for name in names) or None
