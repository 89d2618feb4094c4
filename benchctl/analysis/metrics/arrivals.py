"""Arrival times: by how much a late client may have them wrong, and whether they came in bursts.

A chunk that was read together with newer ones has their timestamp: it arrived at any time since the previous read.
The metrics that this moves too far are unknown. Bursts are told from what a server always writes at once.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, groupby, pairwise
from operator import attrgetter, sub
from statistics import median
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import msgspec

from benchctl.analysis.metrics.client import by_worker
from benchctl.analysis.metrics.latency import (
    is_completed,
    itls_ns,
    latencies_ns,
    latency_metrics,
    measured,
    num_simultaneous,
)
from benchctl.records.loaded import LoadedRun
from benchctl.records.record import ChoiceRecord, RequestRecord
from benchctl.records.schema import ClientSample, ResultWarning
from benchctl.units import NS_PER_MS

if TYPE_CHECKING:
    from benchctl.records.columns import StepColumns

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


def earliest_arrivals(
    requests: Sequence[RequestRecord], samples: Sequence[ClientSample], *, chunks_examined: int = CHUNKS_EXAMINED
) -> list[RequestRecord]:
    """The requests with each chunk at its earliest possible arrival; the same objects where every time is exact.

    The recorded time of the chunks of the newest write in each read is their own, and so are all if the client
    cannot have been away. Otherwise the chunk arrived after the previous read, and waited at most for the lag that
    the event loop measured then plus one measuring period. Without samples (a load of less than a tenth of a
    second) only the previous read bounds the error. Chunks without a kernel timestamp count as exact;
    ``validity/client`` judges them.
    """
    if not num_simultaneous(requests):  # no read brought two chunks of a choice: each timestamp is exact
        return list(requests)
    workers = list(by_worker(samples).values())
    num_written = num_chunks_per_write(requests, samples, chunks_examined=chunks_examined)
    earliest = []
    for request in requests:
        choices = tuple(_at_earliest(request, choice, num_written, workers) for choice in request.choices)
        is_exact = choices == request.choices
        earliest.append(request if is_exact else msgspec.structs.replace(request, choices=choices))
    return earliest


def possible_errors_ns(requests: Sequence[RequestRecord], samples: Sequence[ClientSample]) -> list[int]:
    """By how much each arrival may be too late, in a row, of the choices of which not all are exact."""
    errors_ns: list[int] = []
    for request, early in zip(requests, earliest_arrivals(requests, samples), strict=True):
        for choice, early_choice in zip(request.choices, early.choices, strict=True):
            if early_choice is not choice:
                errors_ns += map(sub, choice.chunk_ns, early_choice.chunk_ns)
    return errors_ns


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


def _at_earliest(request: RequestRecord, choice: ChoiceRecord, num_written: int, workers: _Workers) -> ChoiceRecord:
    """The choice with the older writes of each read as long before its timestamp as they may have come."""
    if not choice.chunk_late_ns or len(set(choice.chunk_ns)) == len(choice.chunk_ns):
        return choice
    errors: list[int] = []
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
    if not any(errors):
        return choice
    return msgspec.structs.replace(choice, chunk_ns=tuple(map(sub, choice.chunk_ns, errors)))


def _lag_around(read: _Read, workers: _Workers) -> int:
    """Longest lag that any process measured within a period of the read, or in its last sample."""
    read_ns, time_of = read.stamp_ns + read.late_ns, attrgetter("t_ns")
    longest_ns = 0
    for own in workers:
        first = min(bisect_left(own, read_ns - BEAT_NS, key=time_of), len(own) - 1)
        last = bisect_left(own, read_ns + BEAT_NS, key=time_of)  # a sample covers the time since the previous
        longest_ns = max(longest_ns, *(sample.loop_lag_ns for sample in own[first : last + 1]))
    return longest_ns


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
    if run.record.is_simulated or not num_simultaneous(completed):
        return {}
    latencies = early = latencies_ns(completed)
    low, high = dict(latencies), dict(latencies)
    if run.record.is_virtual:
        recorded, evened = sorted(latencies["itl"]), sorted(chain.from_iterable(map(_evened, completed)))
        if recorded == evened:
            return {}
        low["itl"], high["itl"] = list(map(min, recorded, evened)), list(map(max, recorded, evened))
    else:
        earliest = earliest_arrivals(completed, run.client)
        if earliest == completed:
            return {}
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


CLIENT_BUNCHING: Final = "client-bunching"
"""Code of the warning that the client's times do not describe the engine."""
_CHUNK_TIMED: Final = ("ttft_ms", "itl_ms", "tpot_ms")
"""Endings of the names of metrics that only the client times, chunk by chunk."""
SHORT_FRAC: Final = 0.1
"""A gap is short below this fraction of the expected time per chunk."""
BUNCHED_FRAC: Final = 0.2
"""Share of short gaps above which a run is bunched. Random arrivals (a Poisson process) have 1 - exp(-0.1) = 9.5 %,
so twice as many do not come from irregular steps; and with one gap in five missing, the others are a quarter too
long."""
_MIN_GAPS: Final = 20
"""Fewest gaps that are judged."""
UNEVEN_STEPS: Final = 5.0
"""Delay of one token in twenty against the median token, in steps, above which a run is bunched. A front end that
stalls from time to time makes few short gaps: only those of the following burst. Chosen from 29 runs of small
models on two cores: 24 with more short gaps than ``BUNCHED_FRAC`` had 6 or more; of the other five, two had 11 and
54 and three had 2.0, 2.3 and 3.3. Not tried on a GPU."""


