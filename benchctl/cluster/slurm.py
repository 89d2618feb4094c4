"""Questions to Slurm: what this machine lacks, the time left of a job, the tasks of blocks until all have ended.

Files say what became of a block, Slurm only whether its task is still there: a task may end without its block (a
lost node, a time limit), and another process may measure a block while our task gives up.
"""

import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from benchctl.cluster.blocks import has_ended
from benchctl.cluster.slurm_job import ArrayJob, SlurmCommandError, slurm_output, submit_blocks
from benchctl.errors import MissingPackageError, UsageError
from benchctl.measure.doctor.check import Check
from benchctl.profile.sections import scheduler_seconds
from benchctl.records.directory import SUBMISSIONS, ResultDirectory, Submission, read_submissions
from benchctl.records.writers import boot_id, living_owner
from benchctl.untrusted.files import entry_names

PROGRAMS: Final = ("sbatch", "srun", "squeue")
"""Programs of Slurm that a login node needs."""
POLL_S: Final = 5.0
"""Seconds between two questions to the controller."""
_WITHOUT: Final = "without Slurm, '--on local' uses the GPUs of this host, and '--prepare' any other job system"
_LIMIT_S: Final = 10.0
_LOOKS_UNTIL_GONE: Final = 2
"""Looks at which a task is absent before it counts as gone: files of its node may appear late."""
_CANCELLED: Final = "CANCELLED"
_GONE: Final = frozenset(
    {
        _CANCELLED,
        "BOOT_FAIL",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "TIMEOUT",
    }
)
"""Slurm's states of jobs that do not run again."""


def missing_parts() -> dict[str, tuple[str, str]]:
    """Everything that submitting needs and this machine lacks: finding and remedy of each part by its name."""
    missing = {}
    if find_spec("submitit") is None:
        remedy = f"run: {sys.executable} -m pip install submitit"
        missing["submitit"] = ("the package submitit is not installed here", remedy)
    if absent := [program for program in PROGRAMS if shutil.which(program) is None]:
        are = "are" if len(absent) > 1 else "is"
        missing["commands"] = (
            f"{', '.join(absent)} {are} not on PATH, as on a machine that has no Slurm",
            f"log in to a node of the cluster, or load its module ('module load slurm'); {_WITHOUT}",
        )
        return missing
    try:
        slurm_output(("sinfo", "--noheader", "--format", "%P"), _LIMIT_S)
    except SlurmCommandError as error:
        missing["controller"] = (
            f"the controller of Slurm does not answer: {error}",
            "check SLURM_CONF, or ask those who run the cluster ('scontrol ping' shows the controller)",
        )
    return missing


def require_slurm() -> None:
    """Raise UsageError that names everything that is missing; MissingPackageError where it is only the package."""
    missing = missing_parts()
    if list(missing) == ["submitit"]:
        raise MissingPackageError(["submitit"], "blocks cannot be submitted to Slurm")
    if missing:
        lines = (f"--on slurm cannot be used here: {finding}; {remedy}" for finding, remedy in missing.values())
        raise UsageError("\n".join(lines))


def slurm_checks() -> tuple[Check, ...]:
    """The rows of ``benchctl doctor``: whether blocks can be submitted from here."""
    if missing := missing_parts():
        return tuple(
            Check(
                topic="cluster",
                name=f"slurm {name}",
                finding=f"no --on slurm: {finding}",
                remedy=remedy,
                is_missing=True,
            )
            for name, (finding, remedy) in missing.items()
        )
    version = slurm_output(("sinfo", "--version")).strip()
    partitions = slurm_output(("sinfo", "--noheader", "--format", "%P")).split()
    names = tuple(dict.fromkeys(partition.rstrip("*") for partition in partitions))
    finding = f"{version}, partitions {', '.join(names) or 'none'}"
    return (Check(topic="cluster", name="slurm", finding=finding, facts={"version": version, "partitions": names}),)


def time_left_in_job(environment: Mapping[str, str] = os.environ) -> Callable[[], float | None]:
    """A function that tells the seconds until Slurm ends the job of this process; None outside of a job, and where
    it has no limit.

    The controller is asked, because the clock of a node may be wrong. Where that is impossible, as in a container
    without Slurm's programs, it is the length of the job less the time since this call.
    """
    job, began_s = environment.get("SLURM_JOB_ID"), time.monotonic()
    begin, end = (environment.get(f"SLURM_JOB_{name}_TIME", "") for name in ("START", "END"))
    length_s = float(end) - float(begin) if begin.isdecimal() and end.isdecimal() else None

    def left_s() -> float | None:
        if not job:
            return None
        try:
            words = ("squeue", "--noheader", "--jobs", job, "--format", "%L")
            return scheduler_seconds(slurm_output(words, _LIMIT_S))
        except SlurmCommandError:
            return None if length_s is None else length_s - (time.monotonic() - began_s)

    return left_s


