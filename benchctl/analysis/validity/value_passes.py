"""Warnings of a guided server that did not run its value model as its options say: late recordings, no kernels.

A pass of a size that was not recorded before the first request is recorded in the step that meets it. That takes
many times as long as the pass, so one of them spoils the longest steps of a run, and many its mean.
"""

from typing import Final

from benchctl.records.columns.step_columns import exact_sum
from benchctl.records.loaded import LoadedRun
from benchctl.records.record import ResultWarning
from benchctl.units import s_from_ns

_CONFIG: Final = "server.value_model."


def value_model_warnings(run: LoadedRun) -> tuple[ResultWarning, ...]:
    """Warnings about the value model of this run's server; none where it has none."""
    return (*_late_recordings(run), *_missing_kernels(run))


def _late_recordings(run: LoadedRun) -> tuple[ResultWarning, ...]:
    steps = run.columns
    recordings = steps.optional("value_recordings")
    if recordings is None:
        return ()
    is_late = recordings > 0  # unknown is NaN, which is not
    late_ns, all_ns = exact_sum(steps.dur_ns[is_late]), exact_sum(steps.dur_ns)
    if not is_late.any():
        return ()
    if run.record.effective_config.get("server.value_recording") is False:
        remedy = "set value_recording to true"
    else:
        remedy = "raise max_num_seqs, for which passes are recorded, or num_warmups"
    message = (
        f"{int(is_late.sum())} of {len(steps)} steps of the load recorded {int(recordings[is_late].sum())} passes "
        f"of the value model, of sizes that no step had before; these steps took {s_from_ns(late_ns):.3g} s, "
        f"{late_ns / max(all_ns, 1):.1%} of the time of all; {remedy}"
    )
    return (ResultWarning(code="value-passes-recorded-late", message=message, where=run.record.run_id),)


def _missing_kernels(run: LoadedRun) -> tuple[ResultWarning, ...]:
    """A note for a GPU on which kernels cannot run or compute other values; elsewhere nobody expects them."""
    config = run.record.effective_config
    reason = config.get(f"{_CONFIG}kernels_reason")
    if reason is None or config.get(f"{_CONFIG}device") != "cuda":
        return ()
    message = f"the value model was computed by torch alone, although kernels were wanted: {reason}"
    return (ResultWarning(code="value-kernels-missing", message=message, where=run.record.run_id),)
