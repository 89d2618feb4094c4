"""Were the slots of a closed loop full? What stood empty while requests waited, the client kept from the server.

A slot is empty from the last byte of one answer, by the kernel's stamp, until the next request is handed to the
kernel. All of it is the client's: reading late, finding the next request, opening a connection. The server sees a
load of ``max_concurrency * (1 - idle)`` requests on average, and its throughput is lower by that share.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from benchctl.analysis.unknown import quotient
from benchctl.profile.model import Arrival
from benchctl.records.run import RequestRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotOccupancy:
    """How full the slots were, from when the load was due until its last request left."""

    num_slots: int
    idle_frac: float | None
    """Share of the time of all slots in which they were empty although a request waited; None for a load of one
    wave, which never fills a slot again."""
    gaps_ns: tuple[int, ...]
    """For each request that filled a slot, how long that had been empty."""
    connecting_ns: tuple[int, ...]
    """What of each gap went into opening its connection."""


def slot_occupancy(requests: Sequence[RequestRecord], arrival: Arrival) -> SlotOccupancy | None:
    """The slots of a closed loop without a launch rate limit; None for other loads.

    None as well where it was not recorded when slots became free, as in results of older versions.
    """
    slots = arrival.max_concurrency
    if arrival.kind not in {"closed-loop", "burst"} or slots is None or arrival.launch_rate_limit is not None:
        return None
    refills = [request for request in requests if request.slot_free_ns is not None]
    if not refills and len(requests) > slots:
        return None
    num_slots = min(slots, len(requests))
    sent = [request.sent_ns for request in requests if request.sent_ns is not None]
    gaps_ns = tuple(_left_ns(request) - (request.slot_free_ns or 0) for request in refills)
    first_ns = sum(_left_ns(request) - request.scheduled_ns for request in requests if request.slot_free_ns is None)
    span_ns = max(sent) - min(request.scheduled_ns for request in requests) if sent else 0
    return SlotOccupancy(
        num_slots=num_slots,
        idle_frac=quotient(first_ns + sum(gaps_ns), num_slots * span_ns) if refills else None,
        gaps_ns=gaps_ns,
        connecting_ns=tuple(_connecting_ns(request) for request in refills),
    )


def _left_ns(request: RequestRecord) -> int:
    """When it left; one that could not leave held its slot empty until it failed."""
    return next(t for t in (request.sent_ns, request.done_ns, request.scheduled_ns) if t is not None)


def _connecting_ns(request: RequestRecord) -> int:
    """How much of the time between slot and send passed until its connection was open."""
    opened_ns = min(request.connected_ns or 0, _left_ns(request))
    return max(opened_ns - (request.slot_free_ns or 0), 0)
