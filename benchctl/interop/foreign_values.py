"""Result files of other load generators: key paths by our names, and what stands there."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from benchctl.errors import RecordError
from benchctl.units import MS_PER_S
from benchctl.untrusted import ROWS_BYTES
from benchctl.untrusted.files import UnreadableError, json_value, read_lines, utf8_text
from benchctl.untrusted.text import visible_value

Setting: TypeAlias = str | float | None
"""None is unknown; an unlimited rate is the text ``inf``."""
Latencies: TypeAlias = Mapping[str, tuple[float, ...]]
"""Values in ms by latency (``ttft``, ``tpot``, ``itl``, ``e2el``); a latency without values is left out."""

SERVING_TOTALS: Final = {
    "num_requests": "num_prompts",
    "num_completed": "completed",
    "num_failed": "failed",
    "prompt_tokens": "total_input_tokens",
    "output_tokens": "total_output_tokens",
    "wall_s": "duration",
    "request_throughput": "request_throughput",
    "output_throughput": "output_throughput",
}
PERCENTS: Final = (90, 95, 99)


def _serving_statistics(latencies: Mapping[str, str]) -> dict[str, str]:
    """Mean and percentiles of latencies, given as our name to theirs."""
    paths: dict[str, str] = {}
    for ours, theirs in latencies.items():
        paths |= {
            f"{ours}_ms": f"mean_{theirs}_ms",
            f"p50_{ours}_ms": f"median_{theirs}_ms",
            **{f"p{percent}_{ours}_ms": f"p{percent}_{theirs}_ms" for percent in PERCENTS},
        }
    return paths


SERVING_LATENCIES: Final = {
    "vllm": _serving_statistics({"ttft": "ttft", "tpot": "tpot", "itl": "itl", "e2el": "e2el"}),
    "sglang": _serving_statistics({"ttft": "ttft", "tpot": "tpot", "e2el": "e2e_latency"}),
}
SERVING_SETTINGS: Final = {
    "vllm": ("model_id", "request_rate", "burstiness", "max_concurrency", "ramp_up_strategy"),
    "sglang": (
        "model_id", "dataset_name", "request_rate", "max_concurrency", "sharegpt_output_len", "random_input_len",
        "random_output_len", "random_range_ratio",
    ),
}  # fmt: skip
AIPERF_TOTALS: Final = {
    "num_completed": "request_count.avg",
    "num_failed": "error_request_count.avg",
    "prompt_tokens": "total_isl.avg",
    "output_tokens": "total_osl.avg",
}
GUIDELLM: Final = {
    "num_requests": "metrics.request_totals.total",
    "num_completed": "metrics.request_totals.successful",
    "prompt_tokens": "metrics.prompt_token_count.successful.total_sum",
    "output_tokens": "metrics.output_token_count.successful.total_sum",
    "wall_s": "duration",
    "ttft_ms": "metrics.time_to_first_token_ms.successful.mean",
}
AIPERF_LATENCIES: Final = {
    "ttft": "time_to_first_token",
    "tpot": "inter_token_latency",
    "itl": "inter_chunk_latency",
    "e2el": "request_latency",
}
_TO_MS: Final = {"ms": 1.0, "us": 1e-3, "ns": 1e-6, "s": 1e3, "sec": 1e3}
_MOST: Final = 1e15
"""Above every duration in ms, count and rate of a load."""


def detailed_latencies(document: Mapping[str, Any], *, has_itl: bool) -> Latencies:
    """``--save-detailed`` of vLLM and ``--output-details`` of SGLang: lists with an entry for each request, in s.

    ``ttfts`` is the time to first token, ``itls`` the gaps after it; a request without gaps has ended with its
    first output. ``has_itl``: these are gaps between chunks, and not spread over the tokens of a chunk. Only
    answered requests count, as in benchctl's own distributions.
    """
    ttfts, itls = document.get("ttfts"), document.get("itls")
    if not (isinstance(ttfts, list) and isinstance(itls, list) and len(ttfts) == len(itls)):
        return {}
    lengths, errors = (
        values
        if isinstance(values := document.get(key), list) and len(values) == len(ttfts)
        else [None] * len(ttfts)
        for key in ("output_lens", "errors")
    )
    values_ms: dict[str, list[float]] = {"ttft": [], "tpot": [], "itl": [], "e2el": []}
    for ttft, gaps, length, error in zip(ttfts, itls, lengths, errors, strict=True):
        if error or not _is_time(ttft) or not ttft or not isinstance(gaps, list) or not all(map(_is_time, gaps)):
            continue
        values_ms["ttft"].append(ttft * MS_PER_S)
        values_ms["e2el"].append((ttft + math.fsum(gaps)) * MS_PER_S)
        if isinstance(length, int) and length > 1 and gaps:
            values_ms["tpot"].append(math.fsum(gaps) / (length - 1) * MS_PER_S)
        if has_itl:
            values_ms["itl"] += [gap * MS_PER_S for gap in gaps]
    return non_empty(values_ms)


def aiperf_latencies(path: Path) -> Latencies:
    """``profile_export.jsonl`` beside an AIPerf export, one request a line; none without that file.

    Lines that are damaged, such as one cut short, are left out. Raises RecordError where the file cannot be read.
    """
    if not path.is_file():
        return {}
    values_ms: dict[str, list[float]] = {name: [] for name in AIPERF_LATENCIES}
    try:
        for _, line in read_lines(path, ROWS_BYTES):
            request = _decoded(line)
            phase = object_in(request.get("metadata")).get("benchmark_phase", "profiling")
            if request.get("error") or phase != "profiling":
                continue
            metrics = object_in(request.get("metrics"))
            for ours, theirs in AIPERF_LATENCIES.items():
                metric = object_in(metrics.get(theirs))
                unit, value = str(metric.get("unit")), metric.get("value")
                times: list[Any] = value if isinstance(value, list) else [value]
                if unit in _TO_MS:
                    values_ms[ours] += [time * _TO_MS[unit] for time in times if _is_time(time)]
    except UnreadableError as error:
        raise RecordError(f"{error}; write it again with AIPerf, or remove it") from error
    return non_empty(values_ms)


def _decoded(line: bytes) -> dict[str, Any]:
    """A line as an object; empty where it is none, such as a line cut short."""
    try:
        return object_in(json_value(utf8_text(line, "line"), "line"))
    except UnreadableError:
        return {}


def guidellm_latencies(requests: Sequence[Any], where: str) -> Latencies:
    """Of each request in ms: tpot where it has more than one token, and e2el = ttft + (tokens - 1) * tpot."""
    ttfts, tpots, e2els = [], [], []
    for request in requests:
        ttft, gap, tokens = (
            number_at(object_in(request), key, where)
            for key in ("time_to_first_token_ms", "inter_token_latency_ms", "output_tokens")
        )
        num_gaps = max((tokens or 0) - 1, 0)
        if gap is not None and num_gaps:
            tpots.append(gap)
        if ttft is not None:
            ttfts.append(ttft)
            e2els.append(ttft + num_gaps * (gap or 0.0))
    return non_empty({"ttft": ttfts, "tpot": tpots, "e2el": e2els})


def object_in(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _MOST


def non_empty(values_ms: Mapping[str, Sequence[float]]) -> Latencies:
    return {name: tuple(values) for name, values in values_ms.items() if values}


def number_at(document: Mapping[str, Any], path: str, where: str) -> float | None:
    """The finite number under a dotted path of keys; None without one.

    Raises RecordError for anything else, and for a number that no duration, count or rate can have.
    """
    value: Any = document
    for key in path.split("."):
        if value is None:
            return None
        if not isinstance(value, dict):
            raise RecordError(f"{where}: {path} is not there: an object expected, not {visible_value(value)}")
        value = value.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RecordError(
            f"{where}: {path} is {visible_value(value)}, not a number; write the file again with its tool"
        )
    if not math.isfinite(value):
        return None
    if not 0 <= value <= _MOST:
        raise RecordError(f"{where}: {path} is {value:g}, which is impossible; write the file again with its tool")
    return float(value)


def numbers_at(document: Mapping[str, Any], paths: Mapping[str, str], where: str) -> dict[str, float]:
    """The numbers that are known, by our names."""
    values = {ours: number_at(document, path, where) for ours, path in paths.items()}
    return {ours: value for ours, value in values.items() if value is not None}


def numbers_in_ms(document: Mapping[str, Any], paths: Mapping[str, str], where: str) -> dict[str, float]:
    """The known ones of numbers in one object of AIPerf, converted from its unit."""
    values = numbers_at(document, paths, where)
    if not values:
        return {}
    metric = next(iter(paths.values())).partition(".")[0]
    unit = str(document[metric].get("unit"))
    if unit not in _TO_MS:
        raise RecordError(f"{where}: {metric} has the unit {unit[:60]!r}; known are {', '.join(_TO_MS)}")
    return {ours: value * _TO_MS[unit] for ours, value in values.items()}


def setting_at(document: Mapping[str, Any], key: str) -> Setting:
    """A setting in comparable form: a text or a number; ``inf`` for an unlimited rate, None for no value."""
    value = document.get(key)
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        return repr(value)
    return float(value) if math.isfinite(value) else str(value)
