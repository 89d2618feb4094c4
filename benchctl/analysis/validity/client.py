"""Bursts of tokens at the client, and their cause.

Judges the load client: a load generator that was late or had no processor time measured itself.
Share of the requests in flight that was in the engine's steps, and a warning if it is low.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise
from statistics import fmean, median
from typing import TYPE_CHECKING, Final

import msgspec

from benchctl.analysis.metrics.bounds import bounds_warnings, run_bounds
from benchctl.analysis.metrics.client import (
    HABIT_FRAC,
    MIN_HABIT,
    arrival_errors,
    busy_cores,
    capped_rate,
    clock_steps,
    count_above,
    delayed_sends,
    is_habit,
    missed_rate,
    num_chunks_per_write,
    p99_ms,
    samples_span_ns,
    sends_of,
    stalled_ns,
    unlike_poisson,
)
from benchctl.analysis.metrics.latency import e2el_ns, is_completed, itls_ns, measured
from benchctl.analysis.metrics.slot_occupancy import MIN_LOAD_NS, idle_slots, slot_occupancy
from benchctl.profile.model import Arrival
from benchctl.records.loaded import LoadedRun
from benchctl.records.record import RequestRecord
from benchctl.records.schema import ClientSample, ResultWarning
from benchctl.units import NS_PER_MS, NS_PER_S, ms_from_ns

if TYPE_CHECKING:
    from benchctl.records.columns.columns import StepColumns


CLIENT_BUNCHING: Final = "client-bunching"
"""Code of the warning that the client's times do not describe the engine."""
SERVER_COALESCING: Final = "server-coalescing"
"""Code of the note that the server always writes the same number of chunks at once."""
_CHUNK_TIMED: Final = ("ttft_ms", "itl_ms", "tpot_ms")
"""Endings of the names of metrics that only the client times, chunk by chunk."""
SHORT_FRAC: Final = 0.1
"""A gap is short below this fraction of the expected time per chunk."""
BUNCHED_FRAC: Final = 0.2
"""Share of short gaps above which a run is bunched. Random arrivals (a Poisson process) have 1 - exp(-0.1) = 9.5 %,
so twice as many do not come from irregular steps; and with one gap in five missing, the others are a quarter too
long."""
_MIN_GAPS: Final = 20
"""Fewest gaps that are judged."""
REGULAR_FRAC: Final = 0.8
"""Least share of the writes with the same number of chunks if that number is the server's choice."""
_MIN_WRITES: Final = 10
"""Fewest writes that show a choice."""
UNEVEN_STEPS: Final = 5.0
"""Delay of one token in twenty against the median token, in steps, above which a run is bunched. A front end that
stalls from time to time makes few short gaps: only those of the following burst. Chosen from 29 runs of small
models on two cores: 24 with more short gaps than ``BUNCHED_FRAC`` had 6 or more; of the other five, two had 11 and
54 and three had 2.0, 2.3 and 3.3. Not tried on a GPU."""


def num_bunched(metric: str, runs: Iterable[LoadedRun]) -> int:
    """The runs in which a metric is not that of the engine, because tokens came in bursts; 0 for other metrics than
    those that time chunks.
    """
    if not metric.endswith(_CHUNK_TIMED):
        return 0
    return sum(any(warning.code == CLIENT_BUNCHING for warning in run.record.warnings) for run in runs)


def short_gap_frac(requests: Iterable[RequestRecord], steps: "StepColumns | None" = None) -> float | None:
    """Share of the gaps between successive chunks of a choice that are shorter than a tenth of the time per chunk.

    None for fewer than 20 gaps.
    """
    gaps = _gaps_ns(requests)
    if sum(map(len, gaps)) < _MIN_GAPS:
        return None
    return _num_short(gaps, _paces_ns(gaps, steps)) / sum(map(len, gaps))


def _gaps_ns(requests: Iterable[RequestRecord]) -> list[Sequence[int]]:
    return [gaps for request in requests if is_completed(request) and (gaps := itls_ns(request))]


