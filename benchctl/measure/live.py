"""Numbers of a load while it is sent, for a person who watches a terminal: near enough for that, and in no result.

They come from answers that have ended, which the client decodes anyway: an open stream is not looked into, because
that is what makes the client cheap. All are counted; for latencies and the objective a sample of bounded size is
looked at, every n-th answer from the first on. No numpy: nothing may import it during a load.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Final

from benchctl.analysis.metrics.latency import PERCENTS, is_completed, request_durations_ns, smallest_sample
from benchctl.load.exchange import LoadSummary
from benchctl.records.record import RequestRecord
from benchctl.records.schema import ClientSample
from benchctl.units import NS_PER_S, ms_from_ns, percentage, three_digits

_THINNING: Final = 3
"""One answer of so many stays when the sample is full. Not two: a power of it would always meet the same of 64
slots, whose answers come in waves."""
_LARGEST_SAMPLE: Final = _THINNING * smallest_sample(PERCENTS[-1])


class LiveNumbers:
    """The numbers of a load so far, whose counts are ``counts``. Limits and all times are those of the server's
    clock, by ``clock_factor``.
    """

    def __init__(self, counts: LoadSummary, limits_ms: Mapping[str, float], clock_factor: float) -> None:
        self._counts, self._limits_ms, self._factor = counts, limits_ms, clock_factor
        self._last_ns = self._num_tokens = 0
        self._open_by_worker = dict[int, int]()
        self._sample, self._stride = list[tuple[float, float, bool]](), 1
        """TTFT, TPOT and whether all limits were kept, of one answer of each stride."""

    def take(self, record: RequestRecord) -> None:
        """Take in an ended request that has been counted; those of the warm-up do not count."""
        if record.is_warmup:
            return
        if (self._counts.num_sent - 1) % self._stride == 0:
            self._look_at(record)
        if is_completed(record):
            self._num_tokens += record.completion_tokens or 0

    def _look_at(self, record: RequestRecord) -> None:
        ms = {name: ms_from_ns(ns * self._factor) for name, ns in request_durations_ns(record).items()}
        is_kept = all(ms[name] / limit <= 1 for name, limit in self._limits_ms.items())
        self._sample.append((ms["ttft"], ms["tpot"], is_kept))
        if len(self._sample) > _LARGEST_SAMPLE:
            self._sample = self._sample[::_THINNING]
            self._stride *= _THINNING

    def parts(self, sample: ClientSample) -> list[str] | None:
        """The numbers in words, in order of importance; None until a second after the last ones, or after the load
        began, and while nothing has ended.
        """
        self._open_by_worker[sample.worker] = sample.num_open
        begin_ns, num_failed = self._counts.first_send_ns, self._counts.num_failed
        if begin_ns is None or sample.t_ns < max(begin_ns, self._last_ns) + NS_PER_S:
            return None
        self._last_ns = sample.t_ns
        seconds = (sample.t_ns - begin_ns) / NS_PER_S * self._factor
        ttfts_ms, tpots_ms, were_kept = zip(*self._sample, strict=True)
        parts = [f"{self._num_tokens / seconds:,.0f} tokens/s"] if self._num_tokens else []
        parts.append(f"{sum(self._open_by_worker.values())} open")
        if num_failed:
            parts.append(f"{num_failed} failed")
        if self._limits_ms:
            parts.append(f"{percentage(sum(were_kept) / len(were_kept))} within the objective")
        return parts + _percentiles("TTFT", ttfts_ms) + _percentiles("TPOT", tpots_ms)


def _percentiles(title: str, durations_ms: Sequence[float]) -> list[str]:
    """The median and the largest percentile that so many durations bear out, such as ``TTFT p50 41.0, p99 96 ms``;
    nothing of none.
    """
    ordered = sorted(ms for ms in durations_ms if 0 < ms < math.inf)
    percents = [percent for percent in PERCENTS if smallest_sample(percent) <= len(ordered)]
    texts = [
        f"p{percent} {three_digits(ordered[math.ceil(percent / 100 * len(ordered)) - 1])}"
        for percent in sorted({*percents[:1], *percents[-1:]})
    ]
    return [f"{title} {', '.join(texts)} ms"] if texts else []
