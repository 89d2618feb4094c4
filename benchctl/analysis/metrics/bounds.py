"""Which latencies of a run rest on arrivals that are only known between bounds.

Where the client read several writes of the server at once, the older chunks arrived at most ``arrival_errors``
earlier than they say. Each percentile and mean is taken twice more, with every such duration as short and as long
as it can have been: between these two the true one lies. Where they are further from what the run says than a
comparison may be wrong, the metric rests on bounds: it is marked, and decides nothing. So it is the first tokens
that count for ``ttft``, however good the others are, and for a 99th percentile one in a hundred of them matters,
for a median every second. The last chunk of an answer is always the newest of its read: ``e2el``, wall time and
throughput never rest on bounds.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean
from typing import Final

import msgspec

from benchctl.analysis.metrics.arrival_errors import ChoiceErrors, arrival_errors
from benchctl.analysis.metrics.percentile import PERCENTS, percentiles
from benchctl.analysis.metrics.request_timing import is_completed, itls_ns, latencies_ns, measured
from benchctl.records.loaded import LoadedRun
from benchctl.records.record import ResultWarning
from benchctl.records.request import RequestRecord
from benchctl.records.samples import ClientSample
from benchctl.units import NS_PER_MS, ms_from_ns

TIMES_BOUNDED: Final = "times-bounded"
"""Code of the warning that names these metrics."""
MAX_SHIFT_FRAC: Final = 0.01
"""By this fraction of itself a metric may be wrong: the smallest change that a comparison is usually asked for
..."""
MIN_SHIFT_NS: Final = NS_PER_MS // 50
"""... or by this, to which a stamp of the kernel is right, if that is more."""
MARK: Final = "†"
"""Stands behind such a number in every table."""


def marked(text: str, rests_on_bounds: object) -> str:
    """A number with the mark where it rests on arrivals that are known only between bounds."""
    return f"{text} {MARK}" if rests_on_bounds else text


@dataclass(frozen=True, slots=True)
class Bounds:
    """Between which two values a metric lies, in ms of the client's clock."""

    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.low:.3g} to {self.high:.3g} ms"


@dataclass(frozen=True, slots=True)
class _Durations:
    """Durations of one kind in ns: as recorded, and as short and as long as each can have been."""

    said: Sequence[float]
    shortest: Sequence[float]
    longest: Sequence[float]


def run_bounds(run: LoadedRun) -> Mapping[str, Bounds]:
    """The metrics of a run that rest on bounds; none on a virtual clock, which keeps an account of its own."""
    if run.record.clock == "virtual":
        return {}
    requests = measured(run.requests)
    return metric_bounds(requests, requests, run.client)


def metric_bounds(
    first_tokens: Sequence[RequestRecord], requests: Sequence[RequestRecord], samples: Sequence[ClientSample]
) -> Mapping[str, Bounds]:
    """The same of a load of which only some ``requests`` were kept whole, and the ``first_tokens`` of all."""
    first = [request for request in first_tokens if is_completed(request)]
    first_errors = arrival_errors(first, samples)
    found: dict[str, Bounds] = {}
    if any(chain.from_iterable(first_errors)):
        found |= _bounds_of("ttft", _ttfts(first, first_errors), len(first))
    whole, errors = first, first_errors
    if requests is not first_tokens:
        whole = [request for request in requests if is_completed(request)]
        errors = arrival_errors(whole, samples)
    if any(chain.from_iterable(errors)):
        found |= _bounds_of("itl", _itls(whole, errors), len(first), _itl_means(whole, errors))
        found |= _bounds_of("tpot", _tpots(whole, errors), len(first))
    return found


def bounds_warnings(bounds: Mapping[str, Bounds]) -> tuple[ResultWarning, ...]:
    """What a reader must know of these metrics."""
    if not bounds:
        return ()
    told = "; ".join(f"{name} lies in {lies}" for name, lies in bounds.items())
    message = (
        "the client was late to read and found several writes of the server in one read, so that some arrivals are "
        f"only known between bounds: {told}. These metrics are marked with {MARK} and decide nothing; the others "
        "count. Free processors for the client"
    )
    return (ResultWarning(code=TIMES_BOUNDED, message=message),)


def _bounds_of(
    latency: str, durations: _Durations, num_independent: int, means: tuple[float, float] | None = None
) -> dict[str, Bounds]:
    """Of mean and percentiles of a latency, by the names of the metrics, those that rest on bounds."""
    sides = (durations.said, durations.shortest, durations.longest)
    if not durations.said or durations.shortest == durations.said == durations.longest:
        return {}
    said, shortest, longest = (percentiles(values, num_independent) for values in sides)
    ends = {
        f"p{percent}_{latency}_ms": (said[percent], shortest[percent], longest[percent]) for percent in PERCENTS
    }
    mean, low, high = map(fmean, sides)
    low, high = means or (low, high)
    ends[f"{latency}_ms"] = (mean, low, high)
    return {
        name: Bounds(ms_from_ns(low), ms_from_ns(high))
        for name, (value, low, high) in ends.items()
        if value is not None and low is not None and high is not None and _shifts(value, low, high)
    }


def _shifts(value: float, low: float, high: float) -> bool:
    return max(value - low, high - value) > max(MAX_SHIFT_FRAC * value, MIN_SHIFT_NS)


def _ttfts(requests: Sequence[RequestRecord], errors: Sequence[tuple[ChoiceErrors, ...]]) -> _Durations:
    """First tokens came as early as they can have come, or when they say."""
    said = latencies_ns(requests)["ttft"]
    return _Durations(said, latencies_ns(_with_earliest_firsts(requests, errors))["ttft"], said)


def _tpots(requests: Sequence[RequestRecord], errors: Sequence[tuple[ChoiceErrors, ...]]) -> _Durations:
    """The earlier the first token, the longer the others took; when the last came is known."""
    said = latencies_ns(requests)["tpot"]
    return _Durations(said, said, latencies_ns(_with_earliest_firsts(requests, errors))["tpot"])


def _itls(requests: Sequence[RequestRecord], errors: Sequence[tuple[ChoiceErrors, ...]]) -> _Durations:
    """A gap is longer where its first chunk came earlier than it says, and shorter where its second did."""
    said = list(chain.from_iterable(map(itls_ns, requests)))
    before: list[int] = []
    after: list[int] = []
    for request, of_request in zip(requests, errors, strict=True):
        for choice, of_choice in zip(request.choices, of_request, strict=True):
            error_ns = of_choice or (0,) * len(choice.chunk_ns)
            before += error_ns[:-1]
            after += error_ns[1:]
    return _Durations(
        said,
        [max(gap - error, 0) for gap, error in zip(said, after, strict=True)],
        [gap + error for gap, error in zip(said, before, strict=True)],
    )


def _itl_means(
    requests: Sequence[RequestRecord], errors: Sequence[tuple[ChoiceErrors, ...]]
) -> tuple[float, float]:
    """What one gap loses its neighbour gains: only when the first chunks of choices came moves the mean."""
    gaps = list(chain.from_iterable(map(itls_ns, requests)))
    first_errors = [of_choice[0] for of_request in errors for of_choice in of_request if of_choice]
    mean = fmean(gaps)
    return mean, mean + sum(first_errors) / len(gaps)


def _with_earliest_firsts(
    requests: Iterable[RequestRecord], errors: Sequence[tuple[ChoiceErrors, ...]]
) -> list[RequestRecord]:
    """The requests as they would be if every first chunk had come as early as it can have."""
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
