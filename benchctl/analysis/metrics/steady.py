"""The steady window of a load, and the metrics within it.

A closed loop that begins with an empty server measures a burst first, and every load ends with a drain, in which
the batch shrinks. The window leaves out both, by the order in which requests were sent, so that no request is left
out for what became of it:

* The end: requests from the first one on that was still open when the last request was sent. Those before it ended
  under the whole load. A rule by the end of each request would leave out the long ones.
* The beginning: the requests that MSER-5 leaves out of the first-token times or of the times per token, whichever
  are more, at most half. It minimizes the standard error of the mean, whatever the mean is.

Both are multiples of a twentieth of the load: two arms whose windows differ by chance alone mostly have the same.
Steps and throughput are those between the send of the window's first request and of the load's last: after that the
batch shrinks.
"""

from typing import Final, NamedTuple

import numpy as np

from benchctl.analysis.metrics.chunks import Chunks
from benchctl.analysis.metrics.latency import (
    choice_tokens,
    is_completed,
    latency_metrics,
    ms_or_none,
    quotient,
    total,
)
from benchctl.analysis.metrics.table import STEADY
from benchctl.analysis.statistics.trend import BATCH, mser5
from benchctl.profile.objective import SLO_METRICS
from benchctl.records.columns import Flags, Floats, Integers, exact_sum
from benchctl.records.loaded import LoadedRun
from benchctl.units import s_from_ns

MIN_REQUESTS: Final = 200
"""Requests that must have ended under the whole load, or it has no window: at least half of them are in it, which
is 20 means of five."""
_PARTS: Final = 20
"""Parts of a load, of which a window has whole ones."""


class Window(NamedTuple):
    """The steady part of a load."""

    requests: Integers
    """Positions of its completed requests among those of the load, in the order in which they were sent."""
    sent: Integers
    """The same of all its requests."""
    first: int
    """Requests that were sent before the window."""
    end: int
    """The same with those in the window."""
    num_sent: int
    """Requests of the load."""
    start_ns: int
    """Send of the first request of the load, ..."""
    begin_ns: int
    """... of the window ..."""
    end_ns: int
    """... and send of the last one of the load, on the client's clock."""

    def sends_per_s(self, factor: float) -> float | None:
        """Requests that were sent per second from its first one on, with times multiplied by ``factor``."""
        return quotient(self.num_sent - 1 - self.first, s_from_ns(self.end_ns - self.begin_ns) * factor)

    def steps(self, run: LoadedRun) -> Flags:
        """The steps of the load that began in the window; the first one began with the first send."""
        start_ns = run.columns.start_ns
        at_ns = self.start_ns + (start_ns - start_ns.min()) / run.record.clock_factor
        return np.asarray((at_ns >= self.begin_ns) & (at_ns < self.end_ns))


def request_times(chunks: Chunks) -> tuple[Floats, Floats]:
    """First-token time and mean time per token of each request in ns, NaN where it has none."""
    (first_ns, _), sent_ns = chunks.outputs_ns(chunks.t_ns), chunks.sent_ns
    tpots_ns, owners = chunks.tpots_ns(chunks.t_ns)
    counts = np.bincount(owners, minlength=len(sent_ns))
    sums_ns = np.bincount(owners, tpots_ns, len(sent_ns))
    ttft_ns = np.where((first_ns >= 0) & (sent_ns >= 0), first_ns - sent_ns, np.nan)
    return ttft_ns, np.divide(sums_ns, counts, out=np.full(len(sent_ns), np.nan), where=counts > 0)


def steady_window(chunks: Chunks) -> Window | None:
    """The window of a load; None where fewer than ``MIN_REQUESTS`` ended under the whole load."""
    sent_ns, requests = chunks.sent_ns, chunks.requests
    order = np.argsort(sent_ns, kind="stable")[np.count_nonzero(sent_ns < 0) :]
    if len(order) < MIN_REQUESTS:
        return None
    last_ns, stride = int(sent_ns[order[-1]]), BATCH * max(1, round(len(order) / _PARTS / BATCH))
    done_ns = (requests[i].done_ns for i in order.tolist())
    end = [done is None or done > last_ns for done in done_ns].index(True) // stride * stride
    if end < MIN_REQUESTS:
        return None
    series = [each[order[:end]] for each in request_times(chunks)]
    filled = [np.where(np.isnan(each), np.nanmedian(each), each) for each in series if not np.isnan(each).all()]
    first = max((mser5(values, stride) for values in filled), default=0)
    completed = np.array([i for i in order[first:end].tolist() if is_completed(requests[i])], np.int64)
    times_ns = int(sent_ns[order[0]]), int(sent_ns[order[first]]), last_ns
    return Window(completed, order[first:end], first, end, len(order), *times_ns)


def steady_metrics(run: LoadedRun, chunks: Chunks, window: Window | None) -> dict[str, float | None]:
    """The ``steady_*`` metrics of one load with these measured requests, but for those of an objective; all None
    where it has no window.
    """
    metrics = dict[str, float | None]()
    if window is not None:
        is_in = np.isin(np.arange(len(chunks.requests)), window.requests)
        (first_ns, last_ns), sent_ns = chunks.outputs_ns(chunks.t_ns), chunks.sent_ns
        tpots_ns, owners = chunks.tpots_ns(chunks.t_ns)
        is_timed = is_in & (first_ns >= 0)
        latencies = {
            "ttft": (first_ns - sent_ns)[is_timed].tolist(),
            "tpot": tpots_ns[is_in[owners]].tolist(),
            "e2el": (last_ns - sent_ns)[is_timed].tolist(),
        }
        factor = run.record.clock_factor
        metrics = latency_metrics(latencies, len(window.requests), factor)
        metrics["output_throughput"] = _throughput(chunks, window, factor)
        if len(run.columns) and run.record.times_whole_steps:
            steps, in_window = run.columns, window.steps(run)
            for name, is_kind in (("step_ms", in_window), ("decode_step_ms", in_window & steps.in_phase("decode"))):
                metrics[name] = ms_or_none(quotient(exact_sum(steps.dur_ns[is_kind]), int(is_kind.sum())))
    return {steady: metrics.get(name) for name, steady in STEADY.items() if name not in SLO_METRICS}


def _throughput(chunks: Chunks, window: Window, factor: float) -> float | None:
    """Tokens per second of the time of the window. A chunk has those of its choice over its number of chunks."""
    owners = [chunks.requests[i] for i in chunks.request_of.tolist()]
    tokens = [choice_tokens(*pair) for pair in zip(owners, chunks.choices, strict=True)]
    if total(tokens) is None:
        return None
    of_chunk = np.repeat(np.array(tokens, np.float64) / chunks.sizes, chunks.sizes)
    is_in = (chunks.t_ns >= window.begin_ns) & (chunks.t_ns < window.end_ns)
    return quotient(float(of_chunk[is_in].sum()), s_from_ns(window.end_ns - window.begin_ns) * factor)