def logs_of(directory: Path, task: str) -> tuple[Path, ...]:
    """The logs that a task of this name may have, the newest first; none need exist."""
    folders = sorted(entry_names(directory / SUBMISSIONS, within=directory), reverse=True)
    return tuple(directory / SUBMISSIONS / folder / f"{task}_0_log.out" for folder in folders)


def _active_tasks() -> frozenset[str]:
    """The names of this user's tasks that are queued or running. Raises SlurmCommandError."""
    output = slurm_output(("squeue", "--me", "--noheader", "--array", "--format", "%i"))
    return frozenset(output.split())


def _state_of_task(task: str) -> str | None:
    """Slurm's word for the state of a task, such as ``CANCELLED``; None where it no longer knows the task."""
    try:
        output = slurm_output(("scontrol", "show", "job", "--oneliner", task))
    except SlurmCommandError:
        return None
    return next((word.partition("=")[2] for word in output.split() if word.startswith("JobState=")), None)


def queued_blocks(directory: Path) -> dict[str, int]:
    """The blocks of earlier submissions whose tasks are queued or running, by task. Raises SlurmCommandError."""
    active = _active_tasks()
    submitted = (submission.tasks.items() for submission in read_submissions(directory))
    return {task: block for tasks in submitted for task, block in tasks if task in active}


class BlocksOnSlurm:
    """The blocks of one command: queued, running, ended, or submitted again where a task ended without its block.

    ``tasks`` are those that have a block now. ``on_submit`` is told of each further submission, ``on_problem`` in
    words when the controller is not reached.
    """

    def __init__(
        self,
        array: ArrayJob,
        tasks: Mapping[str, int],
        *,
        on_submit: Callable[[Submission], None],
        on_problem: Callable[[str], None],
    ) -> None:
        self.array = array
        self._results = ResultDirectory(array.directory)
        self._task_of = {block: task for task, block in tasks.items()}
        """The newest task of each block that is not over."""
        self._ended_before = {block for block in self._task_of if has_ended(self._results, block)}
        self._absent = Counter[str]()
        self._submitted = Counter[int]()
        self._asked_s = float("-inf")
        self._problem = ""
        self._on_submit = on_submit
        self._on_problem = on_problem
        self.cancelled: set[int] = set()
        """Blocks whose task somebody cancelled; they are not submitted again."""
        self.given_up: dict[int, str] = {}
        """Blocks that were submitted as often as is allowed, with the last task of each."""

    @property
    def is_over(self) -> bool:
        """Every block has ended, or nothing more is done about it."""
        return not self._task_of

    @property
    def jobs(self) -> tuple[str, ...]:
        """Numbers of the jobs that have tasks left."""
        return tuple(dict.fromkeys(task.partition("_")[0] for task in self._task_of.values()))

    def look(self) -> None:
        """Ask the queue, if it was not asked a moment ago, and see to the blocks whose tasks are gone."""
        now_s = time.monotonic()
        if now_s - self._asked_s < POLL_S:
            return
        self._asked_s = now_s
        self._look_at_queue()
        again = []
        for block, task in sorted(self._task_of.items()):
            num_absent = self._absent[task]
            # While a task is there, the end of a block that had ended before is that of its earlier attempt.
            if (num_absent or block not in self._ended_before) and has_ended(self._results, block):
                del self._task_of[block]
            elif num_absent >= _LOOKS_UNTIL_GONE and not self._is_measured(block):
                state = _state_of_task(task)
                if state == _CANCELLED:
                    self.cancelled.add(block)
                    del self._task_of[block]
                elif state is not None and state not in _GONE:
                    continue  # while a job is queued again, the queue may not show it
                elif self._submitted[block] >= self.array.settings.resubmissions:
                    self.given_up[block] = self._task_of.pop(block)
                else:
                    again.append(block)
        if again:
            submission = submit_blocks(self.array, again)
            self._submitted.update(again)
            self._task_of |= {block: task for task, block in submission.tasks.items()}
            self._on_submit(submission)

    def _is_measured(self, block: int) -> bool:
        """A process has the block that lives on this machine, or is none of our tasks, which are all gone."""
        owner = living_owner(self._results, block)
        ours = {f"slurm {task}" for task in self._absent}
        return owner is not None and (owner.boot_id == boot_id() or owner.job not in ours)

    def _look_at_queue(self) -> None:
        try:
            active = _active_tasks()
        except SlurmCommandError as error:
            if str(error) != self._problem:
                self._on_problem(f"the queue cannot be read, it is tried again: {error}")
            self._problem = str(error)
            return
        self._problem = ""
        for task in self._task_of.values():
            self._absent[task] = 0 if task in active else self._absent[task] + 1
