"""``python -m sglang.bench_serving --output-file``: JSON Lines, one line per run, appended run after run.

Names are mostly vLLM's; the end-to-end latency is ``e2e_latency``. Three things are not taken over: inter-token
latencies, which newer versions spread over the tokens of a chunk; the number of planned requests, which the file
does not have; and ``total_output_tokens_retokenized``, which the engine did not count.
"""

from collections.abc import Mapping
from typing import Any, Final

from benchctl.interop.readers.run import ForeignRun, drop_unknown, number_at, setting_at, unanswered

KEYS: Final = ("completed", "mean_e2e_latency_ms", "request_throughput")
"""Keys that identify such a document."""
_SETTINGS: Final = (
    "model_id",
    "dataset_name",
    "request_rate",
    "max_concurrency",
    "sharegpt_output_len",
    "random_input_len",
    "random_output_len",
    "random_range_ratio",
)
_LATENCIES: Final = {"ttft": "ttft", "tpot": "tpot", "e2el": "e2e_latency"}
_NO_ITL: Final = (
    "SGLang's inter-token latency is not that of vLLM in every version and is not compared: see tpot_ms"
)
_NO_FAILURES: Final = (
    "SGLang's file names neither planned nor failed requests, except with --output-details: whether all were "
    "answered is not known"
)


def is_sglang(document: Mapping[str, Any]) -> bool:
    return all(key in document for key in KEYS)


def sglang_run(document: Mapping[str, Any], where: str) -> ForeignRun:
    """One line. Raises RecordError for text instead of a number."""
    completed = number_at(document, "completed", where)
    errors = document.get("errors")
    failed = float(sum(bool(error) for error in errors)) if isinstance(errors, list) else None
    planned = None if failed is None or completed is None else completed + failed
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
        source="sglang",
        where=where,
        metrics=drop_unknown(counts | (_latencies(document, where) if completed else {})),
        settings=settings | {"num_prompts": planned, "total_input_tokens": counts["prompt_tokens"]},
        failure=unanswered(failed, planned),
        notes=(_NO_ITL,) if failed is not None else (_NO_ITL, _NO_FAILURES),
    )


def _latencies(document: Mapping[str, Any], where: str) -> dict[str, float | None]:
    latencies: dict[str, float | None] = {}
    for ours, theirs in _LATENCIES.items():
        latencies[f"{ours}_ms"] = number_at(document, f"mean_{theirs}_ms", where)
        for percent, word in ((50, "median"), (90, "p90"), (95, "p95"), (99, "p99")):
            latencies[f"p{percent}_{ours}_ms"] = number_at(document, f"{word}_{theirs}_ms", where)
    return latencies
