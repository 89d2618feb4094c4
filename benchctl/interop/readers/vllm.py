"""``vllm bench serve --save-result``: one JSON object per run, and with ``--append-result`` one per line.

Latencies are in milliseconds, the duration in seconds, and every name has the same meaning here. Failed requests
are in no latency. Prompt tokens are those of the client's own tokenizer, without the server's chat template. The
tool writes zeros if no request was answered.
"""

from collections.abc import Mapping
from typing import Any, Final

from benchctl.interop.readers.latencies import detailed_latencies
from benchctl.interop.readers.run import ForeignRun, drop_unknown, number_at, setting_at, unanswered

KEYS: Final = ("model_id", "num_prompts", "completed", "request_throughput")
"""Keys that identify such a document."""
_SETTINGS: Final = ("model_id", "num_prompts", "request_rate", "burstiness", "max_concurrency", "ramp_up_strategy")
_LATENCIES: Final = {name: name for name in ("ttft", "tpot", "itl", "e2el")}


def is_vllm(document: Mapping[str, Any]) -> bool:
    return all(key in document for key in KEYS)


def vllm_run(document: Mapping[str, Any], where: str) -> ForeignRun:
    """One result. Raises RecordError for text instead of a number."""
    planned, completed = (number_at(document, key, where) for key in ("num_prompts", "completed"))
    failed = number_at(document, "failed", where)
    if failed is None and planned is not None and completed is not None:
        failed = planned - completed
    counts = {"num_requests": planned, "num_completed": completed, "num_failed": failed}
    settings = {key: setting_at(document, key) for key in _SETTINGS if key in document}
    return ForeignRun(
        source="vllm",
        where=where,
        metrics=drop_unknown(counts | metrics_under_vllm_names(document, _LATENCIES, where)),
        settings=settings | {"total_input_tokens": setting_at(document, "total_input_tokens")},
        failure=unanswered(failed, planned),
        latencies_ms=detailed_latencies(document, has_itl=True),
    )


def metrics_under_vllm_names(
    document: Mapping[str, Any], latencies: Mapping[str, str], where: str
) -> dict[str, float | None]:
    """Tokens, durations and throughputs; latencies, as our name to theirs, only if a request was answered."""
    their_names = {"prompt_tokens": "total_input_tokens", "output_tokens": "total_output_tokens"}
    their_names |= {"wall_s": "duration"} | {name: name for name in ("request_throughput", "output_throughput")}
    for ours, theirs in latencies.items() if number_at(document, "completed", where) else ():
        their_names |= {f"{ours}_ms": f"mean_{theirs}_ms", f"p50_{ours}_ms": f"median_{theirs}_ms"}
        their_names |= {f"p{percent}_{ours}_ms": f"p{percent}_{theirs}_ms" for percent in (90, 95, 99)}
    return {ours: number_at(document, theirs, where) for ours, theirs in their_names.items()}
