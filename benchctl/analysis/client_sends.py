"""Did the requests leave when they were due, and if not, who held them back?

In an open loop everything is prepared ahead of its time, and what leaves late was held up by the client or by a
connection that did not open. Where a cap of the profile makes a request wait for a slot, it connects only when it
has one: from then on the client is to blame, and for what was before, the cap.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from benchctl.analysis.percentile import percentiles, smallest_sample
from benchctl.profile.model import Arrival
from benchctl.records.run import RequestRecord, ResultWarning
from benchctl.units import NS_PER_MS, NS_PER_S, NS_PER_US, ms_from_ns, s_from_ns

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
MIN_LOAD_NS: Final = NS_PER_S
"""A shorter load cannot tell a hiccup from a habit."""


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
    def held_back_ns(self) -> list[int]:
        """How long after their time those left that a cap held back."""
        pairs = zip(self.lag_ns, self.own_lag_ns, strict=True)
        return [lag for lag, own in pairs if self.is_planned and lag > MAX_SEND_LAG_NS and own < lag]


def sends_of(requests: Iterable[RequestRecord], arrival: Arrival) -> Sends:
    """The sends of a load, with who is to blame for their lateness."""
    left = sorted((r for r in requests if r.sent_ns is not None), key=lambda r: (r.scheduled_ns, r.index))
    is_planned = arrival.kind not in {"closed-loop", "burst"}
    return Sends(
        requests=tuple(left),
        lag_ns=tuple((request.sent_ns or 0) - request.scheduled_ns for request in left),
        own_lag_ns=tuple(_own_lag_ns(request, arrival, is_planned=is_planned) for request in left),
        is_planned=is_planned,
    )


def _own_lag_ns(request: RequestRecord, arrival: Arrival, *, is_planned: bool) -> int:
    """What of a request's lateness is not that of a cap; 0 where nothing tells the two apart."""
    is_capped = arrival.max_concurrency is not None
    if is_planned and (arrival.launch_rate_limit is not None or (is_capped and request.connected_ns is None)):
        return 0
    due_ns = request.scheduled_ns
    if is_capped or not is_planned:
        due_ns = max(due_ns, request.connected_ns or 0)
    return (request.sent_ns or 0) - due_ns


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
        code="send-late",
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
    planned_ns = sends.requests[-1].scheduled_ns - sends.requests[0].scheduled_ns
    sent = [request.sent_ns or 0 for request in sends.requests]
    taken_ns = max(sent) - min(sent)
    if planned_ns < MIN_LOAD_NS or planned_ns >= MIN_RATE_FRAC * taken_ns:
        return
    gaps = len(sent) - 1
    yield ResultWarning(
        code="rate-missed",
        message=f"the client sent {gaps / s_from_ns(taken_ns):.4g} requests/s where "
        f"{gaps / s_from_ns(planned_ns):.4g} were planned, less than {MIN_RATE_FRAC:.0%}, and no cap explains it: "
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
    found = percentiles(values_ns, smallest_sample(99), (99,))[99]  # of a habit, however few there were in all
    return "unknown" if found is None else f"{ms_from_ns(found):.3g}"
