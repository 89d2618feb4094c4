"""``vllm bench serve --save-result``: one JSON object per run, and with ``--append-result`` one per line.

Latencies are in milliseconds, the duration in seconds, and every name has the same meaning here. Failed requests
are in no latency. Prompt tokens are those of the client's own tokenizer, without the server's chat template. The
tool writes zeros if no request was answered.
"""

from collections.abc import Mapping
from typing import Any, Final

from benchctl.interop.readers.run import ForeignRun, drop_unknown, number_at, setting_at, unanswered

KEYS: Final = ("model_id", "num_prompts", "completed", "request_throughput")
"""Keys that identify such a document."""
_SETTINGS: Final = ("model_id", "num_prompts", "request_rate", "burstiness", "max_concurrency", "ramp_up_strategy")
_LATENCIES: Final = ("ttft", "tpot", "itl", "e2el")
_PERCENTS: Final = (90, 95, 99)


def is_vllm(document: Mapping[str, Any]) -> bool:
    return all(key in document for key in KEYS)


def vllm_run(document: Mapping[str, Any], where: str) -> ForeignRun:
    """One result. Raises RecordError for text instead of a number."""
    planned, completed = (number_at(document, key, where) for key in ("num_prompts", "completed"))
    failed = number_at(document, "failed", where)
    if failed is None and planned is not None and completed is not None:
        failed = planned - completed
    counts = {
        "num_requests": planned,
        "num_completed": completed,
        "num_failed": failed,
        "prompt_tokens": number_at(document, "total_input_tokens", where),
        "output_tokens": number_at(document, "total_output_tokens", where),
        "wall_s": number_at(document, "duration", where),
        "request_throughput": number_at(document, "request_throughput", where),
        "output_throughput": number_at(document, "output_throughput", where),
    }
    settings = {key: setting_at(document, key) for key in _SETTINGS if key in document}
    return ForeignRun(
        source="vllm",
        where=where,
        metrics=drop_unknown(counts | (_latencies(document, where) if completed else {})),
        settings=settings | {"total_input_tokens": setting_at(document, "total_input_tokens")},
        failure=unanswered(failed, planned),
    )


def _latencies(document: Mapping[str, Any], where: str) -> dict[str, float | None]:
    latencies: dict[str, float | None] = {}
    for latency in _LATENCIES:
        latencies[f"{latency}_ms"] = number_at(document, f"mean_{latency}_ms", where)
        latencies[f"p50_{latency}_ms"] = number_at(document, f"median_{latency}_ms", where)
        for percent in _PERCENTS:
            latencies[f"p{percent}_{latency}_ms"] = number_at(document, f"p{percent}_{latency}_ms", where)
    return latencies
