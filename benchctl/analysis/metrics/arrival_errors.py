"""By how much the time of an arrival may be too late, because the client read it together with newer ones.

The kernel stamps the newest bytes of a read. One write of the server has one stamp, and all of its chunks that one.
Where the client was away, several writes became one read: what the older of them brought arrived between the read
before and the stamp, and no more is known. How many chunks a write has is seen in the reads that came at once, and
so a server that always writes four of them together is told from a client that reads four writes late: its reads
hold as many chunks each, and none needs the client to have been away for as long as four writes take.
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
"""An event loop looks at its own lateness this often, so that it may have been away for so much longer than it
saw."""
LATE_READ_NS: Final = NS_PER_MS
"""A read within this after its newest bytes came at once, however quick the stream is: at once is some tens of
microseconds, and a hundred streams that speak together are read within this."""
IN_TIME_NS: Final = 2 * NS_PER_MS
"""A loop that wakes no later than this was in time: its waits are rounded up to whole milliseconds."""
WRITE_SHARE: Final = 0.9
"""A write holds no more chunks than this share of the reads that came at once ..."""
MIN_READS: Final = 20
"""... of which there must be as many ..."""
MIN_AT_ONCE_FRAC: Final = 0.1
"""... and this share of all: a client that is always late reads at once by chance only. Else every chunk counts as
a write of its own."""
_CHUNKS_LOOKED_AT: Final = 50_000
"""About as many show it well enough, of choices from the whole load."""

ChoiceErrors: TypeAlias = tuple[int, ...]
"""Of each chunk of a choice, in ns; empty where all are 0."""


class _Read(NamedTuple):
    """What one read brought of one choice."""

    stamp_ns: int
    late_ns: int
    """How long its newest bytes had been there."""
    num_chunks: int
    before_ns: int
    """When the read before it was, or the request was sent."""
    is_first: bool

    @property
    def away_ns(self) -> float:
        """For how long the client must have been away if each chunk was a write of its own, at a steady pace."""
        return (self.stamp_ns - self.before_ns) * (self.num_chunks - 1) / self.num_chunks

    @property
    def pace_ns(self) -> float:
        """Time for each chunk."""
        return (self.stamp_ns - self.before_ns) / self.num_chunks


def arrival_errors(
    requests: Sequence[RequestRecord], samples: Sequence[ClientSample]
) -> list[tuple[ChoiceErrors, ...]]:
    """For each request and choice, by how much the time of each chunk may be too late; empty where none may.

    0 for the chunks of the newest write in each read, whose stamp is their own, and where the client cannot have
    been away. Elsewhere the chunk came after the read before, and waited no longer than the event loop was seen to
    be held up at that time, and the time between two looks more. Without samples, which a load of less than a tenth
    of a second has none of, the read before is all that is known of a read that came late. Chunks that the kernel
    did not stamp count as right: who read them is judged by itself.
    """
    if not num_zeros(pooled_itls_ns(requests)):  # no read brought two chunks of a choice: each stamp is true
        return [((),) * len(request.choices) for request in requests]
    lags = _Lags.of(samples)
    num_written = _chunks_of_a_write(_stamped(requests), lags)
    return [
        tuple(_choice_errors(choice, _asked_ns(request, choice), num_written, lags) for choice in request.choices)
        for request in requests
    ]


def chunks_of_a_write(requests: Iterable[RequestRecord], samples: Sequence[ClientSample]) -> int:
    """How many chunks of a choice the server sends at once, as reads that came at once show it; 1 or more."""
    return _chunks_of_a_write(_stamped(requests), _Lags.of(samples))


_Stamped: TypeAlias = tuple[ChoiceRecord, int]
"""A choice that the kernel stamped, and when it was asked for."""


def _stamped(requests: Iterable[RequestRecord]) -> list[_Stamped]:
    return [
        (choice, _asked_ns(request, choice))
        for request in requests
        for choice in request.choices
        if choice.chunk_late_ns is not None and choice.chunk_ns
    ]


def _asked_ns(request: RequestRecord, choice: ChoiceRecord) -> int:
    if request.sent_ns is not None:
        return request.sent_ns
    return choice.chunk_ns[0] if choice.chunk_ns else 0


def _shares_stamps(stamps_ns: Sequence[int]) -> bool:
    return len(set(stamps_ns)) < len(stamps_ns)


def _reads(choice: ChoiceRecord, asked_ns: int) -> Iterator[_Read]:
    """Each read that brought chunks of a stamped choice."""
    before_ns, is_first = asked_ns, True
    for stamp_ns, group in groupby(
        zip(choice.chunk_ns, choice.chunk_late_ns or (), strict=True), lambda chunk: chunk[0]
    ):
        late = [late_ns for _, late_ns in group]
        yield _Read(stamp_ns, late[-1], len(late), before_ns, is_first)
        before_ns, is_first = stamp_ns + late[-1], False


def _chunks_of_a_write(choices: Sequence[_Stamped], lags: "_Lags") -> int:
    """What nine of ten reads brought at most that came at once; 1 where these are too few, or nobody looked."""
    if not lags.series or not any(_shares_stamps(choice.chunk_ns) for choice, _ in choices):
        return 1
    every = max(1, sum(len(choice.chunk_ns) for choice, _ in choices) // _CHUNKS_LOOKED_AT)
    num_reads, sizes = 0, []
    for choice, asked_ns in choices[::every]:
        reads = list(_reads(choice, asked_ns))
        whole = reads[:-1] or reads  # the last write has what is left
        num_reads += len(whole)
        sizes += [read.num_chunks for read in whole if _is_at_once(read, lags)]
    if len(sizes) < max(MIN_READS, MIN_AT_ONCE_FRAC * num_reads):
        return 1
    return sorted(sizes)[math.ceil(WRITE_SHARE * len(sizes)) - 1]


def _is_at_once(read: _Read, lags: "_Lags") -> bool:
    """Whether the read looks as if it brought one write.

    A client that was away for several writes meets the newest at any time since it came, half of the time later
    than half of its pace; and it was away for so long that a look at its lateness would have told of half of that.
    """
    max_late_ns: float = LATE_READ_NS
    max_lag_ns: float = IN_TIME_NS
    if not read.is_first:  # before the first there is no pace
        max_late_ns, max_lag_ns = max(max_late_ns, read.pace_ns / 2), max(max_lag_ns, read.away_ns / 2)
    return read.late_ns <= max_late_ns and lags.around(read.stamp_ns + read.late_ns) <= max_lag_ns


def _choice_errors(choice: ChoiceRecord, asked_ns: int, num_written: int, lags: "_Lags") -> ChoiceErrors:
    if choice.chunk_late_ns is None or not _shares_stamps(choice.chunk_ns):
        return ()
    errors: list[int] = []
    for read in _reads(choice, asked_ns):
        num_older = max(read.num_chunks - num_written, 0)
        error_ns = _read_error_ns(read, lags) if num_older else 0
        errors += [error_ns] * num_older + [0] * (read.num_chunks - num_older)
    return tuple(errors) if any(errors) else ()


def _read_error_ns(read: _Read, lags: "_Lags") -> int:
    """By how much the older writes of a read may be older than its stamp; 0 where they cannot be."""
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
    """For each process, when its event loop was looked at and the longest lag until then."""

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
        """The longest lag that any process saw within a beat of ``t_ns``, or in its last sample."""
        return max((_longest(times, lags, t_ns) for times, lags in self.series), default=0)


def _longest(times: Sequence[int], lags: Sequence[int], t_ns: int) -> int:
    """A sample covers the time since the one before it."""
    last = len(times) - 1
    first_covering = min(bisect_left(times, t_ns - BEAT_NS), last)
    last_covering = min(bisect_left(times, t_ns + BEAT_NS), last)
    return max(lags[first_covering : last_covering + 1])


def by_worker(samples: Iterable[ClientSample]) -> dict[int, list[ClientSample]]:
    """The samples of each process, in their order."""
    found: defaultdict[int, list[ClientSample]] = defaultdict(list)
    for sample in samples:
        found[sample.worker].append(sample)
    return {worker: sorted(own, key=lambda sample: sample.t_ns) for worker, own in found.items()}
