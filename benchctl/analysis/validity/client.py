"""Judges the load client: a load generator that was late or had no processor time measured itself.

Each judgment is a message, or None where there is nothing to say.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING, Final

from benchctl.analysis.metrics.arrivals import possible_errors_ns, uncertain_metrics
from benchctl.analysis.metrics.chunks import chunks_of
from benchctl.analysis.metrics.client import (
    MAX_SEND_LAG_NS,
    Sends,
    SlotOccupancy,
    busy_cores,
    by_worker,
    sends_of,
    slot_occupancy,
)
from benchctl.analysis.metrics.latency import known_values, measured, of_load, percentiles, smallest_sample
from benchctl.analysis.validity.machines import num_cores
from benchctl.profile.arrival import Arrival
from benchctl.records.loaded import LoadedRun
from benchctl.records.record import RequestRecord
from benchctl.records.schema import ClientSample, ResultWarning
from benchctl.records.warning_codes import warnings_of
from benchctl.units import NS_PER_MS, NS_PER_S, NS_PER_US, count_of, milliseconds, ms_from_ns, s_from_ns

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

MIN_LOAD_NS: Final = NS_PER_S
"""In a shorter load one hiccup of the machine is a hundredth."""
MAX_IDLE_FRAC: Final = 0.01
"""Idle share of the slots that is a hundredth of the load: comparisons call no smaller change."""
WRITE_NS: Final = 100 * NS_PER_US
"""Tolerated time for writing each of the requests that are due at one moment: four times that of a free core."""
MAX_WAVE_LAG_NS: Final = 50 * NS_PER_MS
"""Tolerated common delay of requests that are due at one moment, or a hundredth of the load if that is more: a
single hiccup delays them all and changes the load by no more than this."""
MAX_EMPTY_FRAC: Final = 0.05
"""Share of time for which slots of a closed loop may be empty because the client was late: beyond it the server met
a twentieth fewer concurrent requests than planned."""
MIN_RATE_FRAC: Final = 0.95
"""Below this the load is another one: near saturation a server's queue depends strongly on the rate."""
HABIT_FRAC: Final = 0.01
"""More than one in a hundred is beyond the 99th percentile ..."""
MIN_HABIT: Final = 5
"""... and fewer occurrences than this are not a habit."""
MAX_STAMP_ERROR_NS: Final = NS_PER_MS
"""Tolerated error of an arrival time ..."""
STAMP_ERROR_FRAC: Final = 0.1
"""... or this fraction of the mean gap between arrivals, if that is more."""
MOST_FRAC: Final = 0.5
"""From this share of wrong arrivals on, the client was late as a rule, and none of its times describe the
server."""
TIMER_NS: Final = NS_PER_MS
"""Lag of an event loop that is on time: its wait is rounded up to whole milliseconds."""
MAX_LOOP_LAG_NS: Final = 100 * NS_PER_MS
"""Lag worth a warning even if sends and timestamps are good: refills and timeout checks may be late by as much."""
MAX_BUSY_FRAC: Final = 0.9
"""Share of a core above which a process has none to spare: simultaneous arrivals queue."""
_PERIOD_NS: Final = NS_PER_S // 10
"""Period of the samples of an event loop that does not stall."""
_MOST_STEPS: Final = 3
"""Settings of the wall clock that a warning describes."""


def client_suspect_warnings(run: LoadedRun, arrival: Arrival) -> tuple[ResultWarning, ...]:
    """The warnings that make a run suspect because the client was its bottleneck; none on a virtual clock.

    Of a lighter load the slots tell where they are known, otherwise the sends.
    """
    if run.record.is_virtual:
        return ()
    requests = measured(run.requests)
    occupancy = slot_occupancy(of_load(run), arrival)
    done_ns = known_values(request.done_ns for request in requests)
    load_ns = max(done_ns) - min(request.scheduled_ns for request in requests) if done_ns else 0
    sends = sends_of(requests, arrival) if occupancy is None or occupancy.idle_frac is None else None
    return warnings_of(
        {
            "slots-idle": _idle_slots(occupancy, load_ns),
            "sends-delayed": None if sends is None else _delayed_sends(sends, load_ns),
            "rate-missed": None if sends is None else _missed_rate(sends),
            "arrival-times-unreliable": _late_reads(requests, run.client, load_ns),
            "client-cpu": _busy_processes(run.client),
        }
    )


