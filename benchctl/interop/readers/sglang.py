"""``python -m sglang.bench_serving --output-file``: JSON Lines, one line per run, appended run after run.

Names are mostly vLLM's; the end-to-end latency is ``e2e_latency``. Three things are not taken over: inter-token
latencies, which newer versions spread over the tokens of a chunk; the number of planned requests, which the file
does not have; and ``total_output_tokens_retokenized``, which the engine did not count.
"""

from collections.abc import Mapping
from typing import Any, Final

from benchctl.interop.readers.latencies import detailed_latencies
from benchctl.interop.readers.run import ForeignRun, drop_unknown, number_at, setting_at, unanswered
from benchctl.interop.readers.vllm import metrics_under_vllm_names

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
    metrics = {"num_requests": planned, "num_completed": completed, "num_failed": failed}
    metrics |= metrics_under_vllm_names(document, _LATENCIES, where)
    settings = {key: setting_at(document, key) for key in _SETTINGS if key in document}
    return ForeignRun(
        source="sglang",
        where=where,
        metrics=drop_unknown(metrics),
        settings=settings | {"num_prompts": planned, "total_input_tokens": metrics["prompt_tokens"]},
        failure=unanswered(failed, planned),
        notes=(_NO_ITL,) if failed is not None else (_NO_ITL, _NO_FAILURES),
        latencies_ms=detailed_latencies(document, has_itl=False),
    )
