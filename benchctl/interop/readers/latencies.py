"""Latencies of single requests from the detailed results of other load generators, in ms, by benchctl's names.

A file without details has none. Only answered requests count, as in benchctl's own distributions.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from benchctl.errors import RecordError
from benchctl.units import MS_PER_S
from benchctl.untrusted import ROWS_BYTES
from benchctl.untrusted.reading import UnreadableError, json_value, read_lines, utf8_text

Latencies: TypeAlias = Mapping[str, tuple[float, ...]]
"""Values in ms by latency (``ttft``, ``tpot``, ``itl``, ``e2el``); a latency without values is left out."""

NO_LATENCIES: Final[Latencies] = {}
_AIPERF: Final = {
    "time_to_first_token": "ttft",
    "inter_token_latency": "tpot",
    "inter_chunk_latency": "itl",
    "request_latency": "e2el",
}
_MOST_TIME: Final = 1e15
"""Above every latency, in whichever unit."""
_AIPERF_TO_MS: Final = {"ms": 1.0, "us": 1e-3, "ns": 1e-6, "s": 1e3, "sec": 1e3}


def detailed_latencies(document: Mapping[str, Any], *, has_itl: bool) -> Latencies:
    """``--save-detailed`` of vLLM and ``--output-details`` of SGLang: lists with an entry for each request, in s.

    ``ttfts`` is the time to first token, ``itls`` the gaps after it; a request without gaps has ended with its
    first output. ``has_itl``: these are gaps between chunks, and not spread over the tokens of a chunk.
    """
    ttfts, itls, lengths = (document.get(key) for key in ("ttfts", "itls", "output_lens"))
    if not (isinstance(ttfts, list) and isinstance(itls, list) and len(ttfts) == len(itls)):
        return NO_LATENCIES
    errors = _beside(document.get("errors"), ttfts)
    values_ms: dict[str, list[float]] = {"ttft": [], "tpot": [], "itl": [], "e2el": []}
    for ttft, gaps, length, error in zip(ttfts, itls, _beside(lengths, ttfts), errors, strict=True):
        if error or not _is_time(ttft) or not ttft or not isinstance(gaps, list) or not all(map(_is_time, gaps)):
            continue
        values_ms["ttft"].append(ttft * MS_PER_S)
        values_ms["e2el"].append((ttft + math.fsum(gaps)) * MS_PER_S)
        if isinstance(length, int) and length > 1 and gaps:
            values_ms["tpot"].append(math.fsum(gaps) / (length - 1) * MS_PER_S)
        if has_itl:
            values_ms["itl"] += [gap * MS_PER_S for gap in gaps]
    return known_latencies(values_ms)


def aiperf_latencies(path: Path) -> Latencies:
    """``profile_export.jsonl`` beside an AIPerf export, one request a line; none without that file.

    Lines that are damaged, such as one cut short, are left out. Raises RecordError where the file cannot be read.
    """
    if not path.is_file():
        return NO_LATENCIES
    values_ms: dict[str, list[float]] = {name: [] for name in _AIPERF.values()}
    try:
        for _, line in read_lines(path, ROWS_BYTES):
            record = _decoded(line)
            phase = _object(record.get("metadata")).get("benchmark_phase", "profiling")
            if record.get("error") or phase != "profiling":
                continue
            metrics = _object(record.get("metrics"))
            for theirs, ours in _AIPERF.items():
                values_ms[ours] += _values_ms(metrics.get(theirs))
    except UnreadableError as error:
        raise RecordError(f"{error}; write it again with AIPerf, or remove it") from error
    return known_latencies(values_ms)


def _decoded(line: bytes) -> dict[str, Any]:
    """A line as an object; empty where it is none, such as a line cut short."""
    try:
        return _object(json_value(utf8_text(line, "line"), "line"))
    except UnreadableError:
        return {}


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _values_ms(metric: Any) -> list[float]:
    unit = _object(metric).get("unit")
    if not isinstance(unit, str) or unit not in _AIPERF_TO_MS:
        return []
    value, factor = metric.get("value"), _AIPERF_TO_MS[unit]
    numbers: list[Any] = value if isinstance(value, list) else [value]
    return [number * factor for number in numbers if _is_time(number)]


def _beside(values: Any, others: Sequence[Any]) -> Sequence[Any]:
    """A list as long as the other one; unknown values where it is not."""
    return values if isinstance(values, list) and len(values) == len(others) else [None] * len(others)


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _MOST_TIME


def known_latencies(values_ms: Mapping[str, Sequence[float]]) -> Latencies:
    """The latencies that have values."""
    return {name: tuple(values) for name, values in values_ms.items() if values}
