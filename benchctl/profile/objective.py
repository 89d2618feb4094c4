"""Sections of a profile for the objective of requests and for capacities, with the metrics that rest on them."""

from typing import Annotated, Final

from pydantic import Field

from benchctl.profile.choices import Section

Milliseconds = Annotated[float, Field(gt=0, le=1e9)]
SLO_METRICS: Final = ("goodput", "slo_attained_frac", "slo_ratio")
"""Metrics that are known only of requests with an objective; each has a ``steady_`` form."""
CAPACITIES: Final = {"capacity_concurrency": "max_concurrency", "capacity_rate": "request_rate"}
"""Metrics of all loads of an arm, and the key of an arrival that each is the largest value of."""


class CapacitySearch(Section):
    """A pilot that finds the sizes of loads around the capacities, where ``sweep`` names none."""

    smallest: float = Field(default=4, gt=0, le=1e6)
    """Size of its first load, in requests at once or requests/s; each further one is twice as large."""
    largest: float = Field(default=256, gt=0, le=1e6)
    """Its loads are at most that large."""


class Slo(Section):
    """The objective of requests (SLO): limits of their latencies, and the share that must keep them."""

    ttft_ms: Milliseconds | None = None
    """Most milliseconds from its send to its first token; null: no limit."""
    tpot_ms: Milliseconds | None = None
    """Most milliseconds per output token after the first, of each of its choices; null: no limit. A request with
    one token keeps it."""
    e2el_ms: Milliseconds | None = None
    """Most milliseconds from its send to its last token; null: no limit."""
    share: float = Field(default=0.99, ge=0.5, le=0.999)
    """Share of the requests that must keep all limits. A request that failed keeps none."""

    @property
    def limits_ms(self) -> dict[str, float]:
        """The limits that are set, by latency."""
        limits = {"ttft": self.ttft_ms, "tpot": self.tpot_ms, "e2el": self.e2el_ms}
        return {name: limit for name, limit in limits.items() if limit is not None}
