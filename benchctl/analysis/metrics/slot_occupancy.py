"""Were the slots of a closed loop full? What stood empty while requests waited, the client kept from the server.

A slot is empty from the last byte of one answer, by the kernel's stamp, until the next request is handed to the
kernel: reading late, finding the next request and opening a connection are all in it. At any moment there are as
many idle slots as stand empty, and no more than requests are still to be sent: what is empty in the tail of a load,
when nothing is left for it, is not idle. The server met ``num_slots * (1 - idle)`` requests at once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from benchctl.analysis.metrics.percentile import percentiles
from benchctl.analysis.metrics.unknown import quotient
from benchctl.formats import milliseconds
from benchctl.profile.workload import Arrival
from benchctl.records.record import ResultWarning
from benchctl.records.request import RequestRecord
from benchctl.units import NS_PER_S

MAX_IDLE_FRAC: Final = 0.01
"""A hundredth of the load kept from the server: what a comparison is asked to call is no smaller."""
MIN_LOAD_NS: Final = NS_PER_S
"""Of a shorter load one hiccup of the machine is a hundredth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotOccupancy:
    """How full the slots were, from when the load was due until its last request left."""

    num_slots: int
    slot_time_ns: int
    """Time of all slots in which they held a request, or one was there that they could have held."""
    idle_ns: int
    """The part of it in which they were empty."""
    gaps_ns: tuple[int, ...]
    """For each request that filled a slot again, how long that had been empty."""
    connecting_ns: tuple[int, ...]
    """What of each gap passed until its connection was open; 0 where a connection was used again."""

    @property
    def idle_frac(self) -> float | None:
        """Share of slot time that was idle; None for a load of one wave, which never fills a slot again."""
        return quotient(self.idle_ns, self.slot_time_ns) if self.gaps_ns else None

    @property
    def num_connecting(self) -> int:
        """Refills that had to wait for a connection."""
        return sum(connecting_ns > 0 for connecting_ns in self.connecting_ns)

    def gap_ns(self, percent: int) -> float | None:
        """A percentile of the gaps; None where too few were seen."""
        return percentiles(self.gaps_ns, len(self.gaps_ns), (percent,))[percent]

    def connecting_part_ns(self, percent: int) -> float | None:
        """A percentile of what went into opening connections; None where too few gaps were seen."""
        return percentiles(self.connecting_ns, len(self.connecting_ns), (percent,))[percent]

    @property
    def mean_open(self) -> float | None:
        """Requests that the server met at once on average, while more were to come."""
        return None if self.idle_frac is None else self.num_slots * (1 - self.idle_frac)


def slot_occupancy(requests: Sequence[RequestRecord], arrival: Arrival) -> SlotOccupancy | None:
    """The slots of a closed loop without a launch rate limit; None for other loads.

    None as well where it was not recorded when slots became free, as in results of older versions.
    """
    slots = arrival.max_concurrency
    if arrival.kind not in {"closed-loop", "burst"} or slots is None or arrival.launch_rate_limit is not None:
        return None
    refills = [request for request in requests if request.slot_free_ns is not None]
    if not requests or (not refills and len(requests) > slots):
        return None
    num_slots = min(slots, len(requests))
    idle_ns, slot_time_ns = _integrated(_changes(requests), num_slots)
    return SlotOccupancy(
        num_slots=num_slots,
        slot_time_ns=slot_time_ns,
        idle_ns=idle_ns,
        gaps_ns=tuple(_left_ns(request) - _due_ns(request) for request in refills),
        connecting_ns=tuple(_connecting_ns(request) for request in refills),
    )


class _Change(NamedTuple):
    """What changes at one moment, in requests."""

    t_ns: int
    to_open: int = 0
    to_remaining: int = 0
    """Still to be sent."""
    to_waiting: int = 0
    """With an empty slot that is known to be theirs."""


