"""Judges the load client: a load generator that was late or had no processor time measured itself.

``client_suspect_warnings`` make a run suspect, ``client_warnings`` do not. Loads of less than a second are not
judged. Empty slots count by their time, so even rare delays count; the others require repetition, because one
hiccup of a busy machine is harmless. On a virtual clock the simulator measures its own lag.
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
    unlike_poisson,
)
from benchctl.analysis.metrics.request_timing import itls_ns, measured
from benchctl.analysis.metrics.slot_occupancy import MIN_LOAD_NS, idle_slots, slot_occupancy
from benchctl.analysis.metrics.timestamp_quality import busy_cores, clock_steps, samples_span_ns, stalled_ns
from benchctl.profile.sections.workload import Arrival
from benchctl.records.loaded import LoadedRun
from benchctl.records.record import ResultWarning
from benchctl.records.request import RequestRecord
from benchctl.records.samples import ClientSample
from benchctl.units import NS_PER_MS, NS_PER_S, ms_from_ns

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
MIN_HELD_UP_NS: Final = NS_PER_S // 2
"""Time under late wake-ups that is more than a hiccup."""
_MOST_STEPS: Final = 3
"""Settings of the wall clock that a warning describes."""


def client_suspect_warnings(run: LoadedRun, arrival: Arrival) -> tuple[ResultWarning, ...]:
    """The warnings that make a run suspect because the client was its bottleneck; none on a virtual clock."""
    if run.record.clock == "virtual":
        return ()
    requests = measured(run.requests)
    warnings = (*_missed_load(requests, arrival), *_late_reads(requests, run.client), *_full_processors(run.client))
    return _about_run(run, warnings)


def client_warnings(
    run: LoadedRun, arrival: Arrival, bounds: Mapping[str, Bounds] | None = None
) -> tuple[ResultWarning, ...]:
    """Warnings that leave the run as it is; ``bounds`` are those of a load that is not in memory as a whole."""
    requests = measured(run.requests)
    sends, is_virtual = sends_of(requests, arrival), run.record.clock == "virtual"
    warnings = (
        *(
            ()
            if is_virtual
            else (
                *bounds_warnings(run_bounds(run) if bounds is None else bounds),
                *_stalls(run.client),
                *unlike_poisson(sends, arrival),
            )
        ),
        *capped_rate(sends, run.record.clock_factor),
        *_clock_changes(run.client),
        *_other_transports(requests),
    )
    return _about_run(run, warnings)


def _about_run(run: LoadedRun, warnings: Iterable[ResultWarning]) -> tuple[ResultWarning, ...]:
    return tuple(msgspec.structs.replace(warning, where=run.record.run_id) for warning in warnings)


def _missed_load(requests: Sequence[RequestRecord], arrival: Arrival) -> Iterator[ResultWarning]:
    """Warnings that the server met a lighter load: from its slots if these are known, otherwise from the sends."""
    occupancy = slot_occupancy(requests, arrival)
    done_ns = [request.done_ns for request in requests if request.done_ns is not None]
    load_ns = max(done_ns) - min(request.scheduled_ns for request in requests) if done_ns else 0
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
    gaps_ns = [gap_ns for request in requests for gap_ns in itls_ns(request)]
    allowed_ns = max(MAX_STAMP_ERROR_NS, STAMP_ERROR_FRAC * fmean(gaps_ns) if gaps_ns else 0.0)
    choices = [choice for request in requests for choice in request.choices]
    num_chunks = sum(len(choice.chunk_ns) for choice in choices)
    num_unstamped = sum(len(choice.chunk_ns) for choice in choices if choice.chunk_late_ns is None)
    errors = [error_ns for of_request in arrival_errors(requests, samples) for error_ns in chain(*of_request)]
    num_wrong = count_above(errors, allowed_ns)
    reasons = []
    if is_habit(num_unstamped, num_chunks) and _is_stalled(samples, allowed_ns + TIMER_NS):
        reasons.append(
            f"the client timestamped {num_unstamped} of {num_chunks} chunks itself, without the kernel, and its "
            f"event loop was late (p99 {p99_ms(lags)} ms): these times may be off by as much"
        )
    if num_wrong >= MIN_HABIT and num_wrong >= MOST_FRAC * num_chunks:
        reasons.append(
            f"{num_wrong} of {num_chunks} chunks were read together with newer ones by a late client, and may have "
            f"arrived more than {ms_from_ns(allowed_ns):.3g} ms before their recorded time (p99 {p99_ms(errors)} "
            "ms)"
        )
    if reasons:
        message = "; ".join(reasons) + ". Free processors for the client, or lower the load"
        yield ResultWarning(code="arrival-times-unreliable", message=message)


def _stalls(samples: Sequence[ClientSample]) -> Iterator[ResultWarning]:
    if samples_span_ns(samples) >= MIN_LOAD_NS and _is_stalled(samples, MAX_LOOP_LAG_NS):
        lags = [sample.loop_lag_ns for sample in samples]
        yield ResultWarning(
            code="event-loop-stalls",
            message=f"the client's event loop repeatedly stalled for over {ms_from_ns(MAX_LOOP_LAG_NS):.0f} ms "
            f"(p99 {p99_ms(lags)} ms); refills of a closed loop and timeout checks may have been late by as much. "
            "Its effect on sends and arrival times has its own warnings (sends-delayed, arrival-times-unreliable)",
        )


def _is_stalled(samples: Sequence[ClientSample], limit_ns: float) -> bool:
    """True if event loops were late by more than the limit for more than a hundredth of their time."""
    late_ns = stalled_ns(samples, limit_ns)
    return late_ns >= MIN_HELD_UP_NS and late_ns > HABIT_FRAC * samples_span_ns(samples)


def _full_processors(samples: Sequence[ClientSample]) -> Iterator[ResultWarning]:
    cores = busy_cores(samples)
    full = sorted(used for used in cores.values() if used > MAX_BUSY_FRAC)
    if full:
        yield ResultWarning(
            code="client-cpu",
            message=f"{len(full)} of {len(cores)} processes of the load generator used more than "
            f"{MAX_BUSY_FRAC:.0%} of a core (at most {full[-1]:.0%}): the load may have measured the client's "
            "pace. Lower the load, or use more processes for it",
        )


def _clock_changes(samples: Sequence[ClientSample]) -> Iterator[ResultWarning]:
    if steps := clock_steps(samples):
        times = "once" if len(steps) == 1 else f"{len(steps)} times"
        changes = ", ".join(f"by {by_s:+,.4g} s after {after_s:.1f} s" for after_s, by_s in steps[:_MOST_STEPS])
        more = ", …" if len(steps) > _MOST_STEPS else ""
        yield ResultWarning(
            code="wall-clock-set",
            message=f"the system clock was set {times} during the load ({changes}{more}): the kernel's timestamps "
            "around that time are unusable, and the client's own replace them. Durations are those of a clock that "
            "is never set. Keep the clock of a measuring machine steady",
        )


def _other_transports(requests: Sequence[RequestRecord]) -> Iterator[ResultWarning]:
    num_other = sum(request.route == "httpx" for request in requests)
    num_redirected = sum(request.num_redirects > 0 for request in requests)
    causes = []
    if num_other:
        causes.append(f"{num_other} of {len(requests)} requests used the fallback transport (TLS)")
    if num_redirected:
        causes.append(f"the server redirected {num_redirected} of {len(requests)} requests")
    if causes:
        yield ResultWarning(
            code="other-transport",
            message="; ".join(causes)
            + ": this costs the client more, and its times include it. Name the server's final address, without "
            "TLS on a network that you trust",
        )
