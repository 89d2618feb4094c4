"""Delays of sends against the schedule, and the part of them that the client caused.

Upper bounds of the error of arrival times, for chunks that the client read together with newer ones.
Quality of the client's timestamps: their source, the delay of reads, and the load of the client's processes.
"""

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from math import expm1, sqrt
from statistics import fmean
from typing import Final, NamedTuple, TypeAlias

from benchctl.analysis.metrics.latency import (
    concatenated,
    known_values,
    ms_or_none,
    num_zeros,
    percentiles,
    pooled_itls_ns,
    quotient,
    send_lag_ns,
    smallest_sample,
)
from benchctl.analysis.metrics.slot_occupancy import MIN_LOAD_NS
from benchctl.formats import milliseconds
from benchctl.profile.model import Arrival
from benchctl.records.record import ChoiceRecord, RequestRecord
from benchctl.records.schema import ClientSample, ResultWarning
from benchctl.units import NS_PER_MS, NS_PER_S, NS_PER_US, ms_from_ns, s_from_ns

MAX_SEND_LAG_NS: Final = 2 * NS_PER_MS
"""An event loop's timer fires up to 1 ms late, because it waits for whole milliseconds; another 1 ms is tolerated
for a busy processor."""
WRITE_NS: Final = 100 * NS_PER_US
"""Tolerated time for writing each of the requests that are due at one moment: four times that of a free core."""
MAX_WAVE_LAG_NS: Final = 50 * NS_PER_MS
"""Tolerated common delay of requests that are due at one moment, or a hundredth of the load if that is more: a
single hiccup delays them all and changes the load by no more than this."""
MAX_EMPTY_FRAC: Final = 0.05
"""Share of time for which slots of a closed loop may be empty because the client was late: beyond it the server met
a twentieth fewer concurrent requests than planned."""
MIN_RATE_FRAC: Final = 0.95
"""Below this the load is another one: near saturation a server's queue depends strongly on the rate."""
KOLMOGOROV_95: Final = 1.358
"""Kolmogorov distance of gaps from their law, times the root of their number, below which it stays by chance in 95
of 100 loads."""
HABIT_FRAC: Final = 0.01
"""More than one in a hundred is beyond the 99th percentile ..."""
MIN_HABIT: Final = 5
"""... and fewer occurrences than this are not a habit."""


@dataclass(frozen=True, slots=True)
class Sends:
    """The requests that left, in the order of the plan."""

    requests: tuple[RequestRecord, ...]
    lag_ns: tuple[int, ...]
    """Delay of each send."""
    own_lag_ns: tuple[int, ...]
    """The part of it that no cap explains."""
    is_planned: bool
    """An open loop: each request has its own scheduled time."""

    @property
    def planned_rate(self) -> float | None:
        """Requests per second of the schedule; None without a schedule, or if all are due at one moment."""
        return quotient(len(self.requests) - 1, s_from_ns(self.planned_span_ns)) if self.is_planned else None

    @property
    def sent_rate(self) -> float | None:
        """Requests per second that were sent."""
        sent = [request.sent_ns or 0 for request in self.requests]
        return quotient(len(sent) - 1, s_from_ns(max(sent) - min(sent))) if sent else None

    @property
    def planned_span_ns(self) -> int:
        """Scheduled time from the first to the last request."""
        return self.requests[-1].scheduled_ns - self.requests[0].scheduled_ns if self.requests else 0

    @property
    def held_back_ns(self) -> list[int]:
        """Delays of the requests that a cap held back."""
        pairs = zip(self.lag_ns, self.own_lag_ns, strict=True)
        return [lag for lag, own in pairs if self.is_planned and lag > MAX_SEND_LAG_NS and own < lag]


def sends_of(requests: Iterable[RequestRecord], arrival: Arrival) -> Sends:
    """The sends of a load, with the part of each delay that the client caused."""
    left = sorted((r for r in requests if r.sent_ns is not None), key=lambda r: (r.scheduled_ns, r.index))
    is_planned = arrival.kind not in {"closed-loop", "burst"}
    client_delays_from = _start_of_client_delay(left, arrival, is_planned=is_planned)
    return Sends(
        requests=tuple(left),
        lag_ns=tuple((request.sent_ns or 0) - request.scheduled_ns for request in left),
        own_lag_ns=tuple(max((request.sent_ns or 0) - client_delays_from(request), 0) for request in left),
        is_planned=is_planned,
    )


def _start_of_client_delay(
    requests: Sequence[RequestRecord], arrival: Arrival, *, is_planned: bool
) -> Callable[[RequestRecord], int]:
    """Returns, for a request, the time from which its delay is the client's and no longer a cap's."""
    if is_planned and arrival.launch_rate_limit is not None:
        return lambda request: request.sent_ns or 0
    has_slot_times = any(request.slot_free_ns is not None for request in requests)
    if has_slot_times or (is_planned and not _fills(requests, arrival.max_concurrency)):
        return lambda request: max(request.scheduled_ns, request.slot_free_ns or 0)
    if is_planned:
        return lambda request: max(request.scheduled_ns, request.connected_ns or request.sent_ns or 0)
    return lambda request: max(request.scheduled_ns, request.connected_ns or 0)