def client_warnings(run: LoadedRun, arrival: Arrival) -> tuple[ResultWarning, ...]:
    """Warnings that leave the run as it is."""
    requests, is_virtual = measured(run.requests), run.record.is_virtual
    sends = sends_of(requests if arrival.is_open_loop else (), arrival)  # nothing else is planned
    return warnings_of(
        {
            "times-bounded": None if is_virtual else _left_out(run),
            "sends-unlike-poisson": None if is_virtual else _unlike_poisson(sends, arrival),
            "rate-capped": _capped_rate(sends, run.record.clock_factor),
            "event-loop-stalls": None if is_virtual else _stalls(run.client),
            "client-crowded": None if is_virtual else _crowded(run),
            "wall-clock-set": _clock_changes(run.client),
            "other-transport": _other_transports(requests),
        }
    )


def _idle_slots(occupancy: SlotOccupancy | None, load_ns: int) -> str | None:
    """Slots were empty for more than a hundredth of their time, however often."""
    idle_frac = None if occupancy is None else occupancy.idle_frac
    if occupancy is None or idle_frac is None or load_ns < MIN_LOAD_NS or idle_frac <= MAX_IDLE_FRAC:
        return None
    tails = percentiles(occupancy.gaps_ns, len(occupancy.gaps_ns))
    gaps = [milliseconds(gap_ns) for gap_ns in (tails[50], tails[99], max(occupancy.gaps_ns))]
    connecting, num_connecting = occupancy.connecting_ns, sum(map(bool, occupancy.connecting_ns))
    remedy = "Free a core for the client, or lower the load"
    if 2 * num_connecting > len(connecting):
        remedy = (
            "The server closes connections, so a slot waits for a new one: let it keep them open, or free a core "
            "for the client"
        )
    return (
        f"slots of the closed loop were empty for {idle_frac:.2%} of their time although requests waited "
        f"(more than {MAX_IDLE_FRAC:.0%}): the server met {occupancy.mean_open:.4g} of {occupancy.num_slots} "
        f"requests at once. From the last byte of an answer to the next request: {gaps[0]} ms (p50), "
        f"{gaps[1]} ms (p99) and {gaps[2]} ms (max); {num_connecting} of {len(connecting)} had to open "
        f"a connection, which took {sum(connecting) / max(sum(occupancy.gaps_ns), 1):.0%} of that time. {remedy}"
    )


def _delayed_sends(sends: Sends, load_ns: int) -> str | None:
    """Requests repeatedly left late, or one wave of them by a large part of the load."""
    if load_ns < MIN_LOAD_NS:
        return None
    delays_by_time: dict[int, list[int]] = {}
    for request, lag_ns in zip(sends.requests, sends.own_lag_ns, strict=True):
        delays_by_time.setdefault(request.scheduled_ns, []).append(lag_ns)
    # less the time for writing the requests before it
    waves = [[lag_ns - i * WRITE_NS for i, lag_ns in enumerate(sorted(wave))] for wave in delays_by_time.values()]
    lags = [lag_ns for wave in waves for lag_ns in wave]
    num_late, num_late_waves = _count_above(lags, MAX_SEND_LAG_NS), _count_above(map(max, waves), MAX_SEND_LAG_NS)
    is_always = _is_habit(num_late_waves, len(waves)) and _is_habit(num_late, len(lags))
    if is_always and not sends.is_planned:  # only if the wait takes a considerable part of the time of the answers
        answered = [(r.done_ns or 0) - (r.sent_ns or 0) for r in sends.requests if r.done_ns is not None]
        is_always = sum(sends.own_lag_ns) > MAX_EMPTY_FRAC * sum(answered)
    wave_limit_ns = max(MAX_WAVE_LAG_NS, round(load_ns * HABIT_FRAC))
    if not is_always and not _is_habit(_count_above(lags, wave_limit_ns), len(lags)):
        return None
    num_unconnected = sum((r.connected_ns or 0) > r.scheduled_ns for r in sends.requests) if sends.is_planned else 0
    closed = f" ({num_unconnected} connections were not open by then)" if num_unconnected else ""
    return (
        f"{num_late} of {len(lags)} requests left more than {ms_from_ns(MAX_SEND_LAG_NS):.0f} ms late "
        f"(p99 {_p99_ms(lags)} ms){closed}: the load was not the one that was planned. Free processors for the "
        "client, or lower the load"
    )


def _missed_rate(sends: Sends) -> str | None:
    """Fewer requests per second were sent than scheduled."""
    if not sends.is_planned or len(sends.requests) < 2 or sends.held_back_ns:
        return None
    planned, sent = sends.planned_rate, sends.sent_rate
    if sends.planned_span_ns < MIN_LOAD_NS or not planned or sent is None or sent >= MIN_RATE_FRAC * planned:
        return None
    return (
        f"the client sent {sent:.4g} requests/s where {planned:.4g} were planned, less than "
        f"{MIN_RATE_FRAC:.0%}, and no cap explains it: the server met a lighter load. Free processors for the "
        "client, or lower the rate"
    )


