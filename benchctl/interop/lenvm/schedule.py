"""When requests were sent, from how long each took: the LenVM client writes down no moments.

It is a closed loop: ``concurrency`` workers take questions in their order, each the next one as soon as it is free.
So the n-th question is sent when the first worker is free, and durations determine all moments but the first.
"""

import heapq
from collections.abc import Sequence


def sends_s(durations_s: Sequence[float], concurrency: int) -> tuple[float, ...]:
    """Seconds from the first send to that of each request, given how long each took, in the order of the queue."""
    free_at = [0.0] * max(1, concurrency)
    sent = []
    for duration_s in durations_s:
        now = heapq.heappop(free_at)
        sent.append(now)
        heapq.heappush(free_at, now + duration_s)
    return tuple(sent)


def makespan_s(durations_s: Sequence[float], concurrency: int) -> float:
    """From the first send to the last answer."""
    sent = sends_s(durations_s, concurrency)
    return max((start + duration for start, duration in zip(sent, durations_s, strict=True)), default=0.0)
