"""Goodput: the requests of a load that keep limits on their own latencies, counted as in ``vllm bench serve``.

The figures of one load in constant memory per request: durations of at most eight bytes each, and counts.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Final

from benchctl.analysis.metrics.latency import (
    SortedRuns,
    is_completed,
    last_token_ns,
    latencies_ns,
    ms_or_none,
    percentiles_of_sorted,
    quotient,
    send_lag_ns,
    standard_deviation,
)
from benchctl.analysis.metrics.table import LATENCIES
from benchctl.analysis.validity.answers import check_client_tokens
from benchctl.errors import UsageError
from benchctl.records.record import RequestRecord
from benchctl.units import ms_from_ns, s_from_ns

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

    ``durations`` has the latencies of vLLM by their names, and ``send_lag`` of all requests that were sent.
    """

    num_requests: int
    num_completed: int
    errors: Mapping[str, int]
    """Failed requests by kind of error."""
    wall_s: float | None
    prompt_tokens: int | None
    output_tokens: int | None
    cached_tokens: int | None
    durations: Mapping[str, Durations]
    kernel_stamp_frac: float | None
    """Share of all chunks with a kernel timestamp."""
    coalesced_chunk_frac: float | None
    """Share of all chunks whose time is an upper bound, because a newer chunk came in the same read."""
    goodput: Goodput | None = None
    """Requests within the limits, where some were set."""
    miscounted: tuple[str, ...]
    """Requests whose usage and arrived tokens differ."""

    def client_metrics(self) -> dict[str, float | None]:
        """The ``CLIENT_METRICS`` that follow from all requests."""
        lags = self.durations[SEND_LAG]
        return {
            "p50_send_lag_ms": lags.percentile[50],
            "p99_send_lag_ms": lags.percentile[99],
            "max_send_lag_ms": lags.largest,
            "kernel_stamp_frac": self.kernel_stamp_frac,
            "coalesced_chunk_frac": self.coalesced_chunk_frac,
        }

    @property
    def num_failed(self) -> int:
        return self.num_requests - self.num_completed

    @property
    def request_throughput(self) -> float | None:
        """Completed requests per second."""
        return quotient(self.num_completed, self.wall_s)

    @property
    def output_throughput(self) -> float | None:
        """Output tokens per second."""
        return quotient(self.output_tokens, self.wall_s)

    @property
    def total_token_throughput(self) -> float | None:
        """Tokens of prompts and outputs per second."""
        if self.prompt_tokens is None or self.output_tokens is None:
            return None
        return quotient(self.prompt_tokens + self.output_tokens, self.wall_s)


class LoadAccumulator:
    """Accumulates the figures of a load, record by record."""

    def __init__(self, limits_ms: Mapping[str, float] | None = None) -> None:
        self._limits_ms = limits_ms or {}
        self._num_good = 0
        self._durations_ns: dict[str, array[Any]] = {
            name: array("I" if name == "itl" else "d") for name in (*LATENCIES, SEND_LAG)
        }
        self._num_requests = self._num_completed = 0
        self._errors: Counter[str] = Counter()
        self._first_sent_ns: int | None = None
        self._last_output_ns: int | None = None
        self._tokens: dict[str, int | None] = {}
        self._num_stamped = self._num_chunks = self._num_bounds = 0
        self._miscounted: list[str] = []

    def add(self, record: RequestRecord) -> None:
        """Add ``record``, unless it belongs to the warm-up."""
        if record.is_warmup:
            return
        self._num_requests += 1
        if record.sent_ns is not None:
            self._first_sent_ns = min(record.sent_ns, self._first_sent_ns or record.sent_ns)
        last_ns = last_token_ns(record)
        if last_ns is not None:
            self._last_output_ns = max(last_ns, self._last_output_ns or last_ns)
        for choice in record.choices:
            num_chunks = len(choice.chunk_ns)
            self._num_chunks += num_chunks
            self._num_stamped += 0 if choice.chunk_late_ns is None else num_chunks
            self._num_bounds += num_chunks - len(set(choice.chunk_ns))
        lag_ns = send_lag_ns(record)
        if lag_ns is not None:
            self._durations_ns[SEND_LAG].append(lag_ns)
        if record.error is not None:
            self._errors[record.error.kind] += 1
        if self._limits_ms:
            self._num_good += is_good(record, self._limits_ms)
        if is_completed(record):
            self._add_completed(record)

    def _add_completed(self, record: RequestRecord) -> None:
        is_first = not self._num_completed
        self._num_completed += 1
        for name, durations_ns in latencies_ns((record,)).items():
            self._store(name, durations_ns)
        for name in ("prompt_tokens", "completion_tokens", "cached_tokens"):
            before, tokens = 0 if is_first else self._tokens[name], getattr(record, name)
            self._tokens[name] = None if before is None or tokens is None else before + tokens
        if check_client_tokens((record,)).ok is False:
            self._miscounted.append(record.request_id)

    def _store(self, name: str, durations_ns: Sequence[float]) -> None:
        stored = self._durations_ns[name]
        try:
            stored.extend(array(stored.typecode, durations_ns))
        except OverflowError:  # a gap of more than four seconds
            stored = self._durations_ns[name] = array("d", stored)
            stored.extend(array("d", durations_ns))

    def figures(self) -> LoadFigures:
        """The figures of the records so far."""
        first_ns, last_ns = self._first_sent_ns, self._last_output_ns
        wall_s = None if first_ns is None or last_ns is None else s_from_ns(last_ns - first_ns)
        return LoadFigures(
            num_requests=self._num_requests,
            num_completed=self._num_completed,
            errors=dict(self._errors),
            wall_s=wall_s,
            goodput=self._goodput(wall_s),
            prompt_tokens=self._tokens.get("prompt_tokens"),
            output_tokens=self._tokens.get("completion_tokens"),
            cached_tokens=self._tokens.get("cached_tokens"),
            durations={name: self._summary(name) for name in self._durations_ns},
            kernel_stamp_frac=quotient(self._num_stamped, self._num_chunks),
            coalesced_chunk_frac=quotient(self._num_bounds, self._num_chunks),
            miscounted=tuple(self._miscounted),
        )

    def _goodput(self, wall_s: float | None) -> Goodput | None:
        if not self._limits_ms:
            return None
        return Goodput(
            limits_ms=self._limits_ms, num_good=self._num_good, num_requests=self._num_requests, wall_s=wall_s
        )

    def _summary(self, name: str) -> Durations:
        values = self._durations_ns[name]
        num_independent = len(values) if name == SEND_LAG else self._num_completed
        ordered = SortedRuns(values)
        tails = percentiles_of_sorted(ordered, num_independent)
        return Durations(
            mean=ms_from_ns(fmean(values)) if values else None,
            std=ms_or_none(standard_deviation(values)),
            percentile={percent: ms_or_none(value) for percent, value in tails.items()},
            largest=ms_from_ns(ordered[-1]) if values else None,
        )
