"""Bursts of tokens at the client, and their cause.

Judges the load client: a load generator that was late or had no processor time measured itself.
Share of the requests in flight that was in the engine's steps, and a warning if it is low.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from operator import sub
from statistics import fmean, median
from typing import TYPE_CHECKING, Final

from benchctl.analysis.metrics.bounds import arrival_errors, late_read_warnings, num_chunks_per_write
from benchctl.analysis.metrics.client import (
    HABIT_FRAC,
    MIN_HABIT,
    busy_cores,
    capped_rate,
    clock_steps,
    count_above,
    delayed_sends,
    is_habit,
    missed_rate,
    p99_ms,
    samples_span_ns,
    sends_of,
    stalled_ns,
    unlike_poisson,
)
from benchctl.analysis.metrics.latency import e2el_ns, is_completed, itls_ns, known_values, measured
from benchctl.analysis.metrics.slot_occupancy import MIN_LOAD_NS, idle_slots, slot_occupancy
from benchctl.profile.model import Arrival
from benchctl.records.loaded import LoadedRun
from benchctl.records.record import RequestRecord
from benchctl.records.schema import ClientSample, ResultWarning
from benchctl.records.warning_codes import warnings_of
from benchctl.units import NS_PER_MS, NS_PER_S, ms_from_ns

if TYPE_CHECKING:
    from benchctl.records.columns import StepColumns


CLIENT_BUNCHING: Final = "client-bunching"
"""Code of the warning that the client's times do not describe the engine."""
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


def count_gaps(requests: Iterable[RequestRecord], steps: "StepColumns | None" = None) -> tuple[int, int]:
    """The numbers of short gaps between successive chunks of a choice, and of all."""
    gaps_ns, limits_ns = _gaps_and_limits(requests, steps)
    pairs = zip(gaps_ns, limits_ns, strict=True)
    return sum(gap < limit for of_request, limit in pairs for gap in of_request), sum(map(len, gaps_ns))


