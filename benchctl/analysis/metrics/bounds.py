"""Arrival times that a late client knows only between bounds, and the metrics that this moves.

A chunk that was read together with newer ones has their timestamp: it arrived at any time since the previous read.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, groupby, pairwise
from operator import attrgetter, sub
from typing import Final, NamedTuple, TypeAlias

import msgspec

from benchctl.analysis.metrics.client import by_worker
from benchctl.analysis.metrics.latency import (
    is_completed,
    itls_ns,
    latencies_ns,
    latency_metrics,
    measured,
    pooled_itls_ns,
)
from benchctl.records.loaded import LoadedRun
from benchctl.records.record import ChoiceRecord, RequestRecord
from benchctl.records.schema import ClientSample, ResultWarning
from benchctl.units import NS_PER_MS

BEAT_NS: Final = 20 * NS_PER_MS
"""Period at which an event loop measures its own lag; it may have been away for that much longer than it saw."""
LATE_READ_NS: Final = NS_PER_MS
"""A read within this after its newest bytes is prompt, however fast the stream is: a prompt read takes some tens of
microseconds, and a hundred simultaneous streams are read within this."""
IN_TIME_NS: Final = 2 * NS_PER_MS
"""A loop that wakes no later than this is on time: its waits are rounded up to whole milliseconds."""
WRITE_SHARE: Final = 0.9
"""A write has at most as many chunks as this share of the prompt reads ..."""
MIN_READS: Final = 20
"""... of which there must be at least this many ..."""
MIN_AT_ONCE_FRAC: Final = 0.1
"""... and at least this share of all reads: a client that is always late reads promptly only by chance. Otherwise
every chunk counts as a write of its own."""
CHUNKS_EXAMINED: Final = 50_000
"""Number of chunks that is enough, of choices from the whole load."""

ChoiceErrors: TypeAlias = tuple[int, ...]
"""Error of each chunk of a choice, in ns; empty if all are 0."""
_Workers: TypeAlias = Sequence[Sequence[ClientSample]]
"""The samples of each process, in order of time."""


class _Read(NamedTuple):
    """The chunks of one choice that one read brought."""

    stamp_ns: int
    late_ns: int
    """Time from the arrival of its newest bytes to the read."""
    num_chunks: int
    before_ns: int
    """Time of the previous read, or of the send."""
    pace_ns: float
    """Time per chunk since then; 0 for the first read, which has no pace."""

    @property
    def away_ns(self) -> float:
        """Time for which the client was away if each chunk was a write of its own, at a steady pace."""
        return self.pace_ns * (self.num_chunks - 1)


def _reads(request: RequestRecord, choice: ChoiceRecord) -> Iterator[_Read]:
    """Each read that brought chunks of a choice with kernel timestamps."""
    before_ns, is_first = choice.chunk_ns[0] if request.sent_ns is None else request.sent_ns, True
    chunks = zip(choice.chunk_ns, choice.chunk_late_ns or (), strict=True)
    for stamp_ns, group in groupby(chunks, lambda chunk: chunk[0]):
        late = [late_ns for _, late_ns in group]
        yield _Read(
            stamp_ns, late[-1], len(late), before_ns, 0.0 if is_first else (stamp_ns - before_ns) / len(late)
        )
        before_ns, is_first = stamp_ns + late[-1], False


def arrival_errors(
    requests: Sequence[RequestRecord], samples: Sequence[ClientSample], *, chunks_examined: int = CHUNKS_EXAMINED
) -> list[tuple[ChoiceErrors, ...]]:
    """Upper bound of the error of each arrival time, by request and choice; empty if all are 0.

    0 for the chunks of the newest write in each read, whose timestamp is their own, and if the client cannot have
    been away. Otherwise the chunk arrived after the previous read, and waited at most for the lag that the event
    loop measured then plus one measuring period. Without samples (a load of less than a tenth of a second) only the
    previous read bounds the error. Chunks without a kernel timestamp count as exact; ``validity/client`` judges
    them.
    """
    if not pooled_itls_ns(requests).count(0):  # no read brought two chunks of a choice: each timestamp is exact
        return [((),) * len(request.choices) for request in requests]
    workers = list(by_worker(samples).values())
    num_written = num_chunks_per_write(requests, samples, chunks_examined=chunks_examined)
    return [
        tuple(_choice_errors(request, choice, num_written, workers) for choice in request.choices)
        for request in requests
    ]


def num_chunks_per_write(
    requests: Iterable[RequestRecord], samples: Iterable[ClientSample], *, chunks_examined: int = CHUNKS_EXAMINED
) -> int:
    """Number of chunks of a choice that the server writes at once: the most that nine of ten prompt reads brought.

    1 if these are too few, or without samples.
    """
    workers = list(by_worker(samples).values())
    stamped = [(request, choice) for request in requests for choice in request.choices if choice.chunk_late_ns]
    if not workers or not any(len(set(choice.chunk_ns)) < len(choice.chunk_ns) for _, choice in stamped):
        return 1
    every = max(1, sum(len(choice.chunk_ns) for _, choice in stamped) // chunks_examined)
    num_reads, sizes = 0, []
    for request, choice in stamped[::every]:
        reads = list(_reads(request, choice))
        whole = reads[:-1] or reads  # the last write holds the remainder
        num_reads += len(whole)
        sizes += [read.num_chunks for read in whole if _is_prompt(read, workers)]
    if len(sizes) < max(MIN_READS, MIN_AT_ONCE_FRAC * num_reads):
        return 1
    return sorted(sizes)[math.ceil(WRITE_SHARE * len(sizes)) - 1]


def _is_prompt(read: _Read, workers: _Workers) -> bool:
    """True if the read is likely to have brought a single write.

    A client that was away for several writes reads the newest at any time since its arrival, in half of the cases
    later than half of the pace; and its measured lag is then at least half of the time that it was away.
    """
    if read.late_ns > max(LATE_READ_NS, read.pace_ns / 2):
        return False
    return _lag_around(read, workers) <= max(IN_TIME_NS, read.away_ns / 2)


def _choice_errors(
    request: RequestRecord, choice: ChoiceRecord, num_written: int, workers: _Workers
) -> ChoiceErrors:
    """Upper bounds of the time by which the older writes of each read precede its timestamp."""
    errors: list[int] = []
    if not choice.chunk_late_ns or len(set(choice.chunk_ns)) == len(choice.chunk_ns):
        return ()
    for read in _reads(request, choice):
        num_older, error_ns = max(read.num_chunks - num_written, 0), 0
        most_ns = max(read.stamp_ns - read.before_ns, 0)
        if num_older and not workers:
            error_ns = most_ns if read.late_ns > LATE_READ_NS else 0
        elif num_older:
            lag_ns = _lag_around(read, workers)
            is_late = read.late_ns > LATE_READ_NS or lag_ns > IN_TIME_NS
            error_ns = min(most_ns, lag_ns + BEAT_NS) if is_late and lag_ns + BEAT_NS >= read.away_ns else 0
        errors += [error_ns] * num_older + [0] * (read.num_chunks - num_older)
    return tuple(errors) if any(errors) else ()


def _lag_around(read: _Read, workers: _Workers) -> int:
    """Longest lag that any process measured within a period of the read, or in its last sample."""
    read_ns, time_of = read.stamp_ns + read.late_ns, attrgetter("t_ns")
    longest_ns = 0
    for own in workers:
        first = min(bisect_left(own, read_ns - BEAT_NS, key=time_of), len(own) - 1)
        last = bisect_left(own, read_ns + BEAT_NS, key=time_of)  # a sample covers the time since the previous
        longest_ns = max(longest_ns, *(sample.loop_lag_ns for sample in own[first : last + 1]))
    return longest_ns


TIMES_BOUNDED: Final = "times-bounded"
"""Code of the warning that names these metrics."""
MAX_SHIFT_FRAC: Final = 0.01
"""Tolerated error as a fraction of the metric: the smallest change that comparisons usually call ..."""
MIN_SHIFT_MS: Final = 0.02
"""... or this, the accuracy of a kernel timestamp, whichever is larger."""


def uncertain_metrics(run: LoadedRun) -> dict[str, tuple[float, float]]:
    """The latency metrics of a run that its late reads may have moved, each with its lowest and highest value in ms
    of the client's clock. On the virtual clock of a server only percentiles of gaps between chunks.

    There no read was late, but a simulator that fell behind wrote tokens together: the gaps of a write, of which
    all but the first are 0, are taken as recorded and as equal, with the same mean.
    """
    completed = [request for request in measured(run.requests) if is_completed(request)]
    if run.record.is_simulated or not completed:
        return {}
    latencies = early = latencies_ns(completed)
    low, high = dict(latencies), dict(latencies)
    if run.record.clock == "virtual":
        recorded, evened = sorted(latencies["itl"]), sorted(chain.from_iterable(map(_evened, completed)))
        if recorded == evened:
            return {}
        low["itl"], high["itl"] = list(map(min, recorded, evened)), list(map(max, recorded, evened))
    else:
        errors = arrival_errors(completed, run.client)
        if not any(chain.from_iterable(errors)):
            return {}
        earliest = list(map(_as_early_as_possible, completed, errors))
        early = latencies_ns(earliest)
        low["ttft"], high["tpot"] = early["ttft"], early["tpot"]  # after an earlier first token
        low["itl"], high["itl"] = _shortest_and_longest_gaps(completed, earliest)
    values, lowest, highest = (latency_metrics(each, len(completed)) for each in (latencies, low, high))
    # the mean gap is moved by errors of first chunks alone, because neighbouring gaps compensate
    lowest["itl_ms"], highest["itl_ms"] = values["itl_ms"], latency_metrics({"itl": early["itl"]}, 1)["itl_ms"]
    uncertain = {}
    for name, value in values.items():
        low_ms, high_ms = lowest[name] or 0.0, highest[name] or 0.0
        if value is not None and max(value - low_ms, high_ms - value) > max(MAX_SHIFT_FRAC * value, MIN_SHIFT_MS):
            uncertain[name] = low_ms, high_ms
    return uncertain


def _evened(request: RequestRecord) -> list[float]:
    """The gaps of one answer with those of each write equal."""
    writes = [(time_ns, len(list(chunks))) for time_ns, chunks in groupby(accumulate(itls_ns(request)))]
    return [
        (time_ns - before_ns) / size
        for (before_ns, _), (time_ns, size) in pairwise([(0, 0), *writes])
        for _ in range(size)
    ]


def _as_early_as_possible(request: RequestRecord, errors: Sequence[ChoiceErrors]) -> RequestRecord:
    """The request with every chunk at its earliest possible arrival."""
    choices = []
    for choice, of_choice in zip(request.choices, errors, strict=True):
        earliest_ns = tuple(map(sub, choice.chunk_ns, of_choice)) if of_choice else choice.chunk_ns
        choices.append(msgspec.structs.replace(choice, chunk_ns=earliest_ns))
    return msgspec.structs.replace(request, choices=tuple(choices))


def _shortest_and_longest_gaps(
    requests: Sequence[RequestRecord], earliest: Sequence[RequestRecord]
) -> tuple[list[int], list[int]]:
    """A gap is longer if its first chunk came earlier than recorded, and shorter if its second did."""
    shortest: list[int] = []
    longest: list[int] = []
    recorded, early = (
        [choice.chunk_ns for each in side for choice in each.choices] for side in (requests, earliest)
    )
    for recorded_ns, earliest_ns in zip(recorded, early, strict=True):
        shortest += [max(gap_ns, 0) for gap_ns in map(sub, earliest_ns[1:], recorded_ns)]
        longest += map(sub, recorded_ns[1:], earliest_ns)
    return shortest, longest


def late_read_warnings(run: LoadedRun) -> tuple[ResultWarning, ...]:
    """The warning that names the metrics which late reads make unknown, with their intervals; none without any."""
    uncertain = uncertain_metrics(run)
    if not uncertain:
        return ()
    intervals = "; ".join(
        f"{name} in {low_ms:.3g} to {high_ms:.3g} ms" for name, (low_ms, high_ms) in uncertain.items()
    )
    message = (
        "the client read several server writes at once, so some arrival times are known between bounds only, and "
        f"these metrics are left out: {intervals}. The others count. Free processors for the client"
    )
    return (ResultWarning(code=TIMES_BOUNDED, message=message),)
