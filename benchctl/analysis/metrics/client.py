"""The load generator's own account: delays of sends against the schedule, and its processes.

The part of each delay that the client caused, and the load that reached the server: concurrent requests of a closed
loop, or the rate of an open one.
"""

import math
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from statistics import fmean
from typing import Final

from benchctl.analysis.metrics.latency import (
    known_values,
    ms_or_none,
    percentiles,
    pooled_itls_ns,
    quotient,
    send_lag_ns,
    smallest_sample,
)
from benchctl.analysis.metrics.slot_occupancy import MIN_LOAD_NS, slot_occupancy
from benchctl.profile.model import Arrival
from benchctl.records.record import RequestRecord
from benchctl.records.schema import ClientSample, ResultWarning
from benchctl.units import NS_PER_MS, NS_PER_S, NS_PER_US, milliseconds, ms_from_ns, s_from_ns

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
    """The sends of a load, with the part of each delay that the client caused: since its slot, or the connection
    under a cap that left no slot, was free. A launch rate limit explains every delay of planned requests.
    """
    left = sorted((r for r in requests if r.sent_ns is not None), key=lambda r: (r.scheduled_ns, r.index))
    is_planned, own_lag_ns = arrival.kind not in {"closed-loop", "burst"}, []
    has_slot_times = any(request.slot_free_ns is not None for request in left)
    is_capped = not has_slot_times and (not is_planned or _most_open(left) >= (arrival.max_concurrency or math.inf))
    for request in left:
        sent_ns = request.sent_ns or 0
        free_ns = request.slot_free_ns or 0
        if is_planned and arrival.launch_rate_limit is not None:
            free_ns = sent_ns
        elif is_capped:
            free_ns = request.connected_ns or (sent_ns if is_planned else 0)
        own_lag_ns.append(max(sent_ns - max(request.scheduled_ns, free_ns), 0))
    return Sends(
        requests=tuple(left),
        lag_ns=tuple((request.sent_ns or 0) - request.scheduled_ns for request in left),
        own_lag_ns=tuple(own_lag_ns),
        is_planned=is_planned,
    )


def _most_open(requests: Sequence[RequestRecord]) -> int:
    """The most requests that were open at once."""
    sent = [(request.sent_ns or 0, 1) for request in requests]
    ended = [(request.done_ns, -1) for request in requests if request.done_ns is not None]
    return max(accumulate(change for _, change in sorted(sent + ended)), default=0)


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
    limit = KOLMOGOROV_95 / math.sqrt(len(sends.requests) - 1)
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
    shares = sorted(-math.expm1(-s_from_ns(gap_ns) * rate_per_s) for gap_ns in gaps_ns)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedLoad:
    """Planned load and the load that the server met, in ``unit``."""

    planned: float
    met: float
    unit: str


def offered_load(requests: Sequence[RequestRecord], arrival: Arrival) -> OfferedLoad | None:
    """The load on the client's clock; None if all requests are sent at one moment, or with a launch rate limit."""
    occupancy, sends = slot_occupancy(requests, arrival), sends_of(requests, arrival)
    if occupancy is not None and occupancy.mean_open is not None:
        return OfferedLoad(planned=occupancy.num_slots, met=occupancy.mean_open, unit="requests at once")
    if not sends.planned_rate or sends.sent_rate is None:
        return None
    return OfferedLoad(planned=sends.planned_rate, met=sends.sent_rate, unit="requests/s")


def client_metrics(
    requests: Sequence[RequestRecord], samples: Sequence[ClientSample], arrival: Arrival | None
) -> dict[str, float | None]:
    """``CLIENT_METRICS``: the load generator itself, on its own clock; of the load only with its schedule."""
    occupancy = None if arrival is None else slot_occupancy(requests, arrival)
    offered = None if arrival is None else offered_load(requests, arrival)
    lags = known_values(map(send_lag_ns, requests))
    choices = [choice for request in requests for choice in request.choices]
    late = array("q", chain.from_iterable(choice.chunk_late_ns or () for choice in choices))
    num_chunks = sum(len(choice.chunk_ns) for choice in choices)
    gaps, connecting = (occupancy.gaps_ns, occupancy.connecting_ns) if occupancy else ((), ())
    lag, gap, connect, read = (percentiles(values, len(values)) for values in (lags, gaps, connecting, late))
    cores = busy_cores(samples)
    in_ns = {
        "p50_send_lag_ms": lag[50],
        "p99_send_lag_ms": lag[99],
        "max_send_lag_ms": max(lags, default=None),
        "p50_refill_gap_ms": gap[50],
        "p99_refill_gap_ms": gap[99],
        "p99_refill_connect_ms": connect[99],
        "p99_read_delay_ms": read[99],
        "max_loop_lag_ms": max((sample.loop_lag_ns for sample in samples), default=None),
    }
    return {
        **{name: ms_or_none(value) for name, value in in_ns.items()},
        "offered_load_frac": None if offered is None else quotient(offered.met, offered.planned),
        "slot_idle_frac": None if occupancy is None else occupancy.idle_frac,
        "kernel_stamp_frac": quotient(len(late), num_chunks),
        "coalesced_chunk_frac": quotient(pooled_itls_ns(requests).count(0), num_chunks),
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
