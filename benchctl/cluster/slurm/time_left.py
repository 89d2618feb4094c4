"""The time that a task of Slurm has left, by which it decides whether to begin a run."""

import os
import time
from collections.abc import Callable, Mapping
from typing import Final

from benchctl.cluster.slurm.commands import SlurmCommandError, slurm_output
from benchctl.profile.sections import scheduler_seconds

_LIMIT_S: Final = 10.0


def slurm_time_left_s(environment: Mapping[str, str] = os.environ) -> float | None:
    """Seconds until Slurm ends the job of this process; None outside of a job, and where it has no limit.

    The controller is asked, because the clock of a node may be wrong.
    """
    job = environment.get("SLURM_JOB_ID")
    if not job:
        return None
    try:
        left = scheduler_seconds(slurm_output(("squeue", "--noheader", "--jobs", job, "--format", "%L"), _LIMIT_S))
    except SlurmCommandError:
        return None
    return None if left is None else float(left)


def time_left_in_job(environment: Mapping[str, str] = os.environ) -> Callable[[], float | None]:
    """A function that tells the seconds left of this job, as ``slurm_time_left_s`` does.

    Where the controller cannot be asked, as in a container without Slurm's programs, it is the length of the job
    less the time since this call: begin and end are both by the controller's clock.
    """
    began_s, length_s = time.monotonic(), _job_length_s(environment)

    def left_s() -> float | None:
        asked_s = slurm_time_left_s(environment)
        if asked_s is not None or length_s is None:
            return asked_s
        return length_s - (time.monotonic() - began_s)

    return left_s


def _job_length_s(environment: Mapping[str, str]) -> float | None:
    """Seconds from the begin of this job to its end; None where Slurm (before 23.02) does not say."""
    try:
        begin_s, end_s = (float(environment[f"SLURM_JOB_{name}_TIME"]) for name in ("START", "END"))
    except (KeyError, ValueError):
        return None
    return end_s - begin_s
