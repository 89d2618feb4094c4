"""Signs that a run was offered more than its server could serve.

Two of these five make a run saturated, by the rule of the published calibration protocol. Its requests then say how
the queue behaves, and a fit leaves its steps out: not every log counts preemption and what is computed again.

* more than 5 % of the requests failed
* first-token times grow with the time of sending: a line with R^2 above 0.5
* more preemptions than 15 % of the requests
* the median of ``ttft`` in the last fifth of the requests is more than twice that in the first
* P99 of ``e2el`` is more than ten times P50
"""

from collections.abc import Iterator
from typing import Final

import numpy as np

from benchctl.analysis.metrics.latency import e2el_ns, is_completed, measured, ttft_ns
from benchctl.records.loaded import LoadedRun
from benchctl.records.record import RequestRecord
from benchctl.steptime.step_counts import Floats

NUM_SIGNS: Final = 2
_MIN_REQUESTS: Final = 20
"""Fewer have neither a trend nor a tail."""
_MAX_FAILED_FRAC: Final = 0.05
_MIN_R_SQUARED: Final = 0.5
_MAX_PREEMPTED_FRAC: Final = 0.15
_MAX_GROWTH: Final = 2.0
_MAX_TAIL: Final = 10.0


def saturation(run: LoadedRun) -> str | None:
    """The signs of a saturated run as one sentence; None for one with fewer than two."""
    signs = tuple(saturation_signs(run))
    return f"saturated: {', '.join(signs)}" if len(signs) >= NUM_SIGNS else None


def saturation_signs(run: LoadedRun) -> Iterator[str]:
    """Each sign that a run shows."""
    requests = measured(run.requests)
    if len(requests) < _MIN_REQUESTS:
        return
    completed = [request for request in requests if is_completed(request)]
    failed_frac = 1.0 - len(completed) / len(requests)
    if failed_frac > _MAX_FAILED_FRAC:
        yield f"{failed_frac:.0%} of the requests failed"
    preempted = run.columns.optional("preempted")
    preempted_frac = 0.0 if preempted is None else float(np.nansum(preempted)) / len(requests)
    if preempted_frac > _MAX_PREEMPTED_FRAC:
        yield f"{preempted_frac:.2g} preemptions a request"
    if len(completed) >= _MIN_REQUESTS:
        yield from _trends(completed)


def _trends(completed: list[RequestRecord]) -> Iterator[str]:
    times = [(request.sent_ns, ttft_ns(request), e2el_ns(request)) for request in completed]
    rows = np.array([row for row in times if None not in row], dtype=np.float64)
    if len(rows) < _MIN_REQUESTS:
        return
    sent, ttft, e2el = rows[np.argsort(rows[:, 0], kind="stable")].T
    if _r_squared_of_growth(sent, ttft) > _MIN_R_SQUARED:
        yield "first tokens come later and later"
    fifth = len(rows) // 5
    growth = float(np.median(ttft[-fifth:]) / max(np.median(ttft[:fifth]), 1.0))
    if growth > _MAX_GROWTH:
        yield f"the last fifth waits {growth:.3g} times as long for its first token"
    tail = float(np.quantile(e2el, 0.99) / max(np.median(e2el), 1.0))
    if tail > _MAX_TAIL:
        yield f"P99 of the latency is {tail:.3g} times its median"


def _r_squared_of_growth(x: Floats, y: Floats) -> float:
    """R^2 of the line through the points if it rises, else 0."""
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return 0.0
    correlation = float(np.corrcoef(x, y)[0, 1])
    return correlation**2 if correlation > 0 else 0.0
