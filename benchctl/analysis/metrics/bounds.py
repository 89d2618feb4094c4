"""Bounds of latencies whose arrival times are uncertain.

The load that reached the server: concurrent requests of a closed loop, or the rate of an open one.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, groupby, pairwise
from statistics import fmean
from typing import Final, TypeAlias

import msgspec

from benchctl.analysis.metrics.client import ChoiceErrors, arrival_errors, sends_of
from benchctl.analysis.metrics.latency import (
    PERCENTS,
    is_completed,
    itls_ns,
    latencies_ns,
    measured,
    ms_or_none,
    percentiles,
    quotient,
)
from benchctl.analysis.metrics.slot_occupancy import SlotOccupancy, slot_occupancy
from benchctl.profile.model import Arrival
from benchctl.records.loaded import LoadedRun
from benchctl.records.record import RequestRecord
from benchctl.records.schema import ClientSample, ResultWarning
from benchctl.units import NS_PER_MS, ms_from_ns

TIMES_BOUNDED: Final = "times-bounded"
"""Code of the warning that names these metrics."""
MAX_SHIFT_FRAC: Final = 0.01
"""Tolerated error as a fraction of the metric: the smallest change that comparisons usually call ..."""
MIN_SHIFT_NS: Final = NS_PER_MS // 50
"""... or this, the accuracy of a kernel timestamp, whichever is larger."""
MARK: Final = "†"
"""Follows such a number in every table."""


def marked(text: str, rests_on_bounds: object) -> str:
    """Append the mark to a number that has bounds."""
    return f"{text} {MARK}" if rests_on_bounds else text


@dataclass(frozen=True, slots=True)
class Bounds:
    """Lowest and highest possible value of a metric, in ms of the client's clock."""

    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.low:.3g} to {self.high:.3g} ms"


_Durations: TypeAlias = tuple[Sequence[float], Sequence[float], Sequence[float]]
"""Durations of one kind in ns: as recorded, and the shortest and longest possible."""


def run_bounds(run: LoadedRun) -> Mapping[str, Bounds]:
    """The metrics of a run that have bounds; on the virtual clock of a server only those of gaps between chunks."""
    if run.record.is_simulated:
        return {}
    requests = measured(run.requests)
    if run.record.clock == "virtual":
        return _bounds_of_writes([itls_ns(request) for request in requests if is_completed(request)])
    return metric_bounds(requests, run.client)


def metric_bounds(requests: Sequence[RequestRecord], samples: Sequence[ClientSample]) -> Mapping[str, Bounds]:
    """``run_bounds`` of a load without its warm-up."""
    completed = [request for request in requests if is_completed(request)]
    errors = arrival_errors(completed, samples)
    if not any(chain.from_iterable(errors)):
        return {}
    recorded = latencies_ns(completed)
    # the earlier the first token, the longer the others took
    earliest = latencies_ns(_with_earliest_firsts(completed, errors))
    ttft = (recorded["ttft"], earliest["ttft"], recorded["ttft"])
    tpot = (recorded["tpot"], recorded["tpot"], earliest["tpot"])
    return {
        **_bounds_of("ttft", ttft, len(completed)),
        **_bounds_of("itl", _itls(completed, errors), len(completed), _itl_means(completed, errors)),
        **_bounds_of("tpot", tpot, len(completed)),
    }


def bounds_warnings(bounds: Mapping[str, Bounds]) -> tuple[ResultWarning, ...]:
    """The warning that names these metrics and their bounds; none without any."""
    if not bounds:
        return ()
    intervals = "; ".join(f"{name} lies in {interval}" for name, interval in bounds.items())
    message = (
        "the client read several server writes at once, so some arrival times are known between bounds only: "
        f"{intervals}. These metrics are marked with {MARK} and decide nothing; the others count. Free processors "
        "for the client"
    )
    return (ResultWarning(code=TIMES_BOUNDED, message=message),)


def _bounds_of(
    latency: str, durations: _Durations, num_independent: int, means: tuple[float, float] | None = None
) -> dict[str, Bounds]:
    """The mean and percentiles of a latency that have bounds, by metric name."""
    if not durations[0] or durations[1] == durations[0] == durations[2]:
        return {}
    recorded, shortest, longest = (percentiles(values, num_independent) for values in durations)
    ends = {
        f"p{percent}_{latency}_ms": (recorded[percent], shortest[percent], longest[percent]) for percent in PERCENTS
    }
    mean, low, high = map(fmean, durations)
    low, high = means or (low, high)
    ends[f"{latency}_ms"] = (mean, low, high)
    return {
        name: Bounds(ms_from_ns(low), ms_from_ns(high))
        for name, (value, low, high) in ends.items()
        if value is not None
        and low is not None
        and high is not None
        and max(value - low, high - value) > max(MAX_SHIFT_FRAC * value, MIN_SHIFT_NS)
    }


