"""Slots of a closed loop that were empty while requests waited: load that the client kept from the server.

A slot is empty from the last byte of one answer, by the kernel's timestamp, until the next request is handed to the
kernel; this includes reading late, preparing the next request and opening a connection. The idle slots at a moment
are the empty ones, but at most as many as requests remain to be sent: slots that are empty in the tail of a load
are not idle. The server met ``num_slots * (1 - idle)`` requests at once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from benchctl.analysis.metrics.latency import percentiles, quotient
from benchctl.profile.model import Arrival
from benchctl.records.record import RequestRecord
from benchctl.records.schema import ResultWarning
from benchctl.units import NS_PER_S, milliseconds

MAX_IDLE_FRAC: Final = 0.01
"""A hundredth of the load: comparisons call no smaller change."""
MIN_LOAD_NS: Final = NS_PER_S
"""In a shorter load one hiccup of the machine is a hundredth."""


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
    if arrival.kind not in {"closed-loop", "burst"} or slots is None or arrival.launch_rate_limit is not None:
        return None
    refills = [request for request in requests if request.slot_free_ns is not None]
    if not requests or (not refills and len(requests) > slots):
        return None
    num_slots = min(slots, len(requests))
    idle_ns, slot_time_ns = _integrated(requests, num_slots)
    return SlotOccupancy(
        num_slots=num_slots,
        slot_time_ns=slot_time_ns,
        idle_ns=idle_ns,
        gaps_ns=tuple(_left_ns(request) - _due_ns(request) for request in refills),
        connecting_ns=tuple(
            max(min(request.connected_ns or 0, _left_ns(request)) - _due_ns(request), 0) for request in refills
        ),
    )


def _integrated(requests: Sequence[RequestRecord], num_slots: int) -> tuple[int, int]:
    """Idle time, and all time of slots, in ns, from the scheduled start of the load until its last request left.

    A request counts as open until it was read completely, which a late client does late; a slot that is free
    earlier by the kernel's timestamp counts as free. Slots without an assigned request, because one process of
    several has none left, show in the number of open requests.
    """
    begin_ns, end_ns = min(map(_due_ns, requests)), max(map(_left_ns, requests))
    # time, and changes of the requests that are open, that remain to be sent, whose own slot is known to be empty
    changes = [(begin_ns, 0, len(requests), 0), (end_ns, 0, 0, 0)]
    for request in requests:
        changes.append((_left_ns(request), 1, -1, 0 if request.slot_free_ns is None else -1))
        if request.slot_free_ns is not None:
            changes.append((request.slot_free_ns, 0, 0, 1))
        if request.done_ns is not None and request.done_ns < end_ns:
            changes.append((request.done_ns, -1, 0, 0))
    changes.sort()
    idle_ns = slot_time_ns = num_open = num_remaining = num_waiting = 0
    before_ns = changes[0][0]
    for t_ns, to_open, to_remaining, to_waiting in changes:
        idle_ns += (t_ns - before_ns) * min(num_remaining, max(num_waiting, num_slots - num_open))
        slot_time_ns += (t_ns - before_ns) * min(num_slots, num_open + num_remaining)
        before_ns = t_ns
        num_open += to_open
        num_remaining += to_remaining
        num_waiting += to_waiting
    return idle_ns, slot_time_ns


def _due_ns(request: RequestRecord) -> int:
    """Earliest possible send: when its slot was free, or the load due."""
    return request.scheduled_ns if request.slot_free_ns is None else request.slot_free_ns


def _left_ns(request: RequestRecord) -> int:
    """Time of the send; a request that was never sent held its slot until it failed, so it has no gap."""
    return _due_ns(request) if request.sent_ns is None else request.sent_ns


def idle_slots(occupancy: SlotOccupancy, load_ns: int) -> Iterator[ResultWarning]:
    """A warning if slots were empty for more than a hundredth of their time, however often."""
    idle_frac = occupancy.idle_frac
    if load_ns < MIN_LOAD_NS or idle_frac is None or idle_frac <= MAX_IDLE_FRAC:
        return
    tails = percentiles(occupancy.gaps_ns, len(occupancy.gaps_ns))
    gaps = [milliseconds(gap_ns) for gap_ns in (tails[50], tails[99], max(occupancy.gaps_ns))]
    connecting, num_connecting = occupancy.connecting_ns, sum(map(bool, occupancy.connecting_ns))
    remedy = "Free a core for the client, or lower the load"
    if 2 * num_connecting > len(connecting):
        remedy = (
            "The server closes connections, so a slot waits for a new one: let it keep them open, or free a core "
            "for the client"
        )
    yield ResultWarning(
        code="slots-idle",
        message=f"slots of the closed loop were empty for {idle_frac:.2%} of their time although requests waited "
        f"(more than {MAX_IDLE_FRAC:.0%}): the server met {occupancy.mean_open:.4g} of {occupancy.num_slots} "
        f"requests at once. From the last byte of an answer to the next request: {gaps[0]} ms (p50), "
        f"{gaps[1]} ms (p99) and {gaps[2]} ms (max); {num_connecting} of {len(connecting)} had to open "
        f"a connection, which took {sum(connecting) / max(sum(occupancy.gaps_ns), 1):.0%} of that time. "
        f"{remedy}",
    )
