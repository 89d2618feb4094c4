"""The processor time that a load will need at its client, estimated before it is sent, and its share of processes.

For an open loop it follows from the plan: requests per second times tokens of each. In a closed loop the server
sets the pace, which is unknown beforehand; each stream is then assumed to bring a token every ``TOKEN_S``, as from
a GPU that is not overloaded.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from benchctl.profile.arrival import Arrival
from benchctl.records.record import PreparedRequest
from benchctl.units import NS_PER_S

TOKEN_S: Final = 0.010
"""Seconds from one token of a stream to the next, where the server sets the pace."""
CPU_NS_PER_TOKEN: Final = 11_500
"""Processor time of the client for an event of one token, with 512 streams and a token every 10 ms, by
``docs/measurements/load-generator.md``."""

WORKER_CORES: Final = 0.5
"""Share of its core that ``auto`` lets a process use on average; the rest is for bursts of arrivals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSize:
    """Totals of all requests of a load."""

    num_requests: int
    num_outputs: int
    """Choices, of which a request may have several."""
    num_tokens: int
    """Output tokens; where answers end by themselves, the largest possible number."""
    last_arrival_ns: int = 0


def size_of(requests: Iterable[PreparedRequest]) -> LoadSize:
    """The totals of ``requests``, in one pass that keeps none of them."""
    num_requests = num_outputs = num_tokens = last_arrival_ns = 0
    for request in requests:
        num_requests += 1
        num_outputs += request.n
        num_tokens += request.n * request.max_tokens
        last_arrival_ns = max(last_arrival_ns, request.arrival_ns)
    return LoadSize(
        num_requests=num_requests, num_outputs=num_outputs, num_tokens=num_tokens, last_arrival_ns=last_arrival_ns
    )


def max_open(arrival: Arrival, size: LoadSize) -> int:
    """Requests that can be open at once."""
    return min(arrival.max_concurrency or size.num_requests, size.num_requests)


def expected_tokens_per_s(arrival: Arrival, size: LoadSize) -> float:
    """Tokens that arrive per second, on average over the load.

    The scale of a simulator's time is not counted: it is one process, which sends no faster than one of ours reads.
    """
    if not size.num_requests:
        return 0.0
    by_streams = max_open(arrival, size) * size.num_outputs / size.num_requests / TOKEN_S
    rate = _request_rate(arrival, size)
    return by_streams if rate is None else min(by_streams, rate * size.num_tokens / size.num_requests)


def _request_rate(arrival: Arrival, size: LoadSize) -> float | None:
    """Requests per second by the plan; None where answers pace them."""
    rates = [] if arrival.launch_rate_limit is None else [arrival.launch_rate_limit]
    if arrival.is_open_loop:
        if arrival.rate is not None:
            rates.append(arrival.rate)
        elif size.last_arrival_ns:
            rates.append(size.num_requests * NS_PER_S / size.last_arrival_ns)
    return min(rates, default=None)


def num_workers(option: Literal["auto"] | int, arrival: Arrival, size: LoadSize, num_cores: int) -> int:
    """Number of processes that send a load: at most one per slot or request, of which each worker needs one.

    ``auto`` is the number that keeps each below half a core, by the expected tokens per second, and leaves one of
    the cores free.
    """
    cores = expected_tokens_per_s(arrival, size) * CPU_NS_PER_TOKEN / NS_PER_S
    by_load = min(math.ceil(cores / WORKER_CORES), num_cores - 1)
    return max(1, min(by_load if option == "auto" else option, max_open(arrival, size)))


def num_processes(num_workers: int) -> int:
    """Processes of a whole load: several workers need one more that gathers their records."""
    return num_workers if num_workers == 1 else num_workers + 1


def shares(arrival: Arrival, count: int) -> tuple[Arrival, ...]:
    """The arrival of each of ``count`` workers: their slots and launch rates add up to those of ``arrival``."""
    slots, rate = arrival.max_concurrency, arrival.launch_rate_limit
    return tuple(
        arrival.model_copy(
            update={
                "max_concurrency": None if slots is None else slots // count + (i < slots % count),
                "launch_rate_limit": None if rate is None else rate / count,
            }
        )
        for i in range(count)
    )