def _fills(requests: Sequence[RequestRecord], cap: int | None) -> bool:
    """True if as many were open at once as the cap allows, so that others may have waited for a slot."""
    sent = [(request.sent_ns or 0, 1) for request in requests]
    ended = [(request.done_ns, -1) for request in requests if request.done_ns is not None]
    most = max(accumulate(change for _, change in sorted(sent + ended)), default=0)
    return cap is not None and most >= cap


def delayed_sends(sends: Sends, load_ns: int) -> Iterator[ResultWarning]:
    """A warning if requests repeatedly left late, or one wave of them by a large part of the load."""
    if load_ns < MIN_LOAD_NS:
        return
    delays_by_time: dict[int, list[int]] = {}
    for request, lag_ns in zip(sends.requests, sends.own_lag_ns, strict=True):
        delays_by_time.setdefault(request.scheduled_ns, []).append(lag_ns)
    # less the time for writing the requests before it
    waves = [[lag_ns - i * WRITE_NS for i, lag_ns in enumerate(sorted(wave))] for wave in delays_by_time.values()]
    lags = [lag_ns for wave in waves for lag_ns in wave]
    num_late, num_late_waves = count_above(lags, MAX_SEND_LAG_NS), count_above(map(max, waves), MAX_SEND_LAG_NS)
    is_always = is_habit(num_late_waves, len(waves)) and is_habit(num_late, len(lags))
    if is_always and not sends.is_planned:  # only if the wait takes a considerable part of the time of the answers
        answered = [(r.done_ns or 0) - (r.sent_ns or 0) for r in sends.requests if r.done_ns is not None]
        is_always = sum(sends.own_lag_ns) > MAX_EMPTY_FRAC * sum(answered)
    wave_limit_ns = max(MAX_WAVE_LAG_NS, round(load_ns * HABIT_FRAC))
    if not is_always and not is_habit(count_above(lags, wave_limit_ns), len(lags)):
        return
    num_unconnected = sum((r.connected_ns or 0) > r.scheduled_ns for r in sends.requests) if sends.is_planned else 0
    closed = f" ({num_unconnected} connections were not open by then)" if num_unconnected else ""
    yield ResultWarning(
        code="sends-delayed",
        message=f"{num_late} of {len(lags)} requests left more than {ms_from_ns(MAX_SEND_LAG_NS):.0f} ms late "
        f"(p99 {p99_ms(lags)} ms){closed}: the load was not the one that was planned. Free processors for the "
        "client, or lower the load",
    )


def missed_rate(sends: Sends) -> Iterator[ResultWarning]:
    """A warning if fewer requests per second were sent than scheduled."""
    if not sends.is_planned or len(sends.requests) < 2 or sends.held_back_ns:
        return
    planned, sent = sends.planned_rate, sends.sent_rate
    if sends.planned_span_ns < MIN_LOAD_NS or not planned or sent is None or sent >= MIN_RATE_FRAC * planned:
        return
    yield ResultWarning(
        code="rate-missed",
        message=f"the client sent {sent:.4g} requests/s where {planned:.4g} were planned, less than "
        f"{MIN_RATE_FRAC:.0%}, and no cap explains it: the server met a lighter load. Free processors for the "
        "client, or lower the rate",
    )


def capped_rate(sends: Sends, factor: float) -> Iterator[ResultWarning]:
    """A warning if a cap held planned requests back; ``factor`` is seconds of the engine's clock per second."""
    waits = sends.held_back_ns
    if not waits:
        return
    mean_ms, max_ms = ms_from_ns(fmean(waits) * factor), ms_from_ns(max(waits) * factor)
    yield ResultWarning(
        code="rate-capped",
        message=f"{len(waits)} of {len(sends.requests)} requests waited after their time, {mean_ms:.3g} ms on "
        f"average and {max_ms:.3g} ms at most, because the profile caps them (max_concurrency or "
        "launch_rate_limit). No latency includes this wait, because latencies count from the send (coordinated "
        "omission); raise the cap, or use a closed loop",
    )


def unlike_poisson(sends: Sends, arrival: Arrival) -> Iterator[ResultWarning]:
    """A warning if the gaps between sends are no longer those of the Poisson process that was planned."""
    rate = arrival.request_rate if arrival.kind == "poisson" else None
    if rate is None or sends.planned_span_ns < MIN_LOAD_NS or sends.held_back_ns:
        return
    planned, sent = (
        _distance_from_poisson(times_ns, rate)
        for times_ns in zip(*((each.scheduled_ns, each.sent_ns or 0) for each in sends.requests), strict=True)
    )
    limit = KOLMOGOROV_95 / sqrt(len(sends.requests) - 1)
    if sent > max(limit, planned):
        yield ResultWarning(
            code="sends-unlike-poisson",
            message=f"the gaps between {len(sends.requests)} sends have a Kolmogorov distance of {sent:.4f} from a "
            f"Poisson process of {rate:g} requests/s; chance stays below {limit:.4f} in 95 of 100 loads, and the "
            f"plan has {planned:.4f}: requests left in bunches. Free processors for the client, or lower the rate",
        )


