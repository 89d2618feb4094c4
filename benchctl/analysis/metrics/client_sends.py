"""Did the requests leave when they were due, and if not, who held them back?

In an open loop everything is prepared ahead of its time, and what leaves late was held up by the client or by a
connection that did not open. Where a cap of the profile makes a request wait, the cap is to blame until a slot is
free, and from then on the client. Records of older versions do not say when that was: their requests connected only
when they had a slot. What a closed loop keeps from the server is seen in its slots (``slot_occupancy``); where
these are unknown, or never filled again, its sends are judged here.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean
from typing import Final

from benchctl.analysis.metrics.percentile import percentiles, smallest_sample
from benchctl.analysis.metrics.slot_occupancy import MIN_LOAD_NS
from benchctl.analysis.metrics.unknown import quotient
from benchctl.formats import milliseconds
from benchctl.profile.workload import Arrival
from benchctl.records.record import ResultWarning
from benchctl.records.request import RequestRecord
from benchctl.units import NS_PER_MS, NS_PER_US, ms_from_ns, s_from_ns

MAX_SEND_LAG_NS: Final = 2 * NS_PER_MS
"""A timer of an event loop fires up to 1 ms late, because its wait is rounded up to whole ones (those of the kernel
are exact, where it has them); as much again for a processor that is taken is fair, and more is not."""
WRITE_NS: Final = 100 * NS_PER_US
"""What each of those that are due at one moment may take to leave: four times what it takes on a free core."""
MAX_WAVE_LAG_NS: Final = 50 * NS_PER_MS
"""By how much requests that are due at one moment may be late all together, or a hundredth of the load if that is
more: one hiccup delays them all and changes the load as a whole by no more than this."""
MAX_EMPTY_FRAC: Final = 0.05
"""Share of their time for which the slots of a closed loop may stand empty because the client was late: beyond it
the server met a twentieth fewer requests at once than it was to."""
MIN_RATE_FRAC: Final = 0.95
"""A load of a twentieth less is another load: near saturation a server's queue follows the rate by multiples."""
HABIT_FRAC: Final = 0.01
"""What happens to more than one in a hundred is past the 99th percentile ..."""
MIN_HABIT: Final = 5
"""... and what has happened fewer times than this is no habit."""


@dataclass(frozen=True, slots=True)
class Sends:
    """The requests that left, in the order of the plan."""

    requests: tuple[RequestRecord, ...]
    lag_ns: tuple[int, ...]
    """How long after its time each left."""
    own_lag_ns: tuple[int, ...]
    """How much of that no cap explains."""
    is_planned: bool
    """An open loop: each was due at its own time, whatever the server did."""

    @property
    def planned_rate(self) -> float | None:
        """Requests per second of the schedule as it was drawn; None where there is none, or of one moment."""
        return quotient(self._num_gaps, s_from_ns(self.planned_span_ns)) if self.is_planned else None

    @property
    def sent_rate(self) -> float | None:
        """Requests per second as they were sent."""
        sent = [request.sent_ns or 0 for request in self.requests]
        return quotient(self._num_gaps, s_from_ns(max(sent) - min(sent))) if sent else None

    @property
    def planned_span_ns(self) -> int:
        """From when the first was due to when the last was."""
        return self.requests[-1].scheduled_ns - self.requests[0].scheduled_ns if self.requests else 0

    @property
    def _num_gaps(self) -> int:
        return len(self.requests) - 1

    @property
    def held_back_ns(self) -> list[int]:
        """How long after their time those left that a cap held back."""
        pairs = zip(self.lag_ns, self.own_lag_ns, strict=True)
        return [lag for lag, own in pairs if self.is_planned and lag > MAX_SEND_LAG_NS and own < lag]


def sends_of(requests: Iterable[RequestRecord], arrival: Arrival) -> Sends:
    """The sends of a load, with who is to blame for their lateness."""
    left = sorted((r for r in requests if r.sent_ns is not None), key=lambda r: (r.scheduled_ns, r.index))
    is_planned = arrival.kind not in {"closed-loop", "burst"}
    blame = _blame(left, arrival, is_planned=is_planned)
    return Sends(
        requests=tuple(left),
        lag_ns=tuple((request.sent_ns or 0) - request.scheduled_ns for request in left),
        own_lag_ns=tuple(max((request.sent_ns or 0) - blame(request), 0) for request in left),
        is_planned=is_planned,
    )


def _blame(
    requests: Sequence[RequestRecord], arrival: Arrival, *, is_planned: bool
) -> Callable[[RequestRecord], int]:
    """From when on the client is to blame for the lateness of a request, which no cap explains any more."""
    if is_planned and arrival.launch_rate_limit is not None:
        return lambda request: request.sent_ns or 0
    does_tell = any(request.slot_free_ns is not None for request in requests)
    if does_tell or (is_planned and not _fills(requests, arrival.max_concurrency)):
        return lambda request: max(request.scheduled_ns, request.slot_free_ns or 0)
    if is_planned:
        return lambda request: max(request.scheduled_ns, request.connected_ns or request.sent_ns or 0)
    return lambda request: max(request.scheduled_ns, request.connected_ns or 0)


