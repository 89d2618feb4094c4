"""Upper bounds of the error of arrival times, for chunks that the client read together with newer ones.

The kernel timestamps the newest bytes of a read. If the client was away, several writes became one read: the older
chunks arrived between the previous read and the timestamp. Prompt reads show how many chunks a write has, which
distinguishes a server that writes four chunks together from a client that reads four writes late.
"""

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final, NamedTuple, TypeAlias

from benchctl.analysis.metrics.request_timing import num_zeros, pooled_itls_ns
from benchctl.records.request import ChoiceRecord, RequestRecord
from benchctl.records.samples import ClientSample
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


class _Read(NamedTuple):
    """The chunks of one choice that one read brought."""

    stamp_ns: int
    late_ns: int
    """Time from the arrival of its newest bytes to the read."""
    num_chunks: int
    before_ns: int
    """Time of the previous read, or of the send."""
    is_first: bool

    @property
    def away_ns(self) -> float:
        """Time for which the client was away if each chunk was a write of its own, at a steady pace."""
        return (self.stamp_ns - self.before_ns) * (self.num_chunks - 1) / self.num_chunks


def arrival_errors(
    requests: Sequence[RequestRecord], samples: Sequence[ClientSample], *, chunks_examined: int = CHUNKS_EXAMINED
) -> list[tuple[ChoiceErrors, ...]]:
    """Upper bound of the error of each arrival time, by request and choice; empty if all are 0.

    0 for the chunks of the newest write in each read, whose timestamp is their own, and if the client cannot have
    been away. Otherwise the chunk arrived after the previous read, and waited at most for the lag that the event
    loop measured then plus one measuring period. Without samples (a load of less than a tenth of a second) only the
    previous read bounds the error. Chunks without a kernel timestamp count as exact; ``client_guard`` judges them.
    """
    if not num_zeros(pooled_itls_ns(requests)):  # no read brought two chunks of a choice: each timestamp is exact
        return [((),) * len(request.choices) for request in requests]
    lags = _Lags.of(samples)
    num_written = _num_chunks_per_write(_stamped_choices(requests), lags, chunks_examined)
    return [
        tuple(_choice_errors(choice, _send_ns(request, choice), num_written, lags) for choice in request.choices)
        for request in requests
    ]


def num_chunks_per_write(requests: Iterable[RequestRecord], samples: Sequence[ClientSample]) -> int:
    """Number of chunks of a choice that the server writes at once, from prompt reads; at least 1."""
    return _num_chunks_per_write(_stamped_choices(requests), _Lags.of(samples), CHUNKS_EXAMINED)


_StampedChoice: TypeAlias = tuple[ChoiceRecord, int]
"""A choice with kernel timestamps, and the time of its send."""


def _stamped_choices(requests: Iterable[RequestRecord]) -> list[_StampedChoice]:
    return [
        (choice, _send_ns(request, choice))
        for request in requests
        for choice in request.choices
        if choice.chunk_late_ns is not None and choice.chunk_ns
    ]


def _send_ns(request: RequestRecord, choice: ChoiceRecord) -> int:
    if request.sent_ns is not None:
        return request.sent_ns
    return choice.chunk_ns[0] if choice.chunk_ns else 0


def _shares_stamps(stamps_ns: Sequence[int]) -> bool:
    return len(set(stamps_ns)) < len(stamps_ns)


def _reads(choice: ChoiceRecord, send_ns: int) -> Iterator[_Read]:
    """Each read that brought chunks of a choice with kernel timestamps."""
    before_ns, is_first = send_ns, True
    for stamp_ns, group in groupby(
        zip(choice.chunk_ns, choice.chunk_late_ns or (), strict=True), lambda chunk: chunk[0]
    ):
        late = [late_ns for _, late_ns in group]
        yield _Read(stamp_ns, late[-1], len(late), before_ns, is_first)
        before_ns, is_first = stamp_ns + late[-1], False


