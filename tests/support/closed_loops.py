"""Closed loops written by hand: every answer takes its time, and every slot waits as long as it is told to."""

import heapq
from collections.abc import Callable, Sequence

from benchctl.profile.arrival import Arrival
from benchctl.records.record import RequestRecord
from benchctl.units import NS_PER_MS, NS_PER_S

T0_NS = 50 * NS_PER_S


def closed(num_slots: int) -> Arrival:
    return Arrival(kind="closed-loop", max_concurrency=num_slots)


def closed_loop(
    lasts_ms: Sequence[float],
    num_slots: int,
    gap_ms: Callable[[int], float] | float = 0.0,
    *,
    connecting_ms: float = 0.0,
    read_late_ms: float = 0.0,
    t0_ns: int = T0_NS,
) -> list[RequestRecord]:
    """One request for each duration; the i-th leaves ``gap_ms(i)`` after the slot that it takes became free.

    ``connecting_ms`` of that is spent on its connection; ends are read ``read_late_ms`` after they came.
    """
    gap_of = gap_ms if callable(gap_ms) else lambda _: gap_ms
    free_ns: list[int] = []
    records = []
    for index, lasts in enumerate(lasts_ms):
        slot_free_ns = heapq.heappop(free_ns) if index >= num_slots else None
        due_ns = t0_ns if slot_free_ns is None else slot_free_ns
        sent_ns = due_ns + (round(gap_of(index) * NS_PER_MS) if slot_free_ns is not None else 0)
        end_ns = sent_ns + round(lasts * NS_PER_MS)
        heapq.heappush(free_ns, end_ns)
        records.append(
            RequestRecord(
                request_id=f"r{index}",
                index=index,
                scheduled_ns=due_ns,
                slot_free_ns=slot_free_ns,
                connected_ns=due_ns + round(connecting_ms * NS_PER_MS) if connecting_ms else t0_ns - NS_PER_MS,
                sent_ns=sent_ns,
                done_ns=end_ns + round(read_late_ms * NS_PER_MS),
            )
        )
    return records