def _fills(requests: Sequence[RequestRecord], cap: int | None) -> bool:
    """Whether as many were ever open as the cap allows, so that others may have waited for a slot."""
    sent = [(request.sent_ns or 0, 1) for request in requests]
    ended = [(request.done_ns, -1) for request in requests if request.done_ns is not None]
    most = max(accumulate(change for _, change in sorted(sent + ended)), default=0)
    return cap is not None and most >= cap


def late_sends(sends: Sends, load_ns: int) -> Iterator[ResultWarning]:
    """Requests that left late again and again, or one wave of them by a part of the load."""
    waves = _waves(sends)
    if load_ns < MIN_LOAD_NS:
        return
    lags = [lag_ns for wave in waves for lag_ns in wave]
    num_late, num_late_waves = above(lags, MAX_SEND_LAG_NS), above(map(max, waves), MAX_SEND_LAG_NS)
    is_always = is_habit(num_late_waves, len(waves)) and is_habit(num_late, len(lags))
    is_always = is_always and (sends.is_planned or _leaves_slots_empty(sends))
    wave_limit_ns = max(MAX_WAVE_LAG_NS, round(load_ns * HABIT_FRAC))
    if not is_always and not is_habit(above(lags, wave_limit_ns), len(lags)):
        return
    num_unconnected = sum((r.connected_ns or 0) > r.scheduled_ns for r in sends.requests) if sends.is_planned else 0
    closed = f" ({num_unconnected} connections were not open by then)" if num_unconnected else ""
    yield ResultWarning(
        code="sends-delayed",
        message=f"{num_late} of {len(lags)} requests left more than {ms_from_ns(MAX_SEND_LAG_NS):.0f} ms late "
        f"(p99 {p99_ms(lags)} ms){closed}: the load was not the one that was asked for. Free processors for the "
        "client, or lower the load",
    )


def _leaves_slots_empty(sends: Sends) -> bool:
    """Whether requests that wait for nothing but the client take a good part of the time that answers take."""
    answered = [(r.done_ns or 0) - (r.sent_ns or 0) for r in sends.requests if r.done_ns is not None]
    return sum(sends.own_lag_ns) > MAX_EMPTY_FRAC * sum(answered)


def _waves(sends: Sends) -> list[list[int]]:
    """For each moment at which requests were due, how late each left beyond what writing those before it takes."""
    waves: dict[int, list[int]] = {}
    for request, lag_ns in zip(sends.requests, sends.own_lag_ns, strict=True):
        waves.setdefault(request.scheduled_ns, []).append(lag_ns)
    return [[lag_ns - rank * WRITE_NS for rank, lag_ns in enumerate(sorted(wave))] for wave in waves.values()]


def missed_rate(sends: Sends) -> Iterator[ResultWarning]:
    """Too few requests per second; what was asked for is the schedule as it was drawn."""
    if not sends.is_planned or len(sends.requests) < 2 or sends.held_back_ns:
        return
    planned, sent = sends.planned_rate, sends.sent_rate
    if sends.planned_span_ns < MIN_LOAD_NS or not planned or sent is None or sent >= MIN_RATE_FRAC * planned:
        return
    yield ResultWarning(
        code="rate-missed",
        message=f"the client sent {sent:.4g} requests/s where "
        f"{planned:.4g} were planned, less than {MIN_RATE_FRAC:.0%}, and no cap explains it: "
        "the server met a lighter load. Free processors for the client, or lower the rate",
    )


def capped_rate(sends: Sends, factor: float) -> Iterator[ResultWarning]:
    """Planned requests that a cap held back; ``factor`` is seconds of the engine's clock per second."""
    waits = sends.held_back_ns
    if not waits:
        return
    mean_ms, max_ms = ms_from_ns(fmean(waits) * factor), ms_from_ns(max(waits) * factor)
    yield ResultWarning(
        code="rate-capped",
        message=f"{len(waits)} of {len(sends.requests)} requests waited after their time, {mean_ms:.3g} ms on "
        f"average and {max_ms:.3g} ms at most, because the profile caps them (max_concurrency or "
        "launch_rate_limit). Their waiting is in no latency, because these count from the send (coordinated "
        "omission); raise the cap, or call the load a closed loop",
    )


def above(values: Iterable[float], limit: float) -> int:
    """How many are above the limit."""
    return sum(value > limit for value in values)


def is_habit(count: int, total: int) -> bool:
    """Whether it happens to more than one in a hundred, and not just to a few."""
    return count >= MIN_HABIT and count > HABIT_FRAC * total


def p99_ms(values_ns: Sequence[float]) -> str:
    """The 99th percentile as a message shows it."""
    return milliseconds(percentiles(values_ns, smallest_sample(99), (99,))[99])  # of a habit, however few there are
