"""The node on which a run is measured."""

import os
import platform


def node_name() -> str:
    """The name of this node in its cluster, or of the host."""
    return os.environ.get("SLURMD_NODENAME") or platform.node()


def job_name() -> str | None:
    """The job of the scheduler that runs us, such as ``slurm 17_3``; None outside of one."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    if array and task:
        return f"slurm {array}_{task}"
    job = os.environ.get("SLURM_JOB_ID")
    return f"slurm {job}" if job else None