def _late_reads(requests: Sequence[RequestRecord], samples: Sequence[ClientSample], load_ns: int) -> str | None:
    """Most arrival times may be wrong. The requests say how long a load was: a stalled loop takes few samples."""
    if not samples or load_ns < MIN_LOAD_NS:
        return None
    chunks = chunks_of(requests)
    gaps_ns, num_chunks = chunks.gaps_ns(chunks.t_ns, chunks.t_ns), len(chunks.t_ns)
    allowed_ns = max(MAX_STAMP_ERROR_NS, STAMP_ERROR_FRAC * float(gaps_ns.mean()) if len(gaps_ns) else 0.0)
    num_unstamped = sum(len(choice.chunk_ns) for choice in chunks.choices if choice.chunk_late_ns is None)
    errors_ns = possible_errors_ns(chunks, samples)
    num_wrong = int((errors_ns > allowed_ns).sum())
    reasons = []
    if _is_habit(num_unstamped, num_chunks) and _is_stalled(samples, allowed_ns + TIMER_NS):
        reasons.append(
            f"the client timestamped {num_unstamped} of {num_chunks} chunks itself, without the kernel, and its "
            f"event loop was late (p99 {_p99_lag(samples)} ms): these times may be off by as much"
        )
    if num_wrong >= MIN_HABIT and num_wrong >= MOST_FRAC * num_chunks:
        reasons.append(
            f"{num_wrong} of {num_chunks} chunks were read together with newer ones by a late client, and may have "
            f"arrived more than {ms_from_ns(allowed_ns):.3g} ms before their recorded time (p99 "
            f"{_p99_ms(errors_ns)} ms)"
        )
    return "; ".join(reasons) + ". Free processors for the client, or lower the load" if reasons else None


def _busy_processes(samples: Sequence[ClientSample]) -> str | None:
    cores = busy_cores(samples)
    full = [used for used in cores.values() if used > MAX_BUSY_FRAC]
    if not full:
        return None
    return (
        f"{len(full)} of {len(cores)} processes of the load generator used more than {MAX_BUSY_FRAC:.0%} of a core "
        f"(at most {max(full):.0%}): the load may have measured the client's pace. Lower the load, or "
        "use more processes for it"
    )


def _left_out(run: LoadedRun) -> str | None:
    """The metrics that late reads make unknown, with the bounds between which they lie."""
    bounds = uncertain_metrics(run, chunks_of(measured(run.requests)).completed).items()
    intervals = "; ".join(f"{name} in {low_ms:.3g} to {high_ms:.3g} ms" for name, (low_ms, high_ms) in bounds)
    if not intervals:
        return None
    return (
        "the client read several server writes at once, so some arrival times are known between bounds only, and "
        f"these metrics are left out: {intervals}. The others count. Free processors for the client"
    )


def _unlike_poisson(sends: Sends, arrival: Arrival) -> str | None:
    """The gaps between sends are no longer those of the Poisson process that was planned."""
    rate = arrival.request_rate if arrival.kind == "poisson" else None
    arrivals = [(each.scheduled_ns, each.sent_ns or 0) for each in sends.requests if not each.turn]
    if rate is None or sends.planned_span_ns < MIN_LOAD_NS or sends.held_back_ns or len(arrivals) < 2:
        return None
    planned, sent = (_distance_from_poisson(times_ns, rate) for times_ns in zip(*arrivals, strict=True))
    # The distance of gaps from their law times the root of their number: below by chance in 95 %
    limit = 1.358 / math.sqrt(len(arrivals) - 1)
    if sent <= max(limit, planned):
        return None
    return (
        f"the gaps between {len(arrivals)} sends have a Kolmogorov distance of {sent:.4f} from a "
        f"Poisson process of {rate:g} requests/s; chance stays below {limit:.4f} in 95 of 100 loads, and the "
        f"plan has {planned:.4f}: requests left in bunches. Free processors for the client, or lower the rate"
    )


def _distance_from_poisson(times_ns: Iterable[int], rate_per_s: float) -> float:
    """Kolmogorov distance of the gaps between times from the exponential distribution of this rate."""
    gaps_ns = (later - earlier for earlier, later in pairwise(sorted(times_ns)))
    shares = sorted(-math.expm1(-s_from_ns(gap_ns) * rate_per_s) for gap_ns in gaps_ns)
    return max(max((i + 1) / len(shares) - share, share - i / len(shares)) for i, share in enumerate(shares))


