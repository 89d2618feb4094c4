"""Goodput: the requests of a load that keep limits on their own latencies, counted as in ``vllm bench serve``.

A request keeps its limits if it completed and each of its durations is at most the limit: ``ttft`` and ``e2el`` as
measured, ``tpot`` of each of its choices. One output token has no ``tpot``, which then keeps any limit.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from benchctl.analysis.metrics.request_timing import is_completed, latencies_ns
from benchctl.analysis.metrics.unknown import quotient
from benchctl.errors import UsageError
from benchctl.records.request import RequestRecord
from benchctl.units import ms_from_ns

_LIMITED: Final = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Requests that kept every limit, of all that were sent or should have been."""

    limits_ms: Mapping[str, float]
    num_good: int
    num_requests: int
    wall_s: float | None

    @property
    def share(self) -> float | None:
        """Requests within the limits over all requests, failed ones included."""
        return quotient(self.num_good, self.num_requests)

    @property
    def request_goodput(self) -> float | None:
        """Requests within the limits per second."""
        return quotient(self.num_good, self.wall_s)


def parse_limits(texts: Iterable[str]) -> dict[str, float]:
    """Limits in ms by name, from ``ttft:200``. Raises UsageError for another name or limit."""
    limits: dict[str, float] = {}
    for text in texts:
        name, _, limit = text.partition(":")
        if name not in _LIMITED:
            raise UsageError(
                f"--goodput {text}: expected {', '.join(_LIMITED)} with a limit in ms, such as ttft:200"
            )
        try:
            limits[name] = float(limit)
        except ValueError:
            raise UsageError(
                f"--goodput {text}: {limit!r} is not a number; write milliseconds: {name}:200"
            ) from None
        if not limits[name] > 0:
            raise UsageError(f"--goodput {text}: the limit must be above 0")
    return limits


def is_good(record: RequestRecord, limits_ms: Mapping[str, float]) -> bool:
    """True for a completed request whose every limited duration is known and within its limit."""
    if not is_completed(record):
        return False
    durations = latencies_ns((record,))
    return all(
        (durations[name] or name == "tpot") and all(ms_from_ns(value) <= limit for value in durations[name])
        for name, limit in limits_ms.items()
    )
