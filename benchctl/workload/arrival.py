"""Arrival schedules: when each request is sent, as offsets in nanoseconds from the start of the load.

Pure functions of the seed. Open-loop offsets are sums of gaps, and the first request comes after the first gap,
as in ``vllm bench serve``. That tool then stretches the whole schedule so that the last request falls on
num_requests / rate; this is not done here, because a longer request set would then shift the requests it shares
with a shorter one. Gaps are rounded to whole nanoseconds before they are added, so that the last bit of a
machine's logarithm does not reach the schedule.
"""

import random
from collections.abc import Iterable, Iterator
from itertools import accumulate, islice

from benchctl.profile.model import Arrival
from benchctl.units import NS_PER_S, ns_from_s
from benchctl.workload.seeded import named_stream


def arrival_offsets_ns(arrival: Arrival, num_requests: int, seed: int) -> tuple[int, ...]:
    """Offsets of ``num_requests`` requests; ``trace`` needs ``trace_offsets_ns`` instead.

    A closed loop and a burst release all at 0. Laws: never decreasing; more requests extend the same schedule.
    """
    rate = arrival.request_rate
    if rate is None or arrival.kind in {"closed-loop", "burst"}:
        return (0,) * num_requests
    if arrival.kind == "constant":
        return constant_offsets_ns(rate, num_requests)
    burstiness = arrival.burstiness if arrival.kind == "gamma" else 1.0
    gaps = gamma_gaps_ns(rate, burstiness, named_stream(seed, "arrival"))
    return tuple(accumulate(islice(gaps, num_requests)))


def launch_offsets_ns(offsets_ns: Iterable[int], limit_per_s: float | None) -> tuple[int, ...]:
    """Offsets of the launches of requests that arrive at ``offsets_ns``, at most ``limit_per_s`` per second: in
    their order, each at least 1 / ``limit_per_s`` after the one before.
    """
    if limit_per_s is None:
        return tuple(offsets_ns)
    launches, earliest_ns = [], 0.0
    for offset_ns in offsets_ns:
        launch_ns = max(offset_ns, earliest_ns)
        launches.append(round(launch_ns))
        earliest_ns = launch_ns + NS_PER_S / limit_per_s
    return tuple(launches)


def constant_offsets_ns(rate_per_s: float, num_requests: int) -> tuple[int, ...]:
    """(i + 1) / rate for i = 0, 1, …: the limit of ``gamma_gaps_ns`` as burstiness grows; never drifts."""
    return tuple(round((i + 1) * NS_PER_S / rate_per_s) for i in range(num_requests))


def gamma_gaps_ns(rate_per_s: float, burstiness: float, stream: random.Random) -> Iterator[int]:
    """Gaps between arrivals, Gamma(shape = burstiness, scale = 1 / (rate x burstiness)), without end.

    Mean 1 / rate; coefficient of variation 1 / sqrt(burstiness). Burstiness 1 is a Poisson process, below 1 is
    burstier, above 1 more regular: the definition of ``--burstiness`` in ``vllm bench serve``.
    """
    scale_s = 1 / (rate_per_s * burstiness)
    while True:
        yield ns_from_s(stream.gammavariate(burstiness, scale_s))


def trace_offsets_ns(recorded_ns: Iterable[int], speedup: float) -> tuple[int, ...]:
    """Recorded arrivals played ``speedup`` times as fast, in order of time."""
    return tuple(round(offset_ns / speedup) for offset_ns in sorted(recorded_ns))