def _paces_ns(gaps: Sequence[Sequence[int]], steps: "StepColumns | None") -> list[float]:
    """The expected time per chunk of each request.

    With steps it is a quick step (the tenth percentile), because no choice gets two chunks within one step. Without
    it is the mean gap of the request, which includes all its bursts, but at most the median of these means over the
    requests, because the mean of a single delayed request is not its pace.
    """
    if steps:
        return [float(sorted(steps.dur_ns.tolist())[len(steps) // 10])] * len(gaps)
    means = [sum(of_request) / len(of_request) for of_request in gaps]
    return [min(mean, median(means)) for mean in means]


def _num_short(gaps: Sequence[Sequence[int]], paces_ns: Sequence[float]) -> int:
    return sum(
        gap < SHORT_FRAC * pace for of_request, pace in zip(gaps, paces_ns, strict=True) for gap in of_request
    )


def regular_write(requests: Sequence[RequestRecord], steps: "StepColumns | None" = None) -> int | None:
    """Number of chunks of a choice that arrive at once, if it is nearly always the same; otherwise None.

    Chunks that follow each other within a tenth of the time per chunk arrive at once. The last write of each choice
    holds the remainder and does not count.
    """
    gaps = _gaps_ns(requests)
    if not gaps:
        return None
    within_ns = SHORT_FRAC * min(_paces_ns(gaps, steps))
    sizes: Counter[int] = Counter()
    for request in requests:
        for choice in request.choices if is_completed(request) else ():
            sizes.update(_write_sizes(choice.chunk_ns, within_ns)[:-1])
    if sizes.total() < _MIN_WRITES:
        return None
    size, count = sizes.most_common(1)[0]
    return size if count >= REGULAR_FRAC * sizes.total() else None


def _write_sizes(chunk_ns: Sequence[int], within_ns: float) -> list[int]:
    sizes = [1] if chunk_ns else []
    for earlier_ns, later_ns in pairwise(chunk_ns):
        if later_ns - earlier_ns < within_ns:
            sizes[-1] += 1
        else:
            sizes.append(1)
    return sizes


def delivery_unevenness_steps(requests: Sequence[RequestRecord], steps: "StepColumns") -> float | None:
    """Spread of the tokens' delays from engine to client, in mean steps: their p95 less the median.

    A token's delay is its arrival less the end of the step that made it. Tokens are matched in the order of both
    times, which has the least variance of all ways to match them. A common delay does not count: it moves ttft and
    leaves itl and tpot unchanged. None unless both sides count the same number of tokens, on the host's clock.
    """
    choices = [choice for request in requests for choice in request.choices]
    counts = steps.optional("output_tokens")
    if steps.total("output_tokens") is None or counts is None or steps.clocks != ("host",):
        return None
    if any(choice.chunk_tokens is None for choice in choices):
        return None
    import numpy as np  # noqa: PLC0415 - importing takes longer than judging a short load without steps

    chunk_ns = np.array([t_ns for choice in choices for t_ns in choice.chunk_ns], dtype=np.int64)
    chunk_tokens = [tokens for choice in choices for tokens in choice.chunk_tokens or ()]
    arrived = np.sort(np.repeat(chunk_ns, np.array(chunk_tokens, dtype=np.int64)))
    made = np.sort(np.repeat(steps.start_ns + steps.dur_ns, counts.astype(np.int64)))
    if not len(made) or len(made) != len(arrived):
        return None
    middle, late = np.percentile(arrived - made, [50, 95])
    return float(late - middle) / float(steps.dur_ns.mean())


def bunching_warnings(run: LoadedRun) -> tuple[ResultWarning, ...]:
    """A warning if arrivals are bunched, or a note if the server always writes several chunks at once."""
    if run.record.clock == "virtual":
        return ()
    requests = measured(run.requests)
    steps = run.columns if len(run.columns) and run.record.times_whole_steps else None
    size = regular_write(requests, steps) or 1
    if 1 < size <= num_chunks_per_write(requests, run.client) and not _is_uneven(requests, steps, size):
        message = (
            f"the server writes {size} chunks of an answer at once: arrival times, ttft, tpot and e2el are exact; "
            f"itl is 0 within a write, and the time of {size} chunks between two writes"
        )
        return (ResultWarning(code=SERVER_COALESCING, message=message, where=run.record.run_id),)
    signs = _signs_of_bursts(requests, steps)
    if signs is None:
        return ()
    truth = "step metrics are exact" if steps else "wall time and throughput hold, and no steps are known"
    message = (
        f"tokens reached the client in bursts: {signs}, so ttft, itl and tpot of the client are not trustworthy; "
        f"{truth}. {_cause(run, requests, steps)}"
    )
    return (ResultWarning(code=CLIENT_BUNCHING, message=message, where=run.record.run_id),)


def _cause(run: LoadedRun, requests: Sequence[RequestRecord], steps: "StepColumns | None") -> str:
    """The cause of bursts: a client that read late, or a server that sent tokens together."""
    gaps = _gaps_ns(requests)
    errors = arrival_errors(requests, run.client)
    num_read_late = sum(error_ns > 0 for of_request in errors for error_ns in chain(*of_request))
    if 2 * num_read_late > _num_short(gaps, _paces_ns(gaps, steps)):
        return "Most of them waited for the client to read: free processors for the client"
    return (
        "The client read most of them promptly, so the server sent them in bursts: free processors for the server"
    )


def _signs_of_bursts(requests: Sequence[RequestRecord], steps: "StepColumns | None") -> str | None:
    share = short_gap_frac(requests, steps)
    if share is not None and share > BUNCHED_FRAC:
        return f"more than {BUNCHED_FRAC:.0%} of the gaps between chunks are shorter than a tenth of a chunk's time"
    if share is not None and _is_uneven(requests, steps, 1):
        return f"one token in twenty took over {UNEVEN_STEPS:.0f} steps longer to arrive than the median token"
    return None


def _is_uneven(requests: Sequence[RequestRecord], steps: "StepColumns | None", size: int) -> bool:
    """True if delays spread by more than the wait of the first of ``size`` chunks for the last of its write."""
    unevenness = None if steps is None else delivery_unevenness_steps(requests, steps)
    return unevenness is not None and unevenness > UNEVEN_STEPS + size / 2 - 0.5


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


def client_warnings(run: LoadedRun, arrival: Arrival) -> tuple[ResultWarning, ...]:
    """Warnings that leave the run as it is."""
    requests = measured(run.requests)
    sends, is_virtual = sends_of(requests, arrival), run.record.clock == "virtual"
    warnings = (
        *(
            ()
            if is_virtual
            else (
                *bounds_warnings(run_bounds(run)),
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


MIN_IN_STEP_FRAC: Final = 0.7
"""Share below which a run gets the warning. Overhead between steps and on the path to the client is less: it took
6 % with small models on two cores without any waiting."""


def in_step_frac(run: LoadedRun) -> float | None:
    """Time that sequences spent in steps, divided by the time that they were in flight for the client.

    The former is the sum of num_seqs * dur over the steps of the load, the latter that of e2el * choices over its
    completed requests, in sequences times seconds as in Little's law. None without steps or their whole durations,
    on a virtual clock, or if a request failed, whose share of the steps is unknown.
    """
    if not run.record.times_whole_steps:
        return None
    from benchctl.records.columns.columns import exact_sum  # noqa: PLC0415 - numpy, after the load

    requests = measured(run.requests)
    if run.record.clock == "virtual" or not all(is_completed(request) for request in requests):
        return None
    in_flight_ns = sum((e2el_ns(request) or 0) * len(request.choices) for request in requests)
    steps = run.columns
    return exact_sum(steps.dur_ns, steps.num_seqs) / in_flight_ns if in_flight_ns and len(steps) else None


def underfilled_batch_warnings(run: LoadedRun) -> tuple[ResultWarning, ...]:
    """A warning if requests spent much of their time outside the engine's steps."""
    share = in_step_frac(run)
    if share is None or share >= MIN_IN_STEP_FRAC:
        return ()
    message = (
        f"requests spent less than {MIN_IN_STEP_FRAC:.0%} of their time in steps of the engine and waited "
        "elsewhere: in its queue, in a front end without processor time, or in the client. The batch was smaller "
        "than the load, and step times are those of the smaller batch; lower the load below max_num_seqs, or free "
        "processors for the server's front end"
    )
    return (ResultWarning(code="underfilled-batch", message=message, where=run.record.run_id),)
