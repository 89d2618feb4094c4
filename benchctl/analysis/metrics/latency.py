"""Arithmetic with values that may be unknown (None): a result with an unknown part is unknown, never smaller.

Percentiles, and the number of independent values that a tail percentile needs before it is shown.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from statistics import fmean
from typing import TYPE_CHECKING, Final, TypeVar

from benchctl.records.record import ChoiceRecord, RequestRecord
from benchctl.records.schema import StepRecord
from benchctl.units import ms_from_ns

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from benchctl.records.loaded import LoadedRun

N = TypeVar("N", int, float)


def known_values(values: Iterable[N | None]) -> list[N]:
    """The values that are not None."""
    return [value for value in values if value is not None]


def total(values: Sequence[N | None]) -> N | None:
    """The sum; unknown if there are no values or any is unknown."""
    parts = known_values(values)
    return sum(parts) if parts and len(parts) == len(values) else None


def mean_of_known(values: Iterable[float | None]) -> float | None:
    """The mean of the values that are known."""
    parts = known_values(values)
    return fmean(parts) if parts else None


def ms_or_none(duration_ns: float | None, factor: float = 1.0) -> float | None:
    """A duration in ms, multiplied by ``factor``; unknown if it is unknown."""
    return None if duration_ns is None else ms_from_ns(duration_ns * factor)


def quotient(numerator: float | None, denominator: float | None) -> float | None:
    """Numerator over denominator; unknown if either is, or if the denominator is 0."""
    return None if numerator is None or not denominator else numerator / denominator


M = TypeVar("M", RequestRecord, StepRecord)


def measured(records: Iterable[M]) -> tuple[M, ...]:
    """Requests or steps without those of the warm-up."""
    return tuple(record for record in records if not record.is_warmup)


def of_load(run: "LoadedRun") -> tuple[RequestRecord, ...]:
    """The requests that were sent in the load: those that are measured, and those of its opening."""
    opening_ns = run.record.times.opening_ns
    return tuple(
        request
        for request in run.requests
        if not request.is_warmup or (opening_ns is not None and (request.sent_ns or 0) >= opening_ns)
    )


def is_completed(request: RequestRecord) -> bool:
    """True if the request was answered completely without an error."""
    return request.error is None and request.done_ns is not None


def choice_tokens(request: RequestRecord, choice: ChoiceRecord) -> int | None:
    """Output tokens of one choice as the engine counted them.

    ``usage`` is the sum over all choices; with several, the choice's own count or the tokens of its chunks count.
    """
    if len(request.choices) == 1 and request.completion_tokens is not None:
        return request.completion_tokens
    if choice.output_tokens is not None:
        return choice.output_tokens
    return None if choice.chunk_tokens is None else sum(choice.chunk_tokens)


def request_durations_ns(request: RequestRecord) -> dict[str, float]:
    """TTFT, TPOT of the slowest choice and E2EL of one request, as limits are held against them.

    Infinite where it has none and without a complete answer; but 0 for the TPOT of one without a choice of several
    tokens, which keeps every limit on it.
    """
    if not is_completed(request):
        return dict.fromkeys(("ttft", "tpot", "e2el"), math.inf)
    choices = [choice for choice in request.choices if choice.chunk_ns]
    sent_ns = -math.inf if request.sent_ns is None else request.sent_ns
    last_ns: float | None = request.done_ns
    if request.stamps != "whole":
        last_ns = max((choice.chunk_ns[-1] for choice in choices), default=None)
    tpots_ns = [0.0]
    for choice in choices:
        num_tokens = choice_tokens(request, choice) or 0
        if num_tokens > 1:
            tpots_ns.append((choice.chunk_ns[-1] - choice.chunk_ns[0]) / (num_tokens - 1))
    return {
        "ttft": min((choice.chunk_ns[0] for choice in choices), default=math.inf) - sent_ns,
        "tpot": max(tpots_ns),
        "e2el": (math.inf if last_ns is None else last_ns) - sent_ns,
    }


def send_lag_ns(request: RequestRecord) -> int | None:
    """Delay of the send: send minus schedule."""
    return None if request.sent_ns is None else request.sent_ns - request.scheduled_ns


TAIL_CONFIDENCE: Final = 0.95
PERCENTS: Final = (50, 90, 95, 99)


@cache
def smallest_sample(percent: float) -> int:
    """Values needed before a percentile above the median may be shown: ceil(ln(1 - c) / ln(percent / 100))."""
    return 1 if percent <= 50 else math.ceil(math.log(1 - TAIL_CONFIDENCE) / math.log(percent / 100))


def percentiles(
    values: "ArrayLike", num_independent: int, percents: Sequence[int] = PERCENTS
) -> Mapping[int, float | None]:
    """Each percentile by linear interpolation between closest ranks, at rank (n - 1)·p (numpy's default).

    ``num_independent`` counts what the values come from (requests, not the gaps inside them): where it is
    smaller than ``smallest_sample``, the percentile is unknown.
    """
    import numpy as np  # noqa: PLC0415 - after the load

    ordered = np.sort(np.asarray(values, dtype=float))
    percentile_of: dict[int, float | None] = dict.fromkeys(percents)
    for percent in percents:
        if len(ordered) and num_independent >= smallest_sample(percent):
            rank = (len(ordered) - 1) * (percent / 100)
            below = math.floor(rank)
            low, high = ordered[below], ordered[min(below + 1, len(ordered) - 1)]
            percentile_of[percent] = float(low + (high - low) * (rank - below))
    return percentile_of


def standard_deviation(values: Sequence[float]) -> float | None:
    """Of the values themselves and not of what they are a sample of, as vLLM states it; None of none."""
    import numpy as np  # noqa: PLC0415 - after the load

    return float(np.std(values)) if values else None


def latency_metrics(
    latencies: Mapping[str, Sequence[float]], num_completed: int, factor: float = 1.0
) -> dict[str, float | None]:
    """Mean and percentiles in ms of ``latencies_ns`` of this many completed requests."""
    import numpy as np  # noqa: PLC0415 - after the load

    from benchctl.records.columns import exact_sum  # noqa: PLC0415 - numpy

    metrics: dict[str, float | None] = {}
    for latency, durations in latencies.items():
        values = np.asarray(durations)
        whole = float(exact_sum(values)) if values.dtype.kind == "i" else math.fsum(durations)
        metrics[f"{latency}_ms"] = ms_or_none(quotient(whole, len(durations)), factor)
        for percent, value in percentiles(durations, num_completed).items():
            metrics[f"p{percent}_{latency}_ms"] = ms_or_none(value, factor)
    return metrics
