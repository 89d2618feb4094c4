"""Was it the client? A load generator that was late, or had no processor left, measured itself.

Five doubts keep a run from counting: slots of a closed loop stood empty, requests left later than planned, too few
of them left, most arrivals may be timed wrong, a process had no processor to spare. A load of less than a second
says nothing. Empty slots are counted by their time, so that no delay is too rare to be found; the others ask for a
habit, because one hiccup of a busy machine is none. On a virtual clock they are silent, because a simulator keeps
an account of its own lag.

What spoils no record is a warning: metrics that rest on arrivals known between bounds only (``metric_bounds``; they
decide nothing, and the rest of the run counts), an event loop that was away for long, whose cost to sends and
stamps the doubts measure, a cap that held planned requests back, a wall clock that was set, a server that needs
another way of asking.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from statistics import fmean
from typing import Final

import msgspec

from benchctl.analysis.metrics.arrival_errors import arrival_errors
from benchctl.analysis.metrics.bounds import Bounds, bounds_warnings, run_bounds
from benchctl.analysis.metrics.client_sends import (
    HABIT_FRAC,
    MIN_HABIT,
    capped_rate,
    count_above,
    delayed_sends,
    is_habit,
    missed_rate,
    p99_ms,
    sends_of,
)
from benchctl.analysis.metrics.request_timing import itls_ns, measured
from benchctl.analysis.metrics.slot_occupancy import MIN_LOAD_NS, idle_slots, slot_occupancy
from benchctl.analysis.metrics.timestamp_quality import busy_cores, num_clock_steps, samples_span_ns, stalled_ns
from benchctl.profile.workload import Arrival
from benchctl.records.loaded import LoadedRun
from benchctl.records.record import ResultWarning
from benchctl.records.request import RequestRecord
from benchctl.records.samples import ClientSample
from benchctl.units import NS_PER_MS, NS_PER_S, ms_from_ns

MAX_STAMP_ERROR_NS: Final = NS_PER_MS
"""Arrivals may be wrong by this ..."""
STAMP_ERROR_FRAC: Final = 0.1
"""... or by this fraction of the mean gap between them, if that is more."""
MOST_FRAC: Final = 0.5
"""Where this share of the arrivals or more may be wrong, it is not single metrics that rest on bounds: the client
was late as a rule, and nothing that it timed says what the server did."""
TIMER_NS: Final = NS_PER_MS
"""By how much an event loop wakes late that is not late: its wait is rounded up to whole milliseconds."""
MAX_LOOP_LAG_NS: Final = 100 * NS_PER_MS
"""What is worth telling although sends and stamps are good: the next request of a closed loop may leave later by
this, and so does whatever the client has to decide."""
MAX_BUSY_FRAC: Final = 0.9
"""Share of a core from which a process has none to spare: what comes in at once waits in line."""
MIN_HELD_UP_NS: Final = NS_PER_S // 2
"""Time under late wake-ups from which it is no hiccup."""


def client_suspect_warnings(run: LoadedRun, arrival: Arrival) -> tuple[ResultWarning, ...]:
    """What makes a run suspect, because the client was its bottleneck; nothing on a virtual clock."""
    if run.record.clock == "virtual":
        return ()
    requests = measured(run.requests)
    found = (
        *_unkept_load(requests, arrival),
        *_late_reads(requests, run.client),
        *_full_processors(run.client),
    )
    return _here(run, found)


def client_warnings(
    run: LoadedRun, arrival: Arrival, bounds: Mapping[str, Bounds] | None = None
) -> tuple[ResultWarning, ...]:
    """What a reader should know of how the load was made, and what keeps no run from counting.

    ``bounds`` are those of a load of which not all is in memory.
    """
    requests = measured(run.requests)
    found = (
        *bounds_warnings(run_bounds(run) if bounds is None else bounds),
        *(() if run.record.clock == "virtual" else _away(run.client)),
        *capped_rate(sends_of(requests, arrival), run.record.clock_factor),
        *_set_clock(run.client),
        *_other_ways(requests),
    )
    return _here(run, found)


def _here(run: LoadedRun, found: Iterable[ResultWarning]) -> tuple[ResultWarning, ...]:
    return tuple(msgspec.structs.replace(warning, where=run.record.run_id) for warning in found)


def _unkept_load(requests: Sequence[RequestRecord], arrival: Arrival) -> Iterator[ResultWarning]:
    """Where the server met less than was asked for: by its slots if these are known, else by when requests left."""
    load_ns, occupancy = _load_ns(requests), slot_occupancy(requests, arrival)
    if occupancy is not None and occupancy.idle_frac is not None:
        yield from idle_slots(occupancy, load_ns)
        return
    sends = sends_of(requests, arrival)
    yield from delayed_sends(sends, load_ns)
    yield from missed_rate(sends)


def _late_reads(requests: Sequence[RequestRecord], samples: Sequence[ClientSample]) -> Iterator[ResultWarning]:
    if samples_span_ns(samples) < MIN_LOAD_NS:
        return
    lags = [sample.loop_lag_ns for sample in samples]
    allowed_ns = _allowed_error_ns(requests)
    chunks = [
        (len(choice.chunk_ns), choice.chunk_late_ns is None) for request in requests for choice in request.choices
    ]
    num_chunks = sum(count for count, _ in chunks)
    num_unstamped = sum(count for count, is_unstamped in chunks if is_unstamped)
    errors = [error_ns for of_request in arrival_errors(requests, samples) for error_ns in chain(*of_request)]
    num_wrong = count_above(errors, allowed_ns)
    found = []
    if is_habit(num_unstamped, num_chunks) and _is_held_up(samples, allowed_ns + TIMER_NS):
        found.append(
            f"the client took the time of {num_unstamped} of {num_chunks} chunks itself, without the kernel's "
            f"stamp, and its event loop was late (p99 {p99_ms(lags)} ms): these times may be off by as much"
        )
    if num_wrong >= MIN_HABIT and num_wrong >= MOST_FRAC * num_chunks:
        found.append(
            f"{num_wrong} of {num_chunks} chunks were read together with newer ones when the client came late to "
            f"read, and may have arrived more than {ms_from_ns(allowed_ns):.3g} ms before their time "
            f"(p99 {p99_ms(errors)} ms)"
        )
    if found:
        message = "; ".join(found) + ". Free processors for the client, or lower the load"
        yield ResultWarning(code="arrival-times-unreliable", message=message)


def _away(samples: Sequence[ClientSample]) -> Iterator[ResultWarning]:
    if samples_span_ns(samples) >= MIN_LOAD_NS and _is_held_up(samples, MAX_LOOP_LAG_NS):
        lags = [sample.loop_lag_ns for sample in samples]
        yield ResultWarning(
            code="event-loop-stalls",
            message=f"the client's event loop was away for more than {ms_from_ns(MAX_LOOP_LAG_NS):.0f} ms again "
            f"and again (p99 {p99_ms(lags)} ms): by as much, refills of a closed loop may have left late, and "
            "limits of time been looked at late. What that did to sends and to the times of arrivals is judged by "
            "itself (sends-delayed, arrival-times-unreliable)",
        )


def _is_held_up(samples: Sequence[ClientSample], limit_ns: float) -> bool:
    """Whether the event loops were late by more than the limit for more than a hundredth of their time."""
    late_ns = stalled_ns(samples, limit_ns)
    return late_ns >= MIN_HELD_UP_NS and late_ns > HABIT_FRAC * samples_span_ns(samples)


def _allowed_error_ns(requests: Sequence[RequestRecord]) -> float:
    gaps = [gap for request in requests for gap in itls_ns(request)]
    return max(MAX_STAMP_ERROR_NS, STAMP_ERROR_FRAC * fmean(gaps) if gaps else 0.0)


def _full_processors(samples: Sequence[ClientSample]) -> Iterator[ResultWarning]:
    cores = busy_cores(samples)
    full = sorted(used for used in cores.values() if used > MAX_BUSY_FRAC)
    if full:
        yield ResultWarning(
            code="client-cpu",
            message=f"{len(full)} of {len(cores)} processes of the load generator used more than "
            f"{MAX_BUSY_FRAC:.0%} of a core (at most {full[-1]:.0%}): what the load measured may be the client's "
            "pace. Lower the load, or use more processes for it",
        )


def _set_clock(samples: Sequence[ClientSample]) -> Iterator[ResultWarning]:
    if steps := num_clock_steps(samples):
        yield ResultWarning(
            code="wall-clock-set",
            message=f"somebody set the wall clock {steps} times during the load: the kernel's stamps from around "
            "that time are of no use, and the client's own took their place. Keep the clock of a measuring "
            "machine steady",
        )


def _other_ways(requests: Sequence[RequestRecord]) -> Iterator[ResultWarning]:
    num_other = sum(request.route == "httpx" for request in requests)
    num_sent_on = sum(request.num_redirects > 0 for request in requests)
    ways = []
    if num_other:
        ways.append(f"{num_other} of {len(requests)} requests went by a way that is not made for streams (TLS)")
    if num_sent_on:
        ways.append(f"the server sent {num_sent_on} of {len(requests)} requests on to another address")
    if ways:
        yield ResultWarning(
            code="other-transport",
            message="; ".join(ways)
            + ": both cost the client more and are part of what it timed. Name the address that "
            "answers, without TLS where the network is yours",
        )


def _load_ns(requests: Sequence[RequestRecord]) -> int:
    """From when the first request was due to the end of the last."""
    ended = [request.done_ns for request in requests if request.done_ns is not None]
    return max(ended) - min(request.scheduled_ns for request in requests) if ended else 0
