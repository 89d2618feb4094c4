"""Did the client see tokens when they were made, or in bursts?

A server that is short of processors makes a token with each step and delivers them several at a time: the client
then sees gaps near zero, and one long gap between two bursts. Its ``itl`` says nothing of the engine, and its
``ttft`` and ``tpot`` hold the delay of the delivery.
"""

from collections.abc import Iterable, Sequence
from statistics import median
from typing import TYPE_CHECKING, Final

from benchctl.analysis.request_timing import is_completed, itls_ns, measured
from benchctl.records.directory import LoadedRun
from benchctl.records.run import RequestRecord, ResultWarning

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from benchctl.records.step_columns import StepColumns

CLIENT_BUNCHING: Final = "client-bunching"
"""Code of the warning that what the client timed says little of the engine."""
SHORT_FRAC: Final = 0.1
"""A gap is short below this fraction of the time that one chunk should take."""
BUNCHED_FRAC: Final = 0.2
"""Share of short gaps from which a run is called bunched. Arrivals without any pace (a Poisson process) have
1 - exp(-0.1) = 9.5 % of them, so that twice as many do not come from irregular steps; and with one gap in five
swallowed, the others are already a quarter too long."""
_MIN_GAPS: Final = 20
"""Fewer gaps say nothing of a run."""
UNEVEN_STEPS: Final = 5.0
"""Steps by which one token in twenty is later than the median token, from which a run is called bunched. A front
end that stands still from time to time makes few short gaps: only those of the burst that follows are short.
Chosen by looking at 29 runs of small models on two cores: 24 with more short gaps than ``BUNCHED_FRAC`` had 6 or
more, of the other five two had 11 and 54 and three had 2.0, 2.3 and 3.3. No run on a GPU has tried it."""


def short_gap_frac(requests: Iterable[RequestRecord], steps: "StepColumns | None" = None) -> float | None:
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
        quick = sorted(steps.dur_ns.tolist())[len(steps) // 10]
        paces = [float(quick)] * len(gaps)
    else:
        paces = [min(mean, median(means)) for mean in means]
    num_short = sum(
        gap < SHORT_FRAC * pace for of_request, pace in zip(gaps, paces, strict=True) for gap in of_request
    )
    return num_short / sum(map(len, gaps))


def delivery_unevenness_steps(requests: Sequence[RequestRecord], steps: "StepColumns") -> float | None:
    """How unevenly tokens travel from engine to client, in mean steps: the p95 of their delays less the median.

    A token's delay is its arrival less the end of the step that made it. Tokens are matched in the order of both
    times; of all ways to match them this one has the least variance. A delay that all share is no unevenness: it
    moves ttft and leaves itl and tpot as they are. None unless both sides count each token and come to the same
    number, on the host's clock.
    """
    chunks = [(c.chunk_ns, c.chunk_tokens) for request in requests for c in request.choices]
    counts = steps.optional("output_tokens")
    if steps.total("output_tokens") is None or counts is None or any(tokens is None for _, tokens in chunks):
        return None
    if steps.clocks != ("host",):
        return None
    import numpy as np  # noqa: PLC0415 - takes longer to import than a short load without steps to judge

    arrived = np.sort(
        _each_token([t for ns, _ in chunks for t in ns], [n for _, each in chunks for n in each or ()])
    )
    made = np.sort(np.repeat(steps.start_ns + steps.dur_ns, counts.astype(np.int64)))
    if not len(made) or len(made) != len(arrived):
        return None
    middle, late = np.percentile(arrived - made, [50, 95])
    return float(late - middle) / float(steps.dur_ns.mean())


def _each_token(times_ns: Sequence[int], num_tokens: Sequence[int]) -> "npt.NDArray[np.int64]":
    import numpy as np  # noqa: PLC0415

    return np.repeat(np.asarray(times_ns, dtype=np.int64), np.asarray(num_tokens, dtype=np.int64))


def bunching_doubts(run: LoadedRun) -> tuple[ResultWarning, ...]:
    """A warning where a run's arrivals are bunched; a simulator's clock has its own measure of lag."""
    if run.record.clock == "virtual":
        return ()
    requests = measured(run.requests)
    steps = run.columns if run.steps and run.record.times_whole_steps else None
    seen = _signs_of_bursts(requests, steps)
    if seen is None:
        return ()
    truth = "step metrics carry the truth" if steps else "wall time and throughput hold, and no steps are known"
    message = (
        f"tokens reached the client in bursts: {seen}, so ttft, itl and tpot of the client are not trustworthy; "
        f"{truth}. Free processors for the server's front end and for the client"
    )
    return (ResultWarning(code=CLIENT_BUNCHING, message=message, where=run.record.run_id),)


def _signs_of_bursts(requests: Sequence[RequestRecord], steps: "StepColumns | None") -> str | None:
    share = short_gap_frac(requests, steps)
    if share is None:
        return None
    if share > BUNCHED_FRAC:
        return f"more than {BUNCHED_FRAC:.0%} of the gaps between chunks are shorter than a tenth of a chunk's time"
    unevenness = None if steps is None else delivery_unevenness_steps(requests, steps)
    if unevenness is not None and unevenness > UNEVEN_STEPS:
        return f"one token in twenty took over {UNEVEN_STEPS:.0f} steps longer to arrive than the median token"
    return None
