"""The load that reached the server: concurrent requests of a closed loop, or the rate of an open one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchctl.analysis.metrics.bounds import Bounds
from benchctl.analysis.metrics.client_sends import sends_of
from benchctl.analysis.metrics.slot_occupancy import SlotOccupancy, slot_occupancy
from benchctl.analysis.metrics.unknown import ms_or_none, quotient
from benchctl.profile.sections.workload import Arrival
from benchctl.records.request import RequestRecord


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
