"""Arrival times: by how much a late client may have them wrong, and whether they came in bursts.

A chunk that was read together with newer ones has their timestamp: it arrived at any time since the previous read.
The metrics that this moves too far are unknown. Bursts are told from what a server always writes at once.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from benchctl.analysis.metrics.chunks import UNKNOWN_NS, Chunks, chunks_of
from benchctl.analysis.metrics.client import by_worker
from benchctl.analysis.metrics.latency import (
    latency_metrics,
    measured,
)
from benchctl.records.columns import Flags, Floats, Integers
from benchctl.records.loaded import LoadedRun
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


@dataclass(frozen=True, slots=True, eq=False)
class _Reads:
    """The reads that brought chunks with kernel timestamps, one choice after the other."""

    is_last: Flags
    """The last read of its choice."""
    choice_of: Integers
    """The position of its choice among those of the chunks."""
    starts: Integers
    """The number of the first chunk that it brought."""
    num_chunks: Integers
    stamp_ns: Integers
    late_ns: Integers
    """Time from the arrival of its newest bytes to the read."""
    before_ns: Integers
    """Time of the previous read, or of the send."""
    pace_ns: Floats
    """Time per chunk since then; 0 for the first read, which has no pace."""

    @property
    def away_ns(self) -> Floats:
        """Time for which the client was away if each chunk was a write of its own, at a steady pace."""
        return self.pace_ns * (self.num_chunks - 1)

    def lag_ns(self, samples: Iterable[ClientSample]) -> Integers:
        """Longest lag that any process measured within a period of each read, or in its last sample."""
        read_ns = self.stamp_ns + self.late_ns
        longest_ns = np.zeros(len(read_ns), np.int64)
        for own in by_worker(samples).values():
            t_ns = np.array([sample.t_ns for sample in own], np.int64)
            lags_ns = np.array([*(sample.loop_lag_ns for sample in own), 0], np.int64)
            first = np.minimum(np.searchsorted(t_ns, read_ns - BEAT_NS), len(own) - 1)
            # A sample covers the time since the previous
            behind = np.minimum(np.searchsorted(t_ns, read_ns + BEAT_NS) + 1, len(own))
            spans = np.stack([first, behind], axis=1).ravel()
            if len(spans):
                longest_ns = np.maximum(longest_ns, np.maximum.reduceat(lags_ns, spans)[::2])
        return longest_ns


def _reads_of(chunks: Chunks) -> _Reads:
    t_ns, late_ns, sizes = chunks.t_ns, chunks.late_ns, chunks.sizes
    is_start = np.diff(t_ns, prepend=UNKNOWN_NS) != 0
    is_start[chunks.starts] = True
    starts = np.flatnonzero(is_start)
    num_chunks = np.diff(starts, append=len(t_ns))
    choice_of = np.repeat(np.arange(len(sizes)), sizes)[starts]
    is_first = np.diff(choice_of, prepend=-1) > 0
    stamp_ns, read_late_ns = t_ns[starts], late_ns[starts + num_chunks - 1]
    sent_ns = chunks.sent_ns[chunks.request_of][choice_of]
    before_ns = np.where(sent_ns == UNKNOWN_NS, stamp_ns, sent_ns)
    before_ns[1:][~is_first[1:]] = (stamp_ns + read_late_ns)[:-1][~is_first[1:]]
    pace_ns = np.where(is_first, 0.0, (stamp_ns - before_ns) / num_chunks)
    columns = (starts, num_chunks, stamp_ns, read_late_ns, before_ns, pace_ns)
    is_stamped, is_last = late_ns[starts] != UNKNOWN_NS, np.diff(choice_of, append=len(sizes)) > 0
    return _Reads(*(column[is_stamped] for column in (is_last, choice_of, *columns)))


def errors_ns(
    chunks: Chunks, samples: Sequence[ClientSample], *, chunks_examined: int = CHUNKS_EXAMINED
) -> Integers:
    """By how much the time of each chunk may be too late.

    The recorded time of the chunks of the newest write in each read is their own, and so are all if the client
    cannot have been away. Otherwise the chunk arrived after the previous read, and waited at most for the lag that
    the event loop measured then plus one measuring period. Without samples (a load of less than a tenth of a
    second) only the previous read bounds the error. Chunks without a kernel timestamp count as exact;
    ``validity/client`` judges them.
    """
    wrong_ns = np.zeros(len(chunks.t_ns), np.int64)
    if (chunks.gaps_ns(chunks.t_ns, chunks.t_ns) != 0).all():
        return wrong_ns  # no read brought two chunks of a choice: each timestamp is exact
    reads = _reads_of(chunks)
    num_older = np.maximum(reads.num_chunks - num_chunks_per_write(reads, samples, chunks_examined), 0)
    most_ns = np.maximum(reads.stamp_ns - reads.before_ns, 0)
    is_late = reads.late_ns > LATE_READ_NS
    if samples:
        lag_ns = reads.lag_ns(samples)
        is_late = (is_late | (lag_ns > IN_TIME_NS)) & (lag_ns + BEAT_NS >= reads.away_ns)
        most_ns = np.minimum(most_ns, lag_ns + BEAT_NS)
    of_reads = np.where(is_late, most_ns, 0)
    read_of = np.repeat(np.arange(len(num_older)), num_older)  # of each chunk that is older than its read
    number = np.arange(len(read_of)) - (num_older.cumsum() - num_older)[read_of]
    wrong_ns[reads.starts[read_of] + number] = of_reads[read_of]
    return wrong_ns


def possible_errors_ns(chunks: Chunks, samples: Sequence[ClientSample]) -> Integers:
    """By how much each arrival may be too late, in a row, of the choices of which not all are exact."""
    wrong_ns = errors_ns(chunks, samples)
    if not wrong_ns.any():
        return wrong_ns[:0]
    return wrong_ns[np.repeat(np.maximum.reduceat(wrong_ns, chunks.starts) > 0, chunks.sizes)]


def num_chunks_per_write(reads: _Reads, samples: Sequence[ClientSample], chunks_examined: int) -> int:
    """Number of chunks of a choice that the server writes at once: the most that nine of ten prompt reads brought.

    1 if these are too few, or without samples.
    """
    if not samples or not (reads.num_chunks > 1).any():
        return 1
    _, order = np.unique(reads.choice_of, return_inverse=True)
    every = max(1, int(reads.num_chunks.sum()) // chunks_examined)
    is_only = reads.is_last & (np.diff(order, prepend=-1) > 0)
    is_whole = (order % every == 0) & (is_only | ~reads.is_last)  # the last write holds the remainder
    sizes = np.sort(reads.num_chunks[is_whole & _is_prompt(reads, samples)])
    if len(sizes) < max(MIN_READS, MIN_AT_ONCE_FRAC * is_whole.sum()):
        return 1
    return int(sizes[math.ceil(WRITE_SHARE * len(sizes)) - 1])


def _is_prompt(reads: _Reads, samples: Sequence[ClientSample]) -> Flags:
    """True for each read that is likely to have brought a single write.

    A client that was away for several writes reads the newest at any time since its arrival, in half of the cases
    later than half of the pace; and its measured lag is then at least half of the time that it was away.
    """
    is_in_time: Flags = reads.late_ns <= np.maximum(LATE_READ_NS, reads.pace_ns / 2)
    return is_in_time & (reads.lag_ns(samples) <= np.maximum(IN_TIME_NS, reads.away_ns / 2))


MAX_SHIFT_FRAC: Final = 0.01
"""Tolerated error as a fraction of the metric: the smallest change that comparisons usually call ..."""
MIN_SHIFT_MS: Final = 0.02
"""... or this, the accuracy of a kernel timestamp, whichever is larger."""


def uncertain_metrics(run: LoadedRun, chunks: Chunks) -> dict[str, tuple[float, float]]:
    """The latency metrics of a run that its late reads may have moved, each with its lowest and highest value in ms
    of the client's clock. On the virtual clock of a server only percentiles of gaps between chunks.

    ``chunks`` are those of its completed requests. On a virtual clock no read was late, but a simulator that fell
    behind wrote tokens together: the gaps of a write, of which all but the first are 0, are taken as recorded and
    as equal, with the same mean.
    """
    if run.record.is_simulated:
        return {}
    t_ns = chunks.t_ns
    if not chunks.num_simultaneous:
        return {}
    latencies = early = chunks.latencies_ns(t_ns)
    low, high = dict(latencies), dict(latencies)
    if run.record.is_virtual:
        gaps_ns = chunks.gaps_ns(t_ns, t_ns)
        is_write = (gaps_ns != 0) | (np.diff(chunks.requests_of_gaps, prepend=-1) > 0)
        starts = np.flatnonzero(is_write)
        sizes = np.diff(starts, append=len(gaps_ns))
        recorded, evened = np.sort(gaps_ns), np.sort(np.repeat(gaps_ns[starts] / sizes, sizes))
        if (recorded == evened).all():
            return {}
        low["itl"], high["itl"] = np.minimum(recorded, evened).tolist(), np.maximum(recorded, evened).tolist()
    else:
        earliest_ns = t_ns - errors_ns(chunks, run.client)
        if (earliest_ns == t_ns).all():
            return {}
        early = chunks.latencies_ns(earliest_ns)
        low["ttft"], high["tpot"] = early["ttft"], early["tpot"]  # after an earlier first token
        # A gap is longer if its first chunk came earlier than recorded, and shorter if its second did
        low["itl"] = np.maximum(chunks.gaps_ns(earliest_ns, t_ns), 0).tolist()
        high["itl"] = chunks.gaps_ns(t_ns, earliest_ns).tolist()
    values, lowest, highest = (latency_metrics(each, len(chunks.requests)) for each in (latencies, low, high))
    # the mean gap is moved by errors of first chunks alone, because neighbouring gaps compensate
    lowest["itl_ms"], highest["itl_ms"] = values["itl_ms"], latency_metrics({"itl": early["itl"]}, 1)["itl_ms"]
    uncertain = {}
    for name, value in values.items():
        low_ms, high_ms = lowest[name] or 0.0, highest[name] or 0.0
        if value is not None and max(value - low_ms, high_ms - value) > max(MAX_SHIFT_FRAC * value, MIN_SHIFT_MS):
            uncertain[name] = low_ms, high_ms
    return uncertain


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


def count_gaps(chunks: Chunks, steps: "StepColumns | None" = None) -> tuple[int, int]:
    """The numbers of short gaps between successive chunks of a choice, and of all."""
    gaps_ns = chunks.gaps_ns(chunks.t_ns, chunks.t_ns)
    return int((gaps_ns < _limits_ns(chunks, steps)).sum()), len(gaps_ns)


def _limits_ns(chunks: Chunks, steps: "StepColumns | None") -> Floats:
    """For each gap the duration below which it is short.

    That is a fraction of the expected time per chunk. With steps it is a quick step (the tenth percentile), because
    no choice gets two chunks within one step. Without it is the mean gap of the request, which includes all its
    bursts, but at most the median of these means over the requests, because the mean of a single delayed request is
    not its pace.
    """
    gaps_ns = chunks.gaps_ns(chunks.t_ns, chunks.t_ns)
    if steps:
        return np.full(len(gaps_ns), SHORT_FRAC * np.sort(steps.dur_ns)[len(steps) // 10])
    request_of = chunks.requests_of_gaps
    counts = np.bincount(request_of, minlength=len(chunks.requests))
    paces_ns = np.bincount(request_of, gaps_ns, len(chunks.requests)) / np.maximum(counts, 1)
    most_ns = np.median(paces_ns[counts > 0]) if len(gaps_ns) else 0.0
    limits_ns: Floats = SHORT_FRAC * np.minimum(paces_ns, most_ns)[request_of]
    return limits_ns


def regular_write(chunks: Chunks, steps: "StepColumns | None" = None) -> int | None:
    """Number of chunks of a choice that arrive at once, if it is nearly always the same; otherwise None.

    Chunks that follow each other within a tenth of the time per chunk arrive at once. The last write of each choice
    holds the remainder and does not count.
    """
    limits_ns = _limits_ns(chunks, steps)
    is_start = np.diff(chunks.t_ns, prepend=UNKNOWN_NS) >= limits_ns.min(initial=math.inf)
    is_start[chunks.starts] = True
    starts = np.flatnonzero(is_start)
    sizes, is_last = np.diff(starts), np.isin(starts[1:], chunks.starts)
    counts = np.bincount(sizes[~is_last])
    # Fewer writes show no choice
    if counts.sum() < 10:
        return None
    # The same number in so many of the writes is the server's choice
    return int(counts.argmax()) if counts.max() >= 0.8 * counts.sum() else None


def delivery_unevenness_steps(chunks: Chunks, steps: "StepColumns") -> float | None:
    """Spread of the tokens' delays from engine to client, in mean steps: their p95 less the median.

    A token's delay is its arrival less the end of the step that made it. Tokens are matched in the order of both
    times, which has the least variance of all ways to match them. A common delay does not count: it moves ttft and
    leaves itl and tpot unchanged. None unless both sides count the same number of tokens, on the host's clock.
    """
    choices = [choice for request in chunks.requests for choice in request.choices]
    counts = steps.optional("output_tokens")
    if steps.total("output_tokens") is None or counts is None or steps.clocks != ("host",):
        return None
    if any(choice.chunk_tokens is None for choice in choices):
        return None
    chunk_tokens = [tokens for choice in choices for tokens in choice.chunk_tokens or ()]
    arrived = np.sort(np.repeat(chunks.t_ns, np.array(chunk_tokens, dtype=np.int64)))
    made = np.sort(np.repeat(steps.start_ns + steps.dur_ns, counts.astype(np.int64)))
    if not len(made) or len(made) != len(arrived):
        return None
    middle, late = np.percentile(arrived - made, [50, 95])
    return float(late - middle) / float(steps.dur_ns.mean())


def bunching_warnings(run: LoadedRun) -> tuple[ResultWarning, ...]:
    """A warning if arrivals are bunched, or a note if the server always writes several chunks at once."""
    if run.record.is_virtual:
        return ()
    chunks = chunks_of(measured(run.requests))
    completed = chunks.completed
    steps = run.columns if len(run.columns) and run.record.times_whole_steps else None
    size = regular_write(completed, steps) or 1
    num_written = num_chunks_per_write(_reads_of(chunks), run.client, CHUNKS_EXAMINED) if size > 1 else 1
    if 1 < size <= num_written and not _is_uneven(chunks, steps, size):
        message = (
            f"the server writes {size} chunks of an answer at once: arrival times, ttft, tpot and e2el are exact; "
            f"itl is 0 within a write, and the time of {size} chunks between two writes"
        )
        return (ResultWarning(code="server-coalescing", message=message),)
    num_short, num_gaps = count_gaps(completed, steps)
    if num_gaps >= _MIN_GAPS and num_short > BUNCHED_FRAC * num_gaps:
        signs = (
            f"more than {BUNCHED_FRAC:.0%} of the gaps between chunks are shorter than a tenth of a chunk's time"
        )
    elif num_gaps >= _MIN_GAPS and _is_uneven(chunks, steps, 1):
        signs = f"one token in twenty took over {UNEVEN_STEPS:.0f} steps longer to arrive than the median token"
    else:
        return ()
    truth = "step metrics are exact" if steps else "wall time and throughput hold, and no steps are known"
    cause = (
        "The client read most of them promptly, so the server sent them in bursts: free processors for the server"
    )
    num_late = int((errors_ns(chunks, run.client) > 0).sum())
    if 2 * num_late > num_short:
        cause = "Most of them waited for the client to read: free processors for the client"
    message = (
        f"tokens reached the client in bursts: {signs}, so ttft, itl and tpot of the client are not trustworthy; "
        f"{truth}. {cause}"
    )
    return (ResultWarning(code=CLIENT_BUNCHING, message=message),)


def _is_uneven(chunks: Chunks, steps: "StepColumns | None", size: int) -> bool:
    """True if delays spread by more than the wait of the first of ``size`` chunks for the last of its write."""
    unevenness = None if steps is None else delivery_unevenness_steps(chunks, steps)
    return unevenness is not None and unevenness > UNEVEN_STEPS + size / 2 - 0.5
