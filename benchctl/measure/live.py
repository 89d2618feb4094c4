"""Numbers of a load while it is sent, for a person who watches a terminal: near enough for that, and in no result.

They come from answers that have ended, which the client decodes anyway: an open stream is not looked into, because
that is what makes the client cheap. Once a second those that ended since then are taken in, of many only some that
stand for all, so that the work of a second is bounded. No numpy: nothing may import it during a load.
"""

import math
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from typing import Final

from benchctl.analysis.metrics.latency import (
    PERCENTS,
    choice_tokens,
    is_completed,
    keeps_limits,
    smallest_sample,
    total,
)
from benchctl.records.record import RequestRecord
from benchctl.records.schema import ClientSample
from benchctl.units import NS_PER_S, ms_from_ns, percentage, three_digits

_MOST_ANSWERS: Final = 25
"""Answers of a second that are looked at."""
_LEAST_SPAN_NS: Final = 10 * NS_PER_S
"""Time over which throughput is measured, or three times as long as an answer takes if that is longer: answers
count when they end, so a shorter time would see the waves in which they do."""
_BIN: Final = math.log(1.01)
_TITLES: Final = {"ttft": "TTFT", "tpot": "TPOT"}


class _Durations:
    """Durations counted in bins of 1 %, so that percentiles of any number of them are known to half a per cent."""

    def __init__(self) -> None:
        self._counts = Counter[int]()

    def add(self, duration_ns: float, weight: int) -> None:
        self._counts[int(math.log(max(duration_ns, 1.0)) / _BIN)] += weight

    def text(self) -> str:
        """The median and the largest percentile that so many durations bear out, such as ``p50 41.0, p99 96.2 ms``;
        nothing of none.
        """
        num_durations, at, parts = self._counts.total(), 0, list[str]()
        percents = [percent for percent in PERCENTS if smallest_sample(percent) <= num_durations]
        percents = sorted({*percents[:1], *percents[-1:]})
        for number in sorted(self._counts):
            at += self._counts[number]
            while percents and at >= percents[0] / 100 * num_durations:
                parts.append(f"p{percents[0]} {three_digits(ms_from_ns(math.exp((number + 0.5) * _BIN)))}")
                del percents[0]
        return f"{', '.join(parts)} ms" if parts else ""


class LiveNumbers:
    """The numbers of a load so far. Limits and all times are those of the server's clock, by ``clock_factor``."""

    def __init__(self, limits_ms: Mapping[str, float], clock_factor: float) -> None:
        self._limits_ms, self._factor = limits_ms, clock_factor
        self._new = list[RequestRecord]()
        self._num_failed = self._num_ended = self._num_kept = 0
        self._begin_ns = self._last_ns = 0
        self._open_by_worker = dict[int, int]()
        self._durations = {name: _Durations() for name in ("ttft", "tpot")}
        self._e2el_ns = 0.0
        self._ended = deque[tuple[int, int, int | None]]()
        """Time, answers and tokens of each second; None where some answer does not count its tokens."""

    def take(self, record: RequestRecord) -> None:
        """Keep an ended request until the next second; those of the warm-up do not count."""
        if not record.is_warmup:
            self._new.append(record)

    def parts(self, sample: ClientSample) -> tuple[str, ...] | None:
        """The numbers in words, in order of importance; None until a second after the last ones."""
        self._open_by_worker[sample.worker] = sample.num_open
        if sample.t_ns < self._last_ns + NS_PER_S or not (self._new or self._ended):
            return None
        self._last_ns = sample.t_ns
        self._take_in(sample.t_ns)
        return tuple(self._words(sample.t_ns))

    def _take_in(self, now_ns: int) -> None:
        """Count the requests that ended since the last second, and forget them."""
        stride, num_answers, tokens = 1 + len(self._new) // _MOST_ANSWERS, 0, list[int | None]()
        if not self._ended:
            self._begin_ns = min(record.sent_ns or now_ns for record in self._new)
        for record in self._new[::stride]:
            durations_ns = _durations_ns(record, self._factor)
            self._num_ended += stride
            if not is_completed(record):
                self._num_failed += stride
                continue
            self._num_kept += stride * keeps_limits(durations_ns, self._limits_ms)
            num_answers += stride
            tokens.append(record.completion_tokens)
            for name, durations in self._durations.items():
                for duration_ns in durations_ns[name]:
                    durations.add(duration_ns, stride)
            self._e2el_ns += stride * sum(durations_ns["e2el"])
        self._new.clear()
        num_tokens = total(tokens) if tokens else 0
        self._ended.append((now_ns, num_answers, None if num_tokens is None else stride * num_tokens))
        mean_ns = self._e2el_ns / max(self._num_ended - self._num_failed, 1) / self._factor
        while self._ended[0][0] < now_ns - max(_LEAST_SPAN_NS, 3 * mean_ns):
            self._begin_ns = self._ended.popleft()[0]

    def _words(self, now_ns: int) -> Iterator[str]:
        seconds = (now_ns - self._begin_ns) / NS_PER_S * self._factor
        tokens = [num_tokens for _, _, num_tokens in self._ended if num_tokens is not None]
        is_counted = len(tokens) == len(self._ended)
        ended = sum(tokens) if is_counted else sum(num_answers for _, num_answers, _ in self._ended)
        if seconds > 0:
            yield f"{ended / seconds:,.0f} tokens/s" if is_counted else f"{ended / seconds:,.1f} answers/s"
        yield f"{sum(self._open_by_worker.values())} open"
        if self._num_failed:
            yield f"{self._num_failed} failed"
        if self._limits_ms and self._num_ended:
            yield f"{percentage(self._num_kept / self._num_ended)} within the objective"
        for name, durations in self._durations.items():
            if text := durations.text():
                yield f"{_TITLES[name]} {text}"


def _durations_ns(record: RequestRecord, factor: float) -> dict[str, list[float]]:
    """The latencies of one request, as the metrics of the same names have them."""
    chunked = [choice for choice in record.choices if choice.chunk_ns]
    sent_ns, durations_ns = record.sent_ns, {"ttft": list[float](), "tpot": list[float](), "e2el": list[float]()}
    if sent_ns is None or not chunked:
        return durations_ns
    last_ns = record.done_ns if record.stamps == "whole" else max(choice.chunk_ns[-1] for choice in chunked)
    durations_ns["ttft"].append((min(choice.chunk_ns[0] for choice in chunked) - sent_ns) * factor)
    durations_ns["e2el"] += [] if last_ns is None else [(last_ns - sent_ns) * factor]
    for choice in chunked:
        num_tokens = choice_tokens(record, choice) or 0
        if num_tokens > 1:
            durations_ns["tpot"].append((choice.chunk_ns[-1] - choice.chunk_ns[0]) / (num_tokens - 1) * factor)
    return durations_ns
