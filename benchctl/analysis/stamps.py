"""What the client's times are worth: who took them, how late it read, and how busy it was meanwhile.

The kernel stamps the newest bytes of a read. What came with them in one read arrived no later and may have arrived
earlier: its time is an upper bound. Where the client reads at once, both arrived together and the bound is exact:
the server wrote them together. Where the client was held up, several writes may have become one read, and the
chunks of the earlier writes may be older than the stamp by as long as it was away. How many chunks a write has is
seen in the reads that came at once.
"""

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final, TypeAlias

from benchctl.analysis.percentile import percentiles
from benchctl.analysis.request_timing import itls_ns, send_lag_ns
from benchctl.analysis.unknown import known, quotient
from benchctl.records.run import ClientSample, RequestRecord
from benchctl.units import NS_PER_MS, NS_PER_S, ms_from_ns

LATE_READ_NS: Final = NS_PER_MS
"""A read that comes later than this after its newest bytes was not at once: at once is some tens of microseconds,
and a hundred streams that speak together are read within this."""
HELD_UP_NS: Final = 10 * NS_PER_MS
"""A loop that wakes later than this was held up. Needed beside the lateness of a read, because in a quick stream
the newest bytes are always fresh, however long the others have waited."""
IN_TIME_NS: Final = 2 * NS_PER_MS
"""A loop that wakes no later than this was in time: its waits are rounded up to whole milliseconds."""
WRITE_SHARE: Final = 0.9
"""A write holds no more chunks than this share of the reads that came at once ..."""
MIN_READS: Final = 20
"""... of which there must be as many; with fewer every chunk counts as a write of its own."""
_CHUNKS_LOOKED_AT: Final = 50_000
"""About as many show it well enough, of choices from the whole load."""
_PERIOD_NS: Final = NS_PER_S // 10
"""What a sample covers when nothing holds it up."""
MIN_CPU_SPAN_NS: Final = NS_PER_S
"""Processor time over less says little of a load."""


def client_metrics(requests: Sequence[RequestRecord], samples: Sequence[ClientSample]) -> dict[str, float | None]:
    """The metrics of the load generator itself, on its own clock."""
    lags = known([send_lag_ns(request) for request in requests])
    send = percentiles(lags, len(lags), (50, 99))
    late = read_lates_ns(requests)
    chunks = [len(choice.chunk_ns) for request in requests for choice in request.choices]
    num_bounds = sum(itls_ns(request).count(0) for request in requests)
    cores = busy_cores(samples)
    return {
        "p50_send_lag_ms": _ms(send[50]),
        "p99_send_lag_ms": _ms(send[99]),
        "max_send_lag_ms": _ms(max(lags, default=None)),
        "kernel_stamp_frac": quotient(len(late), sum(chunks)),
        "bound_stamp_frac": quotient(num_bounds, sum(chunks)),
        "p99_read_late_ms": _ms(percentiles(late, len(late), (99,))[99]),
        "max_loop_lag_ms": _ms(max((sample.loop_lag_ns for sample in samples), default=None)),
        "load_cpu_cores": sum(cores.values()) if cores else None,
    }


def read_lates_ns(requests: Iterable[RequestRecord]) -> list[int]:
    """How long each chunk that the kernel stamped had been there when it was read."""
    return [late for request in requests for choice in request.choices for late in choice.chunk_late_ns or ()]


def busy_cores(samples: Iterable[ClientSample]) -> Mapping[int, float]:
    """Cores that each process of the load generator kept busy, by its number; at least a second of each."""
    cores = {}
    for worker, own in _by_worker(samples).items():
        span_ns = own[-1].t_ns - own[0].t_ns
        if span_ns >= MIN_CPU_SPAN_NS:
            cores[worker] = (own[-1].cpu_ns - own[0].cpu_ns) / span_ns
    return cores


def samples_span_ns(samples: Iterable[ClientSample]) -> int:
    """Time that the samples cover, as the process saw it that was watched longest."""
    return max((own[-1].t_ns - own[0].t_ns + _PERIOD_NS for own in _by_worker(samples).values()), default=0)


def held_up_ns(samples: Iterable[ClientSample], limit_ns: float) -> int:
    """Time of samples in which an event loop was later than the limit; of the process that was so for longest.

    A loop that is held up gives samples more rarely, so that their number would say less than their time.
    """
    late = []
    for own in _by_worker(samples).values():
        starts = [own[0].t_ns - _PERIOD_NS, *(sample.t_ns for sample in own[:-1])]
        late.append(sum(s.t_ns - start for s, start in zip(own, starts, strict=True) if s.loop_lag_ns > limit_ns))
    return max(late, default=0)


def num_clock_steps(samples: Iterable[ClientSample]) -> int:
    """How often the wall clock was set during the load, as the process saw it that saw most."""
    told = [sum(sample.offset is not None for sample in own) for own in _by_worker(samples).values()]
    return max(max(told, default=0) - 1, 0)  # the first is the difference at the start


