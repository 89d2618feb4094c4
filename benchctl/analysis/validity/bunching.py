"""Bursts of tokens at the client, and their cause.

* A server without enough processor time makes a token with each step and delivers several at once: the client sees
  gaps near zero, and one long gap between two bursts. Its ``itl`` does not describe the engine, and ``ttft`` and
  ``tpot`` include the delay of the delivery.
* A client that reads late sees the same, whatever the server did.
* A server that always writes the same number of tokens at once does so on purpose. ``ttft`` and ``tpot`` are those
  of its users, and ``itl`` is the time between writes: a note, not a warning.
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
    from benchctl.records.columns.step_columns import StepColumns

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
    steps = run.columns if run.steps and run.record.times_whole_steps else None
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