def _bounds_of_writes(gaps_ns: Sequence[Sequence[int]]) -> dict[str, Bounds]:
    """Bounds of ``itl`` where a simulator that fell behind wrote tokens together; no read was late.

    The gaps of a write, of which all but the first are 0, are taken as recorded and as equal, with the same mean.
    """
    recorded, evened = (sorted(chain.from_iterable(gaps)) for gaps in (gaps_ns, map(_evened, gaps_ns)))
    sides = (list(map(min, recorded, evened)), list(map(max, recorded, evened)))
    mean_ns = fmean(recorded or [0])
    return _bounds_of("itl", (recorded, *sides), len(gaps_ns), (mean_ns, mean_ns))


def _evened(gaps_ns: Sequence[int]) -> list[float]:
    """The gaps of one answer with those of each write equal."""
    writes = [(time_ns, len(list(chunks))) for time_ns, chunks in groupby(accumulate(gaps_ns))]
    return [
        (time_ns - before_ns) / size
        for (before_ns, _), (time_ns, size) in pairwise([(0, 0), *writes])
        for _ in range(size)
    ]


def _itls(requests: Sequence[RequestRecord], errors: Sequence[tuple[ChoiceErrors, ...]]) -> _Durations:
    """A gap is longer if its first chunk came earlier than recorded, and shorter if its second did."""
    recorded = list(chain.from_iterable(map(itls_ns, requests)))
    before: list[int] = []
    after: list[int] = []
    for request, of_request in zip(requests, errors, strict=True):
        for choice, of_choice in zip(request.choices, of_request, strict=True):
            error_ns = of_choice or (0,) * len(choice.chunk_ns)
            before += error_ns[:-1]
            after += error_ns[1:]
    return (
        recorded,
        [max(gap - error, 0) for gap, error in zip(recorded, after, strict=True)],
        [gap + error for gap, error in zip(recorded, before, strict=True)],
    )


def _itl_means(
    requests: Sequence[RequestRecord], errors: Sequence[tuple[ChoiceErrors, ...]]
) -> tuple[float, float]:
    """Bounds of the mean gap: only errors of the first chunks move it, because neighbouring gaps compensate."""
    gaps = list(chain.from_iterable(map(itls_ns, requests)))
    first_errors = [of_choice[0] for of_request in errors for of_choice in of_request if of_choice]
    return fmean(gaps), fmean(gaps) + sum(first_errors) / len(gaps)


def _with_earliest_firsts(
    requests: Iterable[RequestRecord], errors: Sequence[tuple[ChoiceErrors, ...]]
) -> list[RequestRecord]:
    """The requests with every first chunk at its earliest possible arrival."""
    return [
        msgspec.structs.replace(
            request,
            choices=tuple(
                msgspec.structs.replace(choice, chunk_ns=(choice.chunk_ns[0] - of_choice[0], *choice.chunk_ns[1:]))
                if of_choice
                else choice
                for choice, of_choice in zip(request.choices, of_request, strict=True)
            ),
        )
        if any(of_request)
        else request
        for request, of_request in zip(requests, errors, strict=True)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedLoad:
    """Planned load and the load that the server met, in ``unit``."""

    planned: float
    met: float
    unit: str

    @property
    def frac(self) -> float | None:
        return quotient(self.met, self.planned)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientQuality:
    """Quality of the load: the client's own metrics, the offered load, and metrics with bounds."""

    metrics: Mapping[str, float | None]
    """``CLIENT_METRICS``."""
    offered: OfferedLoad | None
    bounds: Mapping[str, Bounds]
    """Latencies that are known between bounds only."""


def offered_load(requests: Sequence[RequestRecord], arrival: Arrival) -> OfferedLoad | None:
    """The load on the client's clock; None if all requests are sent at one moment, or with a launch rate limit."""
    return _offered(requests, arrival, slot_occupancy(requests, arrival))


def _offered(
    requests: Sequence[RequestRecord], arrival: Arrival, occupancy: SlotOccupancy | None
) -> OfferedLoad | None:
    if occupancy is not None and occupancy.mean_open is not None:
        return OfferedLoad(planned=occupancy.num_slots, met=occupancy.mean_open, unit="requests at once")
    sends = sends_of(requests, arrival)
    if not sends.planned_rate or sends.sent_rate is None:
        return None
    return OfferedLoad(planned=sends.planned_rate, met=sends.sent_rate, unit="requests/s")


def load_metrics(requests: Sequence[RequestRecord], arrival: Arrival | None) -> dict[str, float | None]:
    """Metrics of offered load and slots, on the client's clock; unknown without the schedule."""
    occupancy = None if arrival is None else slot_occupancy(requests, arrival)
    offered = None if arrival is None else _offered(requests, arrival, occupancy)
    return {
        "offered_load_frac": None if offered is None else offered.frac,
        "slot_idle_frac": None if occupancy is None else occupancy.idle_frac,
        "p50_refill_gap_ms": None if occupancy is None else ms_or_none(occupancy.gap_ns(50)),
        "p99_refill_gap_ms": None if occupancy is None else ms_or_none(occupancy.gap_ns(99)),
        "p99_refill_connect_ms": None if occupancy is None else ms_or_none(occupancy.connecting_part_ns(99)),
    }
