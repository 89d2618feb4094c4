"""Share of the requests in flight that was in the engine's steps, and a warning if it is low.

A front end without enough processor time passes requests on late: the client has a dozen in flight, and the engine
steps with one of them. Step times are then those of a small batch, not of the planned one.
"""

from typing import Final

from benchctl.analysis.metrics.request_timing import e2el_ns, is_completed, measured
from benchctl.records.columns.step_columns import exact_sum
from benchctl.records.loaded import LoadedRun
from benchctl.records.record import ResultWarning

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
    requests = measured(run.requests)
    if run.record.clock == "virtual" or not run.steps or not all(is_completed(request) for request in requests):
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
