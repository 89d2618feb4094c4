"""The figures of one load, read back from its run, with goodput counted as in ``vllm bench serve``."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from benchctl.analysis.metrics.client import OfferedLoad, offered_load
from benchctl.analysis.metrics.latency import (
    is_completed,
    latencies_ns,
    mean_of_known,
    measured,
    ms_or_none,
    quotient,
    send_lag_ns,
    standard_deviation,
)
from benchctl.errors import UsageError
from benchctl.profile.model import Arrival
from benchctl.records.loaded import LoadedRun
from benchctl.records.record import RequestRecord
from benchctl.units import ms_from_ns

_LIMITED: Final = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Requests that kept every limit, of all that were sent or should have been, failed ones included."""

    limits_ms: Mapping[str, float]
    num_good: int
    num_requests: int
    share: float | None
    request_goodput: float | None
    """Requests within the limits per second."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFigures:
    """The outcome of one load, without its warm-up. Tokens and durations are those of completed requests."""

    metrics: Mapping[str, float | None]
    """Those of its run; ``std_`` and ``max_`` of each latency and the mean ``send_lag_ms`` beside them."""
    num_requests: int
    num_completed: int
    errors: Mapping[str, int]
    """Failed requests by kind of error."""
    goodput: Goodput | None
    """Requests within the limits, where some were set."""
    offered: OfferedLoad | None


def load_figures(run: LoadedRun, arrival: Arrival, limits_ms: Mapping[str, float]) -> LoadFigures:
    """The figures of the load of ``run``; goodput counts the requests within ``limits_ms``."""
    from benchctl.analysis.metrics.run import run_metrics  # noqa: PLC0415 - numpy, after the load

    requests, metrics = measured(run.requests), run_metrics(run, arrival)
    completed = [request for request in requests if is_completed(request)]
    metrics["send_lag_ms"] = ms_or_none(mean_of_known(map(send_lag_ns, requests)))
    for latency, durations_ns in latencies_ns(completed).items():
        metrics[f"std_{latency}_ms"] = ms_or_none(standard_deviation(durations_ns))
        metrics[f"max_{latency}_ms"] = ms_or_none(max(durations_ns, default=None))
    goodput = None
    if limits_ms:
        num_good = sum(is_good(request, limits_ms) for request in requests)
        goodput = Goodput(
            limits_ms=limits_ms,
            num_good=num_good,
            num_requests=len(requests),
            share=quotient(num_good, len(requests)),
            request_goodput=quotient(num_good, metrics["wall_s"]),
        )
    return LoadFigures(
        metrics=metrics,
        num_requests=len(requests),
        num_completed=len(completed),
        errors=Counter(request.error.kind for request in requests if request.error is not None),
        goodput=goodput,
        offered=offered_load(requests, arrival),
    )
