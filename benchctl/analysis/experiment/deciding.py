"""The primary metrics that decide between two sides: those that the servers of both sides record.

A server without a step log records no ``step_ms``, in any run. Such a metric is left out and named, as if the
profile did not list it: no test counts it, and no stopping rule waits for it. A metric that a server does record,
and that some runs lack, stays: without it the verdict is inconclusive.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

from benchctl.analysis.experiment.experiment import Experiment
from benchctl.analysis.experiment.pairing import CellPair
from benchctl.analysis.metrics.table import OF_STEPS, SERVER_RECORDED
from benchctl.formats import in_a_row
from benchctl.profile.model import Profile, VariantSettings
from benchctl.profile.planning.plan import arms, variant_settings
from benchctl.records.loaded import LoadedRun

NOTHING: Final[frozenset[str]] = frozenset()
_LOST_RECORDS: Final = frozenset(
    {"steps-missing", "steps-damaged", "gpu-sampler-failed", "host-sampler-failed", "prometheus-sampler-failed"}
)
"""Warnings of runs whose records should be there: what these lack is lost, not unrecorded."""


@dataclass(frozen=True, slots=True)
class DecidingMetrics:
    """The metrics that decide, and the primary ones that are left out because a server does not record them."""

    names: tuple[str, ...]
    unrecorded: tuple[str, ...] = ()


def recorded_metrics(primary: Sequence[str], unrecorded: Collection[str]) -> DecidingMetrics:
    """The split of primary metrics by what a side does not record."""
    return DecidingMetrics(
        names=tuple(name for name in primary if name not in unrecorded),
        unrecorded=tuple(name for name in primary if name in unrecorded),
    )


def deciding_between(
    primary: Sequence[str], pair: CellPair, experiments: tuple[Experiment, Experiment]
) -> DecidingMetrics:
    """The metrics of ``primary`` that decide between two measured arms."""
    a, b = experiments
    return recorded_metrics(primary, unrecorded_metrics(a, pair.a_runs) | unrecorded_metrics(b, pair.b_runs))


def deciding_in_plan(
    primary: Sequence[str], profile: Profile, has_steps: Callable[[VariantSettings], bool]
) -> DecidingMetrics:
    """The metrics of ``primary`` that will decide between some pair of arms of a profile that is yet to be
    measured, on an engine of which ``has_steps`` tells where it records steps.
    """
    has_step_log = [(name, has_steps(variant_settings(profile, name, cell))) for name, cell in arms(profile)]
    baseline = any(steps for name, steps in has_step_log if name == profile.baseline)
    others = any(steps for name, steps in has_step_log if name != profile.baseline)
    return recorded_metrics(primary, NOTHING if baseline and others else OF_STEPS)


def unrecorded_text(unrecorded: Sequence[str], deciding: Sequence[str]) -> str:
    """``step_ms is not recorded by this server; tpot_ms and wall_s decide``."""
    verb = "is" if len(unrecorded) == 1 else "are"
    missing = f"{in_a_row(unrecorded)} {verb} not recorded by this server"
    if not deciding:
        return f"{missing}, and no other primary metric is left; name one with --metrics, such as wall_s"
    return f"{missing}; {in_a_row(deciding)} {'decides' if len(deciding) == 1 else 'decide'}"


def unrecorded_metrics(experiment: Experiment, runs: Sequence[LoadedRun]) -> frozenset[str]:
    """The metrics that the server of these runs does not record: no run has them, and none lost its records.

    Only metrics from the server's own records are among them. One that the client measures is never unrecorded.
    """
    if not runs or any(warning.code in _LOST_RECORDS for run in runs for warning in run.record.warnings):
        return NOTHING
    recorded = {name for run in runs for name, value in experiment.metrics(run).items() if value is not None}
    return SERVER_RECORDED - recorded
