"""Did the client see tokens when they were made, or in bursts?

A server that is short of processors makes a token with each step and delivers them several at a time: the client
then sees gaps near zero, and one long gap between two bursts. Its ``itl`` says nothing of the engine, and its
``ttft`` and ``tpot`` hold the delay of the delivery.
"""

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Final

from benchctl.analysis.request_timing import is_completed, itls_ns, measured
from benchctl.records.directory import LoadedRun
from benchctl.records.run import RequestRecord, ResultWarning, StepRecord

SHORT_FRAC: Final = 0.1
"""A gap is short below this fraction of the time that one chunk should take."""
BUNCHED_FRAC: Final = 0.2
"""Share of short gaps from which a run is called bunched. Arrivals without any pace (a Poisson process) have
1 - exp(-0.1) = 9.5 % of them, so that twice as many do not come from irregular steps; and with one gap in five
swallowed, the others are already a quarter too long."""
_MIN_GAPS: Final = 20
"""Fewer gaps say nothing of a run."""


def short_gap_frac(requests: Iterable[RequestRecord], steps: Sequence[StepRecord] = ()) -> float | None:
    """Share of the gaps between successive chunks of a choice that are shorter than a tenth of a chunk's own time.

    Where steps are known, that time is a quick step (the tenth percentile), because no choice gets two chunks
    within one. Elsewhere it is the mean gap of the request, which contains all its bursts, but at most the median
    of these means over the requests: a single request that was held up has a mean that says nothing of its pace.
    Chunks of several tokens have long gaps and count as chunks. None for fewer than 20 gaps.
    """
    gaps = [found for request in requests if is_completed(request) and (found := itls_ns(request))]
    if sum(map(len, gaps)) < _MIN_GAPS:
        return None
    means = [sum(of_request) / len(of_request) for of_request in gaps]
    if steps:
        quick = sorted(step.dur_ns for step in steps)[len(steps) // 10]
        paces = [float(quick)] * len(gaps)
    else:
        paces = [min(mean, median(means)) for mean in means]
    num_short = sum(
        gap < SHORT_FRAC * pace for of_request, pace in zip(gaps, paces, strict=True) for gap in of_request
    )
    return num_short / sum(map(len, gaps))


def bunching_doubts(run: LoadedRun) -> tuple[ResultWarning, ...]:
    """A warning where a run's arrivals are bunched; a simulator's clock has its own measure of lag."""
    if run.record.clock == "virtual":
        return ()
    steps = measured(run.steps)
    share = short_gap_frac(measured(run.requests), steps)
    if share is None or share <= BUNCHED_FRAC:
        return ()
    truth = "step metrics carry the truth" if steps else "wall time and throughput hold, and no steps are known"
    message = (
        f"tokens reached the client in bursts: more than {BUNCHED_FRAC:.0%} of the gaps between chunks are shorter "
        f"than a tenth of a chunk's time, so ttft, itl and tpot of the client are not trustworthy; {truth}. Free "
        "processors for the server's front end and for the client"
    )
    return (ResultWarning(code="client-bunching", message=message, where=run.record.run_id),)
