"""Did the client see tokens when they were made, or in bursts?

* A server that is short of processors makes a token with each step and delivers them when it gets a turn: the
  client then sees gaps near zero, and one long gap between two bursts. Its ``itl`` says nothing of the engine, and
  its ``ttft`` and ``tpot`` hold the delay of the delivery.
* A client that reads late sees the same, whatever the server did.
* A server that always writes the same number of tokens at once does so on purpose. ``ttft`` and ``tpot`` are what a
  user has of it, and ``itl`` is that of writes: nothing to distrust, and a thing to know.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain, pairwise
from statistics import median
from typing import TYPE_CHECKING, Final

from benchctl.analysis.metrics.arrival_errors import arrival_errors, num_chunks_per_write
from benchctl.analysis.metrics.request_timing import is_completed, itls_ns, measured
from benchctl.records.loaded import LoadedRun
from benchctl.records.record import ResultWarning
from benchctl.records.request import RequestRecord

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from benchctl.records.columns.step_columns import StepColumns

CLIENT_BUNCHING: Final = "client-bunching"
"""Code of the warning that what the client timed says little of the engine."""
SERVER_COALESCING: Final = "server-coalescing"
"""Code of the note that the server writes several chunks at once, and always as many."""
SHORT_FRAC: Final = 0.1
"""A gap is short below this fraction of the time that one chunk should take."""
BUNCHED_FRAC: Final = 0.2
"""Share of short gaps from which a run is called bunched. Arrivals without any pace (a Poisson process) have
1 - exp(-0.1) = 9.5 % of them, so that twice as many do not come from irregular steps; and with one gap in five
swallowed, the others are already a quarter too long."""
_MIN_GAPS: Final = 20
"""Fewer gaps say nothing of a run."""
REGULAR_FRAC: Final = 0.8
"""Share of the writes that hold the same number of chunks where that number is the server's choice."""
_MIN_WRITES: Final = 10
"""Fewer writes show no choice."""
UNEVEN_STEPS: Final = 5.0
"""Steps by which one token in twenty is later than the median token, from which a run is called bunched. A front
end that stands still from time to time makes few short gaps: only those of the burst that follows are short.
Chosen by looking at 29 runs of small models on two cores: 24 with more short gaps than ``BUNCHED_FRAC`` had 6 or
more, of the other five two had 11 and 54 and three had 2.0, 2.3 and 3.3. No run on a GPU has tried it."""


def short_gap_frac(requests: Iterable[RequestRecord], steps: "StepColumns | None" = None) -> float | None:
    """Share of the gaps between successive chunks of a choice that are shorter than a tenth of a chunk's own time.

    None for fewer than 20 gaps.
    """
    gaps = _gaps_ns(requests)
    if sum(map(len, gaps)) < _MIN_GAPS:
        return None
    return _num_short(gaps, _paces_ns(gaps, steps)) / sum(map(len, gaps))


def _gaps_ns(requests: Iterable[RequestRecord]) -> list[Sequence[int]]:
    return [found for request in requests if is_completed(request) and (found := itls_ns(request))]


def _paces_ns(gaps: Sequence[Sequence[int]], steps: "StepColumns | None") -> list[float]:
    """The time that one chunk of each request should take.

    Where steps are known, that is a quick step (the tenth percentile), because no choice gets two chunks within
    one. Elsewhere it is the mean gap of the request, which contains all its bursts, but at most the median of these
    means over the requests: a single request that was held up has a mean that says nothing of its pace. Chunks of
    several tokens have long gaps and count as chunks.
    """
    if steps:
        quick = sorted(steps.dur_ns.tolist())[len(steps) // 10]
        return [float(quick)] * len(gaps)
    means = [sum(of_request) / len(of_request) for of_request in gaps]
    return [min(mean, median(means)) for mean in means]


def _num_short(gaps: Sequence[Sequence[int]], paces_ns: Sequence[float]) -> int:
    return sum(
        gap < SHORT_FRAC * pace for of_request, pace in zip(gaps, paces_ns, strict=True) for gap in of_request
    )


def regular_write(requests: Sequence[RequestRecord], steps: "StepColumns | None" = None) -> int | None:
    """How many chunks of a choice arrive at once, where nearly always as many do; None where that varies.

    Chunks that follow each other within a tenth of a chunk's time arrive at once. The last of each choice are what
    is left, and do not count.
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


def bunching_warnings(run: LoadedRun) -> tuple[ResultWarning, ...]:
    """A warning where a run's arrivals are bunched, or a note where the server writes several chunks at once.

    A simulator's clock has its own measure of lag.
    """
    if run.record.clock == "virtual":
        return ()
    requests = measured(run.requests)
    steps = run.columns if run.steps and run.record.times_whole_steps else None
    size = regular_write(requests, steps) or 1
    if 1 < size <= num_chunks_per_write(requests, run.client) and not _is_uneven(requests, steps, size):
        return (ResultWarning(code=SERVER_COALESCING, message=_coalescing(size), where=run.record.run_id),)
    seen = _signs_of_bursts(requests, steps)
    if seen is None:
        return ()
    truth = "step metrics carry the truth" if steps else "wall time and throughput hold, and no steps are known"
    message = (
        f"tokens reached the client in bursts: {seen}, so ttft, itl and tpot of the client are not trustworthy; "
        f"{truth}. {_who_bunched(run, requests, steps)}"
    )
    return (ResultWarning(code=CLIENT_BUNCHING, message=message, where=run.record.run_id),)


def _coalescing(size: int) -> str:
    return (
        f"the server writes {size} chunks of an answer at once: times of arrivals are right, and so are ttft, tpot "
        f"and e2el; itl is that of writes, none within one and that of {size} chunks between two"
    )


def _who_bunched(run: LoadedRun, requests: Sequence[RequestRecord], steps: "StepColumns | None") -> str:
    """Whether the client read what had come one by one, or the server sent it together."""
    gaps = _gaps_ns(requests)
    errors = arrival_errors(requests, run.client)
    num_read_late = sum(error_ns > 0 for of_request in errors for error_ns in chain(*of_request))
    if 2 * num_read_late > _num_short(gaps, _paces_ns(gaps, steps)):
        return "Most of them waited for the client to read: free processors for the client"
    return "The client read most of them when they came, so that the server sent them so: free processors for it"


def _signs_of_bursts(requests: Sequence[RequestRecord], steps: "StepColumns | None") -> str | None:
    share = short_gap_frac(requests, steps)
    if share is None:
        return None
    if share > BUNCHED_FRAC:
        return f"more than {BUNCHED_FRAC:.0%} of the gaps between chunks are shorter than a tenth of a chunk's time"
    if _is_uneven(requests, steps, 1):
        return f"one token in twenty took over {UNEVEN_STEPS:.0f} steps longer to arrive than the median token"
    return None


def _is_uneven(requests: Sequence[RequestRecord], steps: "StepColumns | None", size: int) -> bool:
    """Whether tokens travel unevenly, beyond the wait of the first of ``size`` chunks for the last of its write."""
    unevenness = None if steps is None else delivery_unevenness_steps(requests, steps)
    return unevenness is not None and unevenness > UNEVEN_STEPS + size / 2 - 0.5
