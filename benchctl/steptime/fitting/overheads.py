"""Time of a request outside its steps, from the server's own timestamps.

    before the queue = mean(queued - arrived)
    after the last step = a + b * output tokens, by non-negative least squares on departed - finished

Waiting in the queue and the steps themselves are left out: a simulator yields the one and the step-time model the
other. Published models that fit first-token and last-token intervals count both twice.
"""

import numpy as np

from benchctl.errors import UsageError
from benchctl.steptime.fitting.least_squares import Floats
from benchctl.steptime.model import RequestOverheads


def fit_overheads(
    arrived_us: Floats, queued_us: Floats, finished_us: Floats, departed_us: Floats, output_tokens: Floats
) -> RequestOverheads:
    """The overheads of these requests, times in microseconds of one clock. Raises UsageError without requests."""
    if not len(arrived_us):
        raise UsageError("no request has all timestamps; overheads need at least one that completed")
    columns = np.column_stack([np.ones(len(output_tokens)), output_tokens])
    scale = np.sqrt(np.mean(columns**2, axis=0))
    scale = np.where(scale > 0, scale, 1.0)
    from scipy.optimize import nnls  # noqa: PLC0415 - 0.1 s, which what fits nothing does without

    after = nnls(columns / scale, np.maximum(departed_us - finished_us, 0.0))[0] / scale
    return RequestOverheads(
        arrival_us=float(np.mean(queued_us - arrived_us)),
        departure_us=float(after[0]),
        departure_us_per_token=float(after[1]),
        num_requests=len(arrived_us),
    )
