"""The figures of one load, read back from its run, with goodput counted as in ``vllm bench serve``."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from benchctl.analysis.metrics.latency import (
    is_completed,
    known_values,
    latencies_ns,
    measured,
    ms_or_none,
    percentiles,
    quotient,
    send_lag_ns,
    standard_deviation,
)
from benchctl.errors import UsageError
from benchctl.records.loaded import LoadedRun
from benchctl.records.record import RequestRecord
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


SEND_LAG: Final = "send_lag"


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """Statistics of durations of one kind, in ms; None without any, or of too few requests for a percentile."""

    mean: float | None
    std: float | None
    percentile: Mapping[int, float | None]
    largest: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFigures:
    """Totals and durations of one load, without its warm-up. Tokens and durations are those of completed requests.

    ``metrics`` are those of its run. ``durations`` has the latencies of vLLM by their names, and ``send_lag`` of
    all requests that were sent.
    """

    metrics: Mapping[str, float | None]
    num_requests: int
    num_completed: int
    errors: Mapping[str, int]
    """Failed requests by kind of error."""
    durations: Mapping[str, Durations]
    goodput: Goodput | None
    """Requests within the limits, where some were set."""

    @property
    def num_failed(self) -> int:
        return self.num_requests - self.num_completed

    @property
    def total_token_throughput(self) -> float | None:
        """Tokens of prompts and outputs per second."""
        prompt, output = self.metrics["prompt_tokens"], self.metrics["output_tokens"]
        return None if prompt is None or output is None else quotient(prompt + output, self.metrics["wall_s"])


def load_figures(
    run: LoadedRun, metrics: Mapping[str, float | None], limits_ms: Mapping[str, float]
) -> LoadFigures:
    """The figures of a load with the ``metrics`` of its run; goodput counts the requests within ``limits_ms``."""
    requests = measured(run.requests)
    completed = [request for request in requests if is_completed(request)]
    lags_ns = known_values(map(send_lag_ns, requests))
    durations = {name: _durations(values, len(completed)) for name, values in latencies_ns(completed).items()}
    goodput = None
    if limits_ms:
        goodput = Goodput(
            limits_ms=limits_ms,
            num_good=sum(is_good(request, limits_ms) for request in requests),
            num_requests=len(requests),
            wall_s=metrics["wall_s"],
        )
    return LoadFigures(
        metrics=metrics,
        num_requests=len(requests),
        num_completed=len(completed),
        errors=Counter(request.error.kind for request in requests if request.error is not None),
        durations=durations | {SEND_LAG: _durations(lags_ns, len(lags_ns))},
        goodput=goodput,
    )


def _durations(values_ns: Sequence[float], num_independent: int) -> Durations:
    tails = percentiles(values_ns, num_independent)
    return Durations(
        mean=ms_from_ns(fmean(values_ns)) if values_ns else None,
        std=ms_or_none(standard_deviation(values_ns)),
        percentile={percent: ms_or_none(value) for percent, value in tails.items()},
        largest=ms_from_ns(max(values_ns)) if values_ns else None,
    )
