"""The load generator's own account: delays of sends against the schedule, its slots, and its processes.

The part of each delay that the client caused, and the load that reached the server: concurrent requests of a closed
loop, or the rate of an open one.

Slots of a closed loop that were empty while requests waited are load that the client kept from the server. A slot
is empty from the last byte of one answer, by the kernel's timestamp, until the next request is handed to the
kernel; this includes reading late, preparing the next request and opening a connection. The idle slots at a moment
are the empty ones, but at most as many as requests remain to be sent: slots that are empty in the tail of a load
are not idle. The server met ``num_slots * (1 - idle)`` requests at once.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter
from typing import Final

import numpy as np

from benchctl.analysis.metrics.chunks import Chunks
from benchctl.analysis.metrics.latency import (
    known_values,
    ms_or_none,
    percentiles,
    quotient,
    send_lag_ns,
)
from benchctl.profile.arrival import Arrival
from benchctl.records.columns import Flags, Integers, exact_sum
from benchctl.records.record import RequestRecord
from benchctl.records.schema import ClientSample
from benchctl.units import NS_PER_MS, NS_PER_S, s_from_ns

_UNKNOWN_NS: Final = -1
MAX_SEND_LAG_NS: Final = 2 * NS_PER_MS
"""An event loop's timer fires up to 1 ms late, because it waits for whole milliseconds; another 1 ms is tolerated
for a busy processor."""


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
    is_planned, own_lag_ns = arrival.is_open_loop, []
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotOccupancy:
    """Occupancy of the slots, from the scheduled start of the load until its last request left."""

    num_slots: int
    slot_time_ns: int
    """Slot time in which a slot held a request, or could have held one."""
    idle_ns: int
    """The part of it in which slots were empty."""
    gaps_ns: tuple[int, ...]
    """Time for which each refilled slot had been empty."""
    connecting_ns: tuple[int, ...]
    """Part of each gap until the connection was open; 0 for a reused connection."""

    @property
    def idle_frac(self) -> float | None:
        """Idle share of slot time; None for a load of one wave, which refills no slot."""
        return quotient(self.idle_ns, self.slot_time_ns) if self.gaps_ns else None

    @property
    def mean_open(self) -> float | None:
        """Mean number of concurrent requests at the server while requests remained."""
        return None if self.idle_frac is None else self.num_slots * (1 - self.idle_frac)


def slot_occupancy(requests: Sequence[RequestRecord], arrival: Arrival) -> SlotOccupancy | None:
    """The slots of a closed loop without a launch rate limit; None for other loads.

    Also None in results of older versions, which do not record when slots became free.
    """
    slots = arrival.max_concurrency
    are_users = any(request.turn is not None for request in requests)  # who think while their slots are empty
    if arrival.is_open_loop or slots is None or arrival.launch_rate_limit is not None or are_users:
        return None
    has_slot_times = any(request.slot_free_ns is not None for request in requests)
    if not requests or (not has_slot_times and len(requests) > slots):
        return None
    scheduled_ns, free_ns, sent_ns, done_ns, connected_ns = (
        np.array([_UNKNOWN_NS if time_ns is None else time_ns for time_ns in map(attrgetter(name), requests)])
        for name in ("scheduled_ns", "slot_free_ns", "sent_ns", "done_ns", "connected_ns")
    )
    num_slots, is_refill = min(slots, len(requests)), free_ns != _UNKNOWN_NS
    # The earliest possible send: when its slot was free, or the load due
    due_ns = np.where(is_refill, free_ns, scheduled_ns)
    # A request that was never sent held its slot until it failed, so it has no gap
    left_ns = np.where(sent_ns == _UNKNOWN_NS, due_ns, sent_ns)
    idle_ns, slot_time_ns = _integrated(due_ns, left_ns, is_refill, done_ns, num_slots)
    connecting_ns = np.maximum(np.minimum(np.maximum(connected_ns, 0), left_ns) - due_ns, 0)
    return SlotOccupancy(
        num_slots=num_slots,
        slot_time_ns=slot_time_ns,
        idle_ns=idle_ns,
        gaps_ns=tuple((left_ns - due_ns)[is_refill].tolist()),
        connecting_ns=tuple(connecting_ns[is_refill].tolist()),
    )


def _integrated(
    due_ns: Integers, left_ns: Integers, is_refill: Flags, done_ns: Integers, num_slots: int
) -> tuple[int, int]:
    """Idle time, and all time of slots, in ns, from the scheduled start of the load until its last request left.

    A request counts as open until it was read completely, which a late client does late; a slot that is free
    earlier by the kernel's timestamp counts as free. Slots without an assigned request, because one process of
    several has none left, show in the number of open requests.
    """
    free_ns, done_ns = due_ns[is_refill], done_ns[(done_ns != _UNKNOWN_NS) & (done_ns < left_ns.max())]
    # Changes of the requests that are open, that remain to be sent, whose own slot is known to be empty
    t_ns = np.concatenate([[due_ns.min()], left_ns, free_ns, done_ns])
    order = np.argsort(t_ns)
    none_free, none_done = np.zeros_like(free_ns), np.zeros_like(done_ns)
    to_open = np.concatenate([[0], np.ones_like(left_ns), none_free, none_done - 1])
    to_remaining = np.concatenate([[len(left_ns)], -np.ones_like(left_ns), none_free, none_done])
    to_waiting = np.concatenate([[0], -is_refill.astype(np.int64), none_free + 1, none_done])
    num_open, num_remaining, num_waiting = (
        each[order].cumsum()[:-1] for each in (to_open, to_remaining, to_waiting)
    )
    spans_ns = np.diff(t_ns[order])
    num_idle = np.minimum(num_remaining, np.maximum(num_waiting, num_slots - num_open))
    num_usable = np.minimum(num_slots, num_open + num_remaining)
    return exact_sum(spans_ns, num_idle), exact_sum(spans_ns, num_usable)


def by_worker(samples: Iterable[ClientSample]) -> dict[int, list[ClientSample]]:
    """The samples of each process, in order of time."""
    samples_of: defaultdict[int, list[ClientSample]] = defaultdict(list)
    for sample in samples:
        samples_of[sample.worker].append(sample)
    return {worker: sorted(own, key=lambda sample: sample.t_ns) for worker, own in samples_of.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedLoad:
    """Planned load and the load that the server met, in ``unit``."""

    planned: float
    met: float
    unit: str


def offered_load(
    requests: Sequence[RequestRecord], arrival: Arrival, occupancy: SlotOccupancy | None
) -> OfferedLoad | None:
    """The load on the client's clock, by the occupancy of its slots if it has any; None if all requests are sent at
    one moment, or with a launch rate limit.
    """
    if occupancy is not None and occupancy.mean_open is not None:
        return OfferedLoad(planned=occupancy.num_slots, met=occupancy.mean_open, unit="requests at once")
    sends = sends_of(requests, arrival)
    if not sends.planned_rate or sends.sent_rate is None:
        return None
    return OfferedLoad(planned=sends.planned_rate, met=sends.sent_rate, unit="requests/s")


def client_metrics(
    chunks: Chunks,
    samples: Sequence[ClientSample],
    arrival: Arrival | None,
    sent: Sequence[RequestRecord] | None = None,
) -> dict[str, float | None]:
    """``CLIENT_METRICS``: the load generator itself, on its own clock; of the load only with its schedule.

    ``sent`` are the requests that had slots, where others than those of ``chunks`` had some.
    """
    requests = chunks.requests
    occupancy = None if arrival is None else slot_occupancy(sent or requests, arrival)
    offered = None if arrival is None else offered_load(requests, arrival, occupancy)
    lags = known_values(map(send_lag_ns, requests))
    late, num_chunks = chunks.late_ns[chunks.late_ns >= 0], len(chunks.t_ns)
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
        "coalesced_chunk_frac": quotient(chunks.num_simultaneous, num_chunks),
        "client_cpu_cores": sum(cores.values()) if cores else None,
    }


def busy_cores(samples: Iterable[ClientSample]) -> Mapping[int, float]:
    """Cores that each process of the load generator kept busy, by its number; at least a second of each."""
    return {
        worker: (own[-1].cpu_ns - own[0].cpu_ns) / span_ns
        for worker, own in by_worker(samples).items()
        # Processor time over a shorter span says little
        if (span_ns := own[-1].t_ns - own[0].t_ns) >= NS_PER_S
    }