def _num_chunks_per_write(choices: Sequence[_StampedChoice], lags: "_Lags", chunks_examined: int) -> int:
    """Most chunks that nine of ten prompt reads brought; 1 if these are too few, or without samples."""
    if not lags.series or not any(_shares_stamps(choice.chunk_ns) for choice, _ in choices):
        return 1
    every = max(1, sum(len(choice.chunk_ns) for choice, _ in choices) // chunks_examined)
    num_reads, sizes = 0, []
    for choice, send_ns in choices[::every]:
        reads = list(_reads(choice, send_ns))
        whole = reads[:-1] or reads  # the last write holds the remainder
        num_reads += len(whole)
        sizes += [read.num_chunks for read in whole if _is_prompt(read, lags)]
    if len(sizes) < max(MIN_READS, MIN_AT_ONCE_FRAC * num_reads):
        return 1
    return sorted(sizes)[math.ceil(WRITE_SHARE * len(sizes)) - 1]


def _is_prompt(read: _Read, lags: "_Lags") -> bool:
    """True if the read is likely to have brought a single write.

    A client that was away for several writes reads the newest at any time since its arrival, in half of the cases
    later than half of the pace; and its measured lag is then at least half of the time that it was away.
    """
    max_late_ns: float = LATE_READ_NS
    max_lag_ns: float = IN_TIME_NS
    if not read.is_first:  # the first read has no pace
        pace_ns = (read.stamp_ns - read.before_ns) / read.num_chunks
        max_late_ns, max_lag_ns = max(max_late_ns, pace_ns / 2), max(max_lag_ns, read.away_ns / 2)
    return read.late_ns <= max_late_ns and lags.around(read.stamp_ns + read.late_ns) <= max_lag_ns


def _choice_errors(choice: ChoiceRecord, send_ns: int, num_written: int, lags: "_Lags") -> ChoiceErrors:
    if choice.chunk_late_ns is None or not _shares_stamps(choice.chunk_ns):
        return ()
    errors: list[int] = []
    for read in _reads(choice, send_ns):
        num_older = max(read.num_chunks - num_written, 0)
        error_ns = _read_error_ns(read, lags) if num_older else 0
        errors += [error_ns] * num_older + [0] * (read.num_chunks - num_older)
    return tuple(errors) if any(errors) else ()


def _read_error_ns(read: _Read, lags: "_Lags") -> int:
    """Upper bound of the time by which the older writes of a read precede its timestamp."""
    most_ns = max(read.stamp_ns - read.before_ns, 0)
    if not lags.series:
        return most_ns if read.late_ns > LATE_READ_NS else 0
    lag_ns = lags.around(read.stamp_ns + read.late_ns)
    if read.late_ns <= LATE_READ_NS and lag_ns <= IN_TIME_NS:
        return 0
    if not read.is_first and lag_ns + BEAT_NS < read.away_ns:
        return 0
    return min(most_ns, lag_ns + BEAT_NS)


@dataclass(frozen=True, slots=True)
class _Lags:
    """Sample times and longest lag of the event loop since the previous sample, for each process."""

    series: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]

    @classmethod
    def of(cls, samples: Iterable[ClientSample]) -> "_Lags":
        return cls(
            tuple(
                (tuple(sample.t_ns for sample in own), tuple(sample.loop_lag_ns for sample in own))
                for own in by_worker(samples).values()
            )
        )

    def around(self, t_ns: int) -> int:
        """Longest lag that any process measured within a period of ``t_ns``, or in its last sample."""
        longest_ns = 0
        for times, lags in self.series:
            last = len(times) - 1
            first_covering = min(bisect_left(times, t_ns - BEAT_NS), last)
            last_covering = min(
                bisect_left(times, t_ns + BEAT_NS), last
            )  # a sample covers the time since the previous
            longest_ns = max(longest_ns, *lags[first_covering : last_covering + 1])
        return longest_ns


def by_worker(samples: Iterable[ClientSample]) -> dict[int, list[ClientSample]]:
    """The samples of each process, in order of time."""
    samples_of: defaultdict[int, list[ClientSample]] = defaultdict(list)
    for sample in samples:
        samples_of[sample.worker].append(sample)
    return {worker: sorted(own, key=lambda sample: sample.t_ns) for worker, own in samples_of.items()}