def _capped_rate(sends: Sends, factor: float) -> str | None:
    """A cap held planned requests back; ``factor`` is seconds of the engine's clock per second."""
    waits = sends.held_back_ns
    if not waits:
        return None
    mean_ms, max_ms = ms_from_ns(fmean(waits) * factor), ms_from_ns(max(waits) * factor)
    return (
        f"{len(waits)} of {len(sends.requests)} requests waited after their time, {mean_ms:.3g} ms on "
        f"average and {max_ms:.3g} ms at most, because the profile caps them (max_concurrency or "
        "launch_rate_limit). No latency includes this wait, because latencies count from the send (coordinated "
        "omission); raise the cap, or use a closed loop"
    )


def _stalls(samples: Sequence[ClientSample]) -> str | None:
    if _span_ns(samples) < MIN_LOAD_NS or not _is_stalled(samples, MAX_LOOP_LAG_NS):
        return None
    return (
        f"the client's event loop repeatedly stalled for over {ms_from_ns(MAX_LOOP_LAG_NS):.0f} ms "
        f"(p99 {_p99_lag(samples)} ms); refills of a closed loop and timeout checks may have been late by as much. "
        "Its effect on sends and arrival times has its own warnings (sends-delayed, arrival-times-unreliable)"
    )


def _crowded(run: LoadedRun) -> str | None:
    """Several processes that sent the load, and their parent, had fewer cores than they are."""
    num_workers, node = len(by_worker(run.client)), run.record.node
    cores = None if node is None else node.cores
    if cores is None or num_workers <= 1 or num_workers + 1 <= num_cores(cores):
        return None
    return (
        f"{num_workers + 1} processes of the load generator shared {count_of(num_cores(cores), 'core')}: "
        "what delivers a token may wait for one. On two cores, beside the server, four workers had itl wrong by "
        "0.03 to 0.04 ms (p99), one worker by 0.02 ms. Lower load.workers, or give the client more cores"
    )


def _clock_changes(samples: Sequence[ClientSample]) -> str | None:
    """The wall clock was set during the load, by the offsets of the process that noticed most."""
    offsets = [
        [sample.offset for sample in own if sample.offset is not None] for own in by_worker(samples).values()
    ]
    most = max(offsets, key=len, default=[])
    steps = []
    for before, after in pairwise(most):
        by_s = s_from_ns(after.realtime_less_monotonic_ns - before.realtime_less_monotonic_ns)
        steps.append(f"by {by_s:+,.4g} s after {s_from_ns(after.t_ns - most[0].t_ns):.1f} s")
    if not steps:
        return None
    times = "once" if len(steps) == 1 else f"{len(steps)} times"
    changes = ", ".join(steps[:_MOST_STEPS]) + (", …" if len(steps) > _MOST_STEPS else "")
    return (
        f"the system clock was set {times} during the load ({changes}): the kernel's timestamps since "
        "then are unusable, and the client's own replace them. Durations are those of a clock that is never set. "
        "Keep the clock of a measuring machine steady"
    )


def _other_transports(requests: Sequence[RequestRecord]) -> str | None:
    num_other = sum(request.route == "httpx" for request in requests)
    if not num_other:
        return None
    return (
        f"{num_other} of {len(requests)} requests used the fallback transport (TLS): this costs the client more, "
        "and its times include it. Name an address without TLS on a network that you trust"
    )


def _count_above(values: Iterable[float], limit: float) -> int:
    return sum(value > limit for value in values)


def _is_habit(count: int, total: int) -> bool:
    """True if it happens to more than one in a hundred, and not just to a few."""
    return count >= MIN_HABIT and count > HABIT_FRAC * total


def _p99_ms(values_ns: "ArrayLike") -> str:
    return milliseconds(percentiles(values_ns, smallest_sample(99), (99,))[99])  # of any number of values


def _p99_lag(samples: Sequence[ClientSample]) -> str:
    return _p99_ms([sample.loop_lag_ns for sample in samples])


def _span_ns(samples: Iterable[ClientSample]) -> int:
    """Time that the samples cover, in the process that was sampled longest."""
    return max((own[-1].t_ns - own[0].t_ns + _PERIOD_NS for own in by_worker(samples).values()), default=0)


def _is_stalled(samples: Sequence[ClientSample], limit_ns: float) -> bool:
    """True if the event loop of a process was late by more than the limit for more than a hundredth of its time.

    Time rather than a count, because a stalled loop takes fewer samples.
    """
    late_ns = 0
    for own in by_worker(samples).values():
        starts = [own[0].t_ns - _PERIOD_NS, *(sample.t_ns for sample in own[:-1])]
        spans = zip(own, starts, strict=True)
        late_ns = max(late_ns, sum(s.t_ns - start for s, start in spans if s.loop_lag_ns > limit_ns))
    # A shorter time under late wake-ups is a hiccup
    return late_ns >= NS_PER_S // 2 and late_ns > HABIT_FRAC * _span_ns(samples)