def _changes(requests: Sequence[RequestRecord]) -> list[_Change]:
    """Everything that happened to the slots, from when the load was due until its last request left."""
    begin_ns, end_ns = min(map(_due_ns, requests)), max(map(_left_ns, requests))
    found = [_Change(begin_ns, to_remaining=len(requests)), _Change(end_ns)]
    for request in requests:
        left_ns = _left_ns(request)
        found.append(_Change(left_ns, 1, -1, 0 if request.slot_free_ns is None else -1))
        if request.slot_free_ns is not None:
            found.append(_Change(request.slot_free_ns, to_waiting=1))
        if request.done_ns is not None and request.done_ns < end_ns:
            found.append(_Change(request.done_ns, to_open=-1))
    return sorted(found)


def _integrated(changes: Sequence[_Change], num_slots: int) -> tuple[int, int]:
    """Idle time, and all time of slots, in ns.

    A request counts as open until it was read to its end, which a late client does late: where a slot is known to
    be free earlier, by the kernel's stamp, that counts. What no request was meant for, as when one process of
    several has none left, shows in the number that is open.
    """
    idle_ns = slot_time_ns = 0
    num_open = num_remaining = num_waiting = 0
    before_ns = changes[0].t_ns
    for change in changes:
        elapsed_ns = change.t_ns - before_ns
        idle = min(num_remaining, max(num_waiting, num_slots - num_open))
        idle_ns += elapsed_ns * idle
        slot_time_ns += elapsed_ns * min(num_slots, num_open + num_remaining)
        before_ns = change.t_ns
        num_open += change.to_open
        num_remaining += change.to_remaining
        num_waiting += change.to_waiting
    return idle_ns, slot_time_ns


def _due_ns(request: RequestRecord) -> int:
    """When it could have left: when its slot was free, or the load due."""
    return request.scheduled_ns if request.slot_free_ns is None else request.slot_free_ns


def _left_ns(request: RequestRecord) -> int:
    """When it left; one that never did held its slot until it failed, which is not the client's doing."""
    return _due_ns(request) if request.sent_ns is None else request.sent_ns


def _connecting_ns(request: RequestRecord) -> int:
    """How much of the time between slot and send passed until its connection was open."""
    return max(min(request.connected_ns or 0, _left_ns(request)) - _due_ns(request), 0)


def idle_slots(occupancy: SlotOccupancy, load_ns: int) -> Iterator[ResultWarning]:
    """Slots that stood empty for more than a hundredth of their time; it counts how long, and not how often."""
    idle_frac = occupancy.idle_frac
    if load_ns < MIN_LOAD_NS or idle_frac is None or idle_frac <= MAX_IDLE_FRAC:
        return
    gaps = [
        milliseconds(occupancy.gap_ns(50)),
        milliseconds(occupancy.gap_ns(99)),
        milliseconds(max(occupancy.gaps_ns)),
    ]
    connecting = occupancy.connecting_ns
    yield ResultWarning(
        code="slots-idle",
        message=f"slots of the closed loop stood empty for {idle_frac:.2%} of their time although requests waited "
        f"(more than {MAX_IDLE_FRAC:.0%}): the server met {occupancy.mean_open:.4g} of {occupancy.num_slots} "
        f"requests at once. From the last byte of an answer to the next request took {gaps[0]} ms (p50), "
        f"{gaps[1]} ms (p99) and {gaps[2]} ms (max); {occupancy.num_connecting} of {len(connecting)} had to open "
        f"a connection, which took {sum(connecting) / max(sum(occupancy.gaps_ns), 1):.0%} of that time. "
        f"{_remedy(occupancy)}",
    )


def _remedy(occupancy: SlotOccupancy) -> str:
    if 2 * occupancy.num_connecting > len(occupancy.connecting_ns):
        return (
            "The server closes connections, so that a slot waits for a new one: let it keep them open, or free a "
            "core for the client"
        )
    return "Free a core for the client, or lower the load"
