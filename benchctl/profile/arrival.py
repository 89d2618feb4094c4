"""Arrival processes: when each request is sent, as offsets in nanoseconds from the start of the load.

``RATED`` is the table of the processes that follow a rate. A new one is a function beside the others and a line of
the table, with keys of its own in ``Arrival``: the profile, the load, the simulator, capacity, the comparison and
the files for other tools know it from there.

Pure functions of a random stream. Offsets are sums of gaps, and the first request comes after the first gap, as in
``vllm bench serve``. That tool then stretches the whole schedule so that the last request falls on num_requests /
rate; this is not done here, because a longer request set would then shift the requests it shares with a shorter
one. Gaps are rounded to whole nanoseconds before they are added, so that the last bit of a machine's logarithm does
not reach the schedule.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate, count, islice
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from pydantic import model_validator

from benchctl.profile.choices import Concurrency, Factor, Rate, Section, check_rules
from benchctl.units import NS_PER_S, ns_from_s


def constant_offsets_ns(rate_per_s: float) -> Iterator[int]:
    """(i + 1) / rate for i = 0, 1, …: the limit of ``gamma_gaps_ns`` as burstiness grows; never drifts."""
    return (round(number * NS_PER_S / rate_per_s) for number in count(1))


def gamma_gaps_ns(rate_per_s: float, burstiness: float, stream: random.Random) -> Iterator[int]:
    """Gaps between arrivals, Gamma(shape = burstiness, scale = 1 / (rate x burstiness)), without end.

    Mean 1 / rate; coefficient of variation 1 / sqrt(burstiness). Burstiness 1 is a Poisson process, below 1 is
    burstier, above 1 more regular: the definition of ``--burstiness`` in ``vllm bench serve``.
    """
    scale_s = 1 / (rate_per_s * burstiness)
    while True:
        yield ns_from_s(stream.gammavariate(burstiness, scale_s))


Offsets: TypeAlias = "Callable[[Arrival, float, random.Random], Iterator[int]]"
"""Offsets without end that never decrease, of a process with these keys and this rate per second."""

RATED: Final[Mapping[str, Offsets]] = {
    "constant": lambda _arrival, rate, _stream: constant_offsets_ns(rate),
    "poisson": lambda _arrival, rate, stream: accumulate(gamma_gaps_ns(rate, 1.0, stream)),
    "gamma": lambda arrival, rate, stream: accumulate(gamma_gaps_ns(rate, arrival.burstiness, stream)),
}
"""The processes that send at ``request_rate`` whatever the server does, by the name that a profile gives them."""

if TYPE_CHECKING:
    ArrivalKind: TypeAlias = str
else:  # the same names for pydantic, which lists them in its errors
    ArrivalKind = Literal[("closed-loop", "burst", *RATED, "trace")]


class Arrival(Section):
    """The schedule of the requests: a closed loop, or precomputed times whatever the server does."""

    kind: ArrivalKind = "closed-loop"
    """``closed-loop`` sends when a slot frees, ``burst`` all at once, ``trace`` at recorded times, the others at a
    rate."""
    max_concurrency: Concurrency | None = None
    """Requests open at the same time; needed by ``closed-loop``, a cap for the others."""
    request_rate: Rate | None = None
    """Requests per second, on the engine's clock; needed by the kinds that send at a rate."""
    burstiness: Factor = 1.0
    """Shape of ``gamma``, as vLLM defines it: 1 is Poisson, below 1 burstier."""
    speedup: Factor = 1.0
    """Divides the recorded times of ``trace``."""
    launch_rate_limit: Rate | None = None
    """Requests per second at which sends are throttled, whatever the schedule says."""

    @property
    def rate(self) -> float | None:
        """Requests per second of a kind that sends at a rate, None for the others."""
        return self.request_rate if self.kind in RATED else None

    @property
    def is_open_loop(self) -> bool:
        """True if each request has a planned time, whatever the server does."""
        return self.kind in RATED or self.kind == "trace"

    @model_validator(mode="after")
    def _complete(self) -> "Arrival":
        check_rules(
            (
                self.kind == "closed-loop" and self.max_concurrency is None,
                "kind closed-loop needs max_concurrency",
            ),
            (self.kind in RATED and self.request_rate is None, f"kind {self.kind} needs request_rate"),
        )
        return self


def arrival_offsets_ns(arrival: Arrival, num_requests: int, stream: random.Random) -> tuple[int, ...]:
    """Offsets of ``num_requests`` requests; ``trace`` needs ``trace_offsets_ns`` instead.

    A closed loop and a burst release all at 0. Laws: never decreasing; more requests extend the same schedule.
    """
    if arrival.rate is None:
        return (0,) * num_requests
    return tuple(islice(RATED[arrival.kind](arrival, arrival.rate, stream), num_requests))


def trace_offsets_ns(recorded_ns: Iterable[int], speedup: float) -> tuple[int, ...]:
    """Recorded arrivals played ``speedup`` times as fast, in order of time."""
    return tuple(round(offset_ns / speedup) for offset_ns in sorted(recorded_ns))


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