def _gaps_and_limits(
    requests: Iterable[RequestRecord], steps: "StepColumns | None"
) -> tuple[list[Sequence[int]], list[float]]:
    """The gaps of each completed request, in ns, and the duration below which they are short.

    That is a fraction of the expected time per chunk. With steps it is a quick step (the tenth percentile), because
    no choice gets two chunks within one step. Without it is the mean gap of the request, which includes all its
    bursts, but at most the median of these means over the requests, because the mean of a single delayed request is
    not its pace.
    """
    gaps_ns = [gaps for request in requests if is_completed(request) and (gaps := itls_ns(request))]
    paces_ns = [sum(gaps) / len(gaps) for gaps in gaps_ns]
    most_ns = median(paces_ns) if paces_ns else 0.0
    if steps:
        most_ns = float(sorted(steps.dur_ns.tolist())[len(steps) // 10])
        paces_ns = [most_ns] * len(gaps_ns)
    return list(gaps_ns), [SHORT_FRAC * min(pace, most_ns) for pace in paces_ns]


def regular_write(requests: Sequence[RequestRecord], steps: "StepColumns | None" = None) -> int | None:
    """Number of chunks of a choice that arrive at once, if it is nearly always the same; otherwise None.

    Chunks that follow each other within a tenth of the time per chunk arrive at once. The last write of each choice
    holds the remainder and does not count.
    """
    _, limits_ns = _gaps_and_limits(requests, steps)
    sizes: Counter[int] = Counter()
    for request in requests if limits_ns else ():
        for choice in request.choices if is_completed(request) else ():
            gaps_ns = map(sub, choice.chunk_ns[1:], choice.chunk_ns)
            ends = [0, *(i for i, gap in enumerate(gaps_ns, start=1) if gap >= min(limits_ns))]
            sizes.update(map(sub, ends[1:], ends))
    if sizes.total() < _MIN_WRITES:
        return None
    size, count = sizes.most_common(1)[0]
    return size if count >= REGULAR_FRAC * sizes.total() else None


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
        return (ResultWarning(code="server-coalescing", message=message),)
    num_short, num_gaps = count_gaps(requests, steps)
    if num_gaps >= _MIN_GAPS and num_short > BUNCHED_FRAC * num_gaps:
        signs = (
            f"more than {BUNCHED_FRAC:.0%} of the gaps between chunks are shorter than a tenth of a chunk's time"
        )
    elif num_gaps >= _MIN_GAPS and _is_uneven(requests, steps, 1):
        signs = f"one token in twenty took over {UNEVEN_STEPS:.0f} steps longer to arrive than the median token"
    else:
        return ()
    truth = "step metrics are exact" if steps else "wall time and throughput hold, and no steps are known"
    cause = (
        "The client read most of them promptly, so the server sent them in bursts: free processors for the server"
    )
    if 2 * count_above(_all_errors_ns(requests, run.client), 0) > num_short:
        cause = "Most of them waited for the client to read: free processors for the client"
    message = (
        f"tokens reached the client in bursts: {signs}, so ttft, itl and tpot of the client are not trustworthy; "
        f"{truth}. {cause}"
    )
    return (ResultWarning(code=CLIENT_BUNCHING, message=message),)


def _all_errors_ns(requests: Sequence[RequestRecord], samples: Sequence[ClientSample]) -> list[int]:
    """The bounds of the errors of all arrival times that may be wrong."""
    return [error_ns for of_request in arrival_errors(requests, samples) for error_ns in chain(*of_request)]


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
    requests, cores = measured(run.requests), busy_cores(run.client)
    full = [used for used in cores.values() if used > MAX_BUSY_FRAC]
    busy = (
        f"{len(full)} of {len(cores)} processes of the load generator used more than {MAX_BUSY_FRAC:.0%} of a core "
        f"(at most {max(full, default=0):.0%}): the load may have measured the client's pace. Lower the load, or "
        "use more processes for it"
    )
    of_processes = warnings_of(
        {"arrival-times-unreliable": _late_reads(requests, run.client), "client-cpu": busy if full else None}
    )
    return (*_missed_load(requests, arrival), *of_processes)


def client_warnings(run: LoadedRun, arrival: Arrival) -> tuple[ResultWarning, ...]:
    """Warnings that leave the run as it is."""
    requests, is_virtual = measured(run.requests), run.record.clock == "virtual"
    sends = sends_of(requests, arrival)
    return (
        *(() if is_virtual else (*late_read_warnings(run), *unlike_poisson(sends, arrival))),
        *capped_rate(sends, run.record.clock_factor),
        *warnings_of(
            {
                "event-loop-stalls": None if is_virtual else _stalls(run.client),
                "wall-clock-set": _clock_changes(run.client),
                "other-transport": _other_transports(requests),
            }
        ),
    )


def _missed_load(requests: Sequence[RequestRecord], arrival: Arrival) -> Iterator[ResultWarning]:
    """Warnings that the server met a lighter load: from its slots if these are known, otherwise from the sends."""
    occupancy = slot_occupancy(requests, arrival)
    done_ns = known_values(request.done_ns for request in requests)
    load_ns = max(done_ns) - min(request.scheduled_ns for request in requests) if done_ns else 0
    if occupancy is not None and occupancy.idle_frac is not None:
        yield from idle_slots(occupancy, load_ns)
        return
    sends = sends_of(requests, arrival)
    yield from delayed_sends(sends, load_ns)
    yield from missed_rate(sends)


def _late_reads(requests: Sequence[RequestRecord], samples: Sequence[ClientSample]) -> str | None:
    if samples_span_ns(samples) < MIN_LOAD_NS:
        return None
    gaps_ns = [gap_ns for request in requests for gap_ns in itls_ns(request)]
    allowed_ns = max(MAX_STAMP_ERROR_NS, STAMP_ERROR_FRAC * fmean(gaps_ns) if gaps_ns else 0.0)
    choices = [choice for request in requests for choice in request.choices]
    num_chunks = sum(len(choice.chunk_ns) for choice in choices)
    num_unstamped = sum(len(choice.chunk_ns) for choice in choices if choice.chunk_late_ns is None)
    errors_ns = _all_errors_ns(requests, samples)
    num_wrong = count_above(errors_ns, allowed_ns)
    reasons = []
    if is_habit(num_unstamped, num_chunks) and _is_stalled(samples, allowed_ns + TIMER_NS):
        reasons.append(
            f"the client timestamped {num_unstamped} of {num_chunks} chunks itself, without the kernel, and its "
            f"event loop was late (p99 {_p99_lag(samples)} ms): these times may be off by as much"
        )
    if num_wrong >= MIN_HABIT and num_wrong >= MOST_FRAC * num_chunks:
        reasons.append(
            f"{num_wrong} of {num_chunks} chunks were read together with newer ones by a late client, and may have "
            f"arrived more than {ms_from_ns(allowed_ns):.3g} ms before their recorded time (p99 "
            f"{p99_ms(errors_ns)} ms)"
        )
    return "; ".join(reasons) + ". Free processors for the client, or lower the load" if reasons else None


def _stalls(samples: Sequence[ClientSample]) -> str | None:
    if samples_span_ns(samples) < MIN_LOAD_NS or not _is_stalled(samples, MAX_LOOP_LAG_NS):
        return None
    return (
        f"the client's event loop repeatedly stalled for over {ms_from_ns(MAX_LOOP_LAG_NS):.0f} ms "
        f"(p99 {_p99_lag(samples)} ms); refills of a closed loop and timeout checks may have been late by as much. "
        "Its effect on sends and arrival times has its own warnings (sends-delayed, arrival-times-unreliable)"
    )


def _p99_lag(samples: Sequence[ClientSample]) -> str:
    return p99_ms([sample.loop_lag_ns for sample in samples])


def _is_stalled(samples: Sequence[ClientSample], limit_ns: float) -> bool:
    """True if event loops were late by more than the limit for more than a hundredth of their time."""
    late_ns = stalled_ns(samples, limit_ns)
    return late_ns >= MIN_HELD_UP_NS and late_ns > HABIT_FRAC * samples_span_ns(samples)


def _clock_changes(samples: Sequence[ClientSample]) -> str | None:
    steps = clock_steps(samples)
    if not steps:
        return None
    times = "once" if len(steps) == 1 else f"{len(steps)} times"
    changes = ", ".join(f"by {by_s:+,.4g} s after {after_s:.1f} s" for after_s, by_s in steps[:_MOST_STEPS])
    more = ", …" if len(steps) > _MOST_STEPS else ""
    return (
        f"the system clock was set {times} during the load ({changes}{more}): the kernel's timestamps around that "
        "time are unusable, and the client's own replace them. Durations are those of a clock that is never set. "
        "Keep the clock of a measuring machine steady"
    )


def _other_transports(requests: Sequence[RequestRecord]) -> str | None:
    num_other = sum(request.route == "httpx" for request in requests)
    num_redirected = sum(request.num_redirects > 0 for request in requests)
    causes = {
        f"{num_other} of {len(requests)} requests used the fallback transport (TLS)": num_other,
        f"the server redirected {num_redirected} of {len(requests)} requests": num_redirected,
    }
    listed = "; ".join(cause for cause, number in causes.items() if number)
    remedy = (
        "this costs the client more, and its times include it. Name the server's final address, without TLS on a "
        "network that you trust"
    )
    return f"{listed}: {remedy}" if listed else None


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
    from benchctl.records.columns import exact_sum  # noqa: PLC0415 - numpy, after the load

    requests = measured(run.requests)
    if run.record.clock == "virtual" or not all(map(is_completed, requests)):
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
    return (ResultWarning(code="underfilled-batch", message=message),)