def stamp_errors_ns(requests: Iterable[RequestRecord], samples: Sequence[ClientSample]) -> list[int]:
    """By how much the time of each chunk that the kernel stamped may be too late through the client's fault.

    0 for the chunks of the newest write in each read, whose stamp is their own, and where the client read at once.
    Elsewhere the chunk came after the read before, and waited no longer than the event loop was seen to be held up
    at that time.
    """
    lags, choices = _Lags.of(samples), _stamped(requests)
    num_written = _chunks_of_a_write(choices, lags)
    return [error_ns for choice in choices for error_ns in _choice_errors_ns(choice, num_written, lags)]


def chunks_of_a_write(requests: Iterable[RequestRecord], samples: Sequence[ClientSample]) -> int:
    """How many chunks of a choice the server sends at once, as reads that came at once show it; 1 or more."""
    return _chunks_of_a_write(_stamped(requests), _Lags.of(samples))


_Stamped: TypeAlias = tuple[Sequence[int], Sequence[int], int]
"""Of one choice: the stamps of its chunks, how late each was read, and when it was asked for; in ns."""


def _stamped(requests: Iterable[RequestRecord]) -> list[_Stamped]:
    """The choices that the kernel stamped."""
    return [
        (choice.chunk_ns, choice.chunk_late_ns, choice.chunk_ns[0] if request.sent_ns is None else request.sent_ns)
        for request in requests
        for choice in request.choices
        if choice.chunk_late_ns is not None and choice.chunk_ns
    ]


def _shares_stamps(stamps_ns: Sequence[int]) -> bool:
    return len(set(stamps_ns)) < len(stamps_ns)


def _reads(choice: _Stamped) -> Iterator[tuple[int, int, int]]:
    """Each read that brought chunks: the stamp of the newest, how late it came after it, and how many they were."""
    stamps_ns, lates_ns, _ = choice
    for stamp_ns, group in groupby(zip(stamps_ns, lates_ns, strict=True), lambda chunk: chunk[0]):
        late = [late_ns for _, late_ns in group]
        yield stamp_ns, late[-1], len(late)


def _chunks_of_a_write(choices: Sequence[_Stamped], lags: "_Lags") -> int:
    """What nine of ten reads brought at most that a loop in time made at once; 1 where these are too few."""
    if not any(_shares_stamps(stamps_ns) for stamps_ns, _, _ in choices):
        return 1
    every = max(1, sum(len(stamps_ns) for stamps_ns, _, _ in choices) // _CHUNKS_LOOKED_AT)
    sizes = sorted(
        num_chunks
        for choice in choices[::every]
        for stamp_ns, late_ns, num_chunks in _reads(choice)
        if late_ns <= LATE_READ_NS and lags.around(stamp_ns + late_ns) <= IN_TIME_NS
    )
    return sizes[math.ceil(WRITE_SHARE * len(sizes)) - 1] if len(sizes) >= MIN_READS else 1


def _choice_errors_ns(choice: _Stamped, num_written: int, lags: "_Lags") -> Iterator[int]:
    stamps_ns, _, read_before_ns = choice
    if not _shares_stamps(stamps_ns):
        yield from (0,) * len(stamps_ns)
        return
    for stamp_ns, late_ns, num_chunks in _reads(choice):
        num_older, error_ns = max(num_chunks - num_written, 0), 0
        if num_older:
            lag_ns = lags.around(stamp_ns + late_ns)
            if late_ns > LATE_READ_NS or lag_ns > HELD_UP_NS:
                error_ns = max(min(stamp_ns - read_before_ns, lag_ns), 0)
        yield from (error_ns,) * num_older
        yield from (0,) * (num_chunks - num_older)
        read_before_ns = stamp_ns + late_ns


@dataclass(frozen=True, slots=True)
class _Lags:
    """For each process, when its event loop was looked at and the longest lag until then."""

    series: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]

    @classmethod
    def of(cls, samples: Iterable[ClientSample]) -> "_Lags":
        return cls(
            tuple(
                (tuple(sample.t_ns for sample in own), tuple(sample.loop_lag_ns for sample in own))
                for own in _by_worker(samples).values()
            )
        )

    def around(self, t_ns: int) -> int:
        """The longest lag that any process saw in the sample that covers ``t_ns``, or in its last."""
        return max((lags[min(bisect_left(times, t_ns), len(times) - 1)] for times, lags in self.series), default=0)


def _by_worker(samples: Iterable[ClientSample]) -> dict[int, list[ClientSample]]:
    found: defaultdict[int, list[ClientSample]] = defaultdict(list)
    for sample in samples:
        found[sample.worker].append(sample)
    return {worker: sorted(own, key=lambda sample: sample.t_ns) for worker, own in found.items()}


def _ms(duration_ns: float | None) -> float | None:
    return None if duration_ns is None else ms_from_ns(duration_ns)