def _distance_from_poisson(times_ns: Iterable[int], rate_per_s: float) -> float:
    """Kolmogorov distance of the gaps between times from the exponential distribution of this rate."""
    gaps_ns = (later - earlier for earlier, later in pairwise(sorted(times_ns)))
    shares = sorted(-expm1(-s_from_ns(gap_ns) * rate_per_s) for gap_ns in gaps_ns)
    return max(max((i + 1) / len(shares) - share, share - i / len(shares)) for i, share in enumerate(shares))


def count_above(values: Iterable[float], limit: float) -> int:
    """Count the values above the limit."""
    return sum(value > limit for value in values)


def is_habit(count: int, total: int) -> bool:
    """True if it happens to more than one in a hundred, and not just to a few."""
    return count >= MIN_HABIT and count > HABIT_FRAC * total


def p99_ms(values_ns: Sequence[float]) -> str:
    """The 99th percentile as text."""
    return milliseconds(percentiles(values_ns, smallest_sample(99), (99,))[99])  # of any number of values


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


_PERIOD_NS: Final = NS_PER_S // 10
"""Period of the samples of an event loop that does not stall."""
MIN_CPU_SPAN_NS: Final = NS_PER_S
"""Processor time over a shorter span says little."""


def client_metrics(requests: Sequence[RequestRecord], samples: Sequence[ClientSample]) -> dict[str, float | None]:
    """The metrics of the load generator itself, on its own clock."""
    lags = known_values([send_lag_ns(request) for request in requests])
    send = percentiles(lags, len(lags), (50, 99))
    late = concatenated([choice.chunk_late_ns or () for request in requests for choice in request.choices])
    chunks = [len(choice.chunk_ns) for request in requests for choice in request.choices]
    num_bounds = num_zeros(pooled_itls_ns(requests))
    cores = busy_cores(samples)
    return {
        "p50_send_lag_ms": ms_or_none(send[50]),
        "p99_send_lag_ms": ms_or_none(send[99]),
        "max_send_lag_ms": ms_or_none(max(lags, default=None)),
        "kernel_stamp_frac": quotient(len(late), sum(chunks)),
        "coalesced_chunk_frac": quotient(num_bounds, sum(chunks)),
        "p99_read_delay_ms": ms_or_none(percentiles(late, len(late), (99,))[99]),
        "max_loop_lag_ms": ms_or_none(max((sample.loop_lag_ns for sample in samples), default=None)),
        "client_cpu_cores": sum(cores.values()) if cores else None,
    }


def busy_cores(samples: Iterable[ClientSample]) -> Mapping[int, float]:
    """Cores that each process of the load generator kept busy, by its number; at least a second of each."""
    return {
        worker: (own[-1].cpu_ns - own[0].cpu_ns) / span_ns
        for worker, own in by_worker(samples).items()
        if (span_ns := own[-1].t_ns - own[0].t_ns) >= MIN_CPU_SPAN_NS
    }


def samples_span_ns(samples: Iterable[ClientSample]) -> int:
    """Time that the samples cover, in the process that was sampled longest."""
    return max((own[-1].t_ns - own[0].t_ns + _PERIOD_NS for own in by_worker(samples).values()), default=0)


def stalled_ns(samples: Iterable[ClientSample], limit_ns: float) -> int:
    """Time covered by samples whose lag exceeds the limit, in the process with the most of it.

    Time rather than a count, because a stalled loop takes fewer samples.
    """
    late = []
    for own in by_worker(samples).values():
        starts = [own[0].t_ns - _PERIOD_NS, *(sample.t_ns for sample in own[:-1])]
        late.append(sum(s.t_ns - start for s, start in zip(own, starts, strict=True) if s.loop_lag_ns > limit_ns))
    return max(late, default=0)


def clock_steps(samples: Iterable[ClientSample]) -> tuple[tuple[float, float], ...]:
    """Each time that the wall clock was set during the load: seconds since the first look at it, and by how many.

    They are those of the process that noticed most.
    """
    offsets = [
        [sample.offset for sample in own if sample.offset is not None] for own in by_worker(samples).values()
    ]
    most = max(offsets, key=len, default=[])
    return tuple(
        (
            s_from_ns(after.t_ns - most[0].t_ns),
            s_from_ns(after.realtime_less_monotonic_ns - before.realtime_less_monotonic_ns),
        )
        for before, after in pairwise(most)
    )