def num_bunched(metric: str, runs: Iterable[LoadedRun]) -> int:
    """The runs in which a metric is not that of the engine, because tokens came in bursts; 0 for other metrics than
    those that time chunks.
    """
    if not metric.endswith(_CHUNK_TIMED):
        return 0
    return sum(any(warning.code == CLIENT_BUNCHING for warning in run.record.warnings) for run in runs)


def count_gaps(requests: Iterable[RequestRecord], steps: "StepColumns | None" = None) -> tuple[int, int]:
    """The numbers of short gaps between successive chunks of a choice, and of all."""
    gaps_ns, limits_ns = _gaps_and_limits(requests, steps)
    pairs = zip(gaps_ns, limits_ns, strict=True)
    return sum(gap < limit for of_request, limit in pairs for gap in of_request), sum(map(len, gaps_ns))


def _gaps_and_limits(
    requests: Iterable[RequestRecord], steps: "StepColumns | None"
) -> tuple[list[Sequence[int]], list[float]]:
    """The gaps of each completed request, in ns, and the duration below which they are short.

    That is a fraction of the expected time per chunk. With steps it is a quick step (the tenth percentile), because
    no choice gets two chunks within one step. Without it is the mean gap of the request, which includes all its
    bursts, but at most the median of these means over the requests, because the mean of a single delayed request is
    not its pace.
    """
    gaps_ns = [gaps for request in requests if is_completed(request) and (gaps := itls_ns(request))]
    paces_ns = [sum(gaps) / len(gaps) for gaps in gaps_ns]
    most_ns = median(paces_ns) if paces_ns else 0.0
    if steps:
        most_ns = float(sorted(steps.dur_ns.tolist())[len(steps) // 10])
        paces_ns = [most_ns] * len(gaps_ns)
    return list(gaps_ns), [SHORT_FRAC * min(pace, most_ns) for pace in paces_ns]


def regular_write(requests: Sequence[RequestRecord], steps: "StepColumns | None" = None) -> int | None:
    """Number of chunks of a choice that arrive at once, if it is nearly always the same; otherwise None.

    Chunks that follow each other within a tenth of the time per chunk arrive at once. The last write of each choice
    holds the remainder and does not count.
    """
    _, limits_ns = _gaps_and_limits(requests, steps)
    least_ns = min(limits_ns, default=0.0)
    sizes: Counter[int] = Counter()
    for request in requests if limits_ns else ():
        for choice in request.choices if is_completed(request) else ():
            gaps_ns = map(sub, choice.chunk_ns[1:], choice.chunk_ns)
            ends = [0, *(i for i, gap in enumerate(gaps_ns, start=1) if gap >= least_ns)]
            sizes.update(map(sub, ends[1:], ends))
    # Fewer writes show no choice
    if sizes.total() < 10:
        return None
    size, count = sizes.most_common(1)[0]
    # The same number in so many of the writes is the server's choice
    return size if count >= 0.8 * sizes.total() else None


def delivery_unevenness_steps(requests: Sequence[RequestRecord], steps: "StepColumns") -> float | None:
    """Spread of the tokens' delays from engine to client, in mean steps: their p95 less the median.

    A token's delay is its arrival less the end of the step that made it. Tokens are matched in the order of both
    times, which has the least variance of all ways to match them. A common delay does not count: it moves ttft and
    leaves itl and tpot unchanged. None unless both sides count the same number of tokens, on the host's clock.
    """
    choices = [choice for request in requests for choice in request.choices]
    counts = steps.optional("output_tokens")
    if steps.total("output_tokens") is None or counts is None or steps.clocks != ("host",):
        return None
    if any(choice.chunk_tokens is None for choice in choices):
        return None
    import numpy as np  # noqa: PLC0415 - importing takes longer than judging a short load without steps

    chunk_ns = np.array([t_ns for choice in choices for t_ns in choice.chunk_ns], dtype=np.int64)
    chunk_tokens = [tokens for choice in choices for tokens in choice.chunk_tokens or ()]
    arrived = np.sort(np.repeat(chunk_ns, np.array(chunk_tokens, dtype=np.int64)))
    made = np.sort(np.repeat(steps.start_ns + steps.dur_ns, counts.astype(np.int64)))
    if not len(made) or len(made) != len(arrived):
        return None
    middle, late = np.percentile(arrived - made, [50, 95])
    return float(late - middle) / float(steps.dur_ns.mean())


def bunching_warnings(run: LoadedRun) -> tuple[ResultWarning, ...]:
    """A warning if arrivals are bunched, or a note if the server always writes several chunks at once."""
    if run.record.is_virtual:
        return ()
    requests = measured(run.requests)
    steps = run.columns if len(run.columns) and run.record.times_whole_steps else None
    size = regular_write(requests, steps) or 1
    if 1 < size <= num_chunks_per_write(requests, run.client) and not _is_uneven(requests, steps, size):
        message = (
            f"the server writes {size} chunks of an answer at once: arrival times, ttft, tpot and e2el are exact; "
            f"itl is 0 within a write, and the time of {size} chunks between two writes"
        )
        return (ResultWarning(code="server-coalescing", message=message),)
    num_short, num_gaps = count_gaps(requests, steps)
    if num_gaps >= _MIN_GAPS and num_short > BUNCHED_FRAC * num_gaps:
        signs = (
            f"more than {BUNCHED_FRAC:.0%} of the gaps between chunks are shorter than a tenth of a chunk's time"
        )
    elif num_gaps >= _MIN_GAPS and _is_uneven(requests, steps, 1):
        signs = f"one token in twenty took over {UNEVEN_STEPS:.0f} steps longer to arrive than the median token"
    else:
        return ()
    truth = "step metrics are exact" if steps else "wall time and throughput hold, and no steps are known"
    cause = (
        "The client read most of them promptly, so the server sent them in bursts: free processors for the server"
    )
    num_late = sum(error_ns > 0 for error_ns in possible_errors_ns(requests, run.client))
    if 2 * num_late > num_short:
        cause = "Most of them waited for the client to read: free processors for the client"
    message = (
        f"tokens reached the client in bursts: {signs}, so ttft, itl and tpot of the client are not trustworthy; "
        f"{truth}. {cause}"
    )
    return (ResultWarning(code=CLIENT_BUNCHING, message=message),)


def _is_uneven(requests: Sequence[RequestRecord], steps: "StepColumns | None", size: int) -> bool:
    """True if delays spread by more than the wait of the first of ``size`` chunks for the last of its write."""
    unevenness = None if steps is None else delivery_unevenness_steps(requests, steps)
    return unevenness is not None and unevenness > UNEVEN_STEPS + size / 2 - 0.5
