"""Blocks as an array job of Slurm, which submitit submits: its script, the task of a block, and what becomes of it.

Files say what became of a block, Slurm only whether its task is still there: a task may end without its block (a
lost node, a time limit), and another process may measure a block while our task gives up.
"""

import datetime as dt
import logging
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from benchctl.cluster.blocks import has_ended
from benchctl.errors import INTERRUPTED_CODE, UsageError
from benchctl.measure.devices import gpus_of_block
from benchctl.measure.doctor.check import Check
from benchctl.profile.model import Profile
from benchctl.records.directory import SUBMISSIONS, ResultDirectory, Submission, read_submissions, write_submission
from benchctl.records.schema import SCHEMA_VERSION
from benchctl.records.writers import boot_id, living_owner, owner_of
from benchctl.units import SECONDS_PER_MINUTE

MAX_JOB_NAME: Final = 60
_POLL_S: Final = 5.0
"""Seconds between two questions to the controller."""
_WITHOUT: Final = (
    "log in to a node of the cluster, load its module ('module load slurm'), or check SLURM_CONF; without Slurm, "
    "'--on local' uses the GPUs of this host, and '--prepare' any other job system"
)
_LIMIT_S: Final = 30.0
"""A controller under load answers late; one that is away never does."""
_WARNING: Final = signal.SIGUSR2
"""The signal that Slurm sends before the time limit; submitit asks for it."""
_UNKNOWN: Final = "UNKNOWN"
_CANCELLED: Final = "CANCELLED"
_GONE: Final = frozenset(
    {
        _UNKNOWN, _CANCELLED, "BOOT_FAIL", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
        "PREEMPTED", "REVOKED", "TIMEOUT",
    }
)  # fmt: skip
"""States of tasks that do not run again; Slurm forgets those that ended long ago."""
_NOT_PASSED_ON: Final = (
    "CUDA_VISIBLE_DEVICES",
    "NVIDIA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
    "ZE_AFFINITY_MASK",
    "XDG_RUNTIME_DIR",
    "DBUS_SESSION_BUS_ADDRESS",
    "XAUTHORITY",
    "DISPLAY",
)
"""Variables of a login that mean nothing on a node, or another device there."""
_OF_A_JOB: Final = ("SLURM_", "SRUN_", "SUBMITIT_", "PMI_", "PMIX_")
"""Beginnings of variables of the job in which we may run ourselves; ``sbatch`` and ``srun`` would obey them."""
_OF_THE_CLUSTER: Final = frozenset({"SLURM_CONF", "SLURM_CLUSTERS", "SLURM_CONF_SERVER"})
_LOG: Final = logging.getLogger(__name__)


class SlurmCommandError(Exception):
    """A program of Slurm that is absent, fails, or does not answer in time; the message is its own."""


def _output(*words: str) -> str:
    """The output of a program of Slurm. Raises SlurmCommandError."""
    try:
        done = subprocess.run(
            words, capture_output=True, encoding="utf-8", errors="replace", timeout=_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise SlurmCommandError(f"{words[0]} gave no answer in {_LIMIT_S:.0f} s") from error
    except OSError as error:
        raise SlurmCommandError(f"{words[0]}: {error.strerror}") from error
    if done.returncode != 0:
        message = " ".join((done.stderr.strip() or done.stdout.strip()).split())
        raise SlurmCommandError(message or f"{words[0]} ended with exit code {done.returncode}")
    return done.stdout


def slurm_check() -> Check:
    """The row of ``benchctl doctor``: the cluster to which blocks can be submitted, or what is missing here."""
    problem, remedy = "the package submitit is not installed here", f"run: {sys.executable} -m pip install submitit"
    try:
        version = _output("sinfo", "--version").strip()
        listed = _output("sinfo", "--noheader", "--format", "%P").split()
    except SlurmCommandError as error:
        problem, remedy = f"Slurm does not answer: {error}", _WITHOUT
    else:
        if find_spec("submitit") is not None:
            partitions = tuple(dict.fromkeys(partition.rstrip("*") for partition in listed))
            return Check(
                "cluster",
                "slurm",
                f"{version}, partitions {', '.join(partitions) or 'none'}",
                facts={"version": version, "partitions": partitions},
            )
    return Check("cluster", "slurm", f"no --on slurm: {problem}", remedy=remedy, is_missing=True)


def require_slurm() -> None:
    """Raise UsageError that says what is missing."""
    check = slurm_check()
    if check.is_missing:
        raise UsageError(f"{check.finding}; {check.remedy}")


@dataclass(frozen=True, slots=True)
class BlockTask:
    """Measures one block in a process of its own, on a node to which submitit carries this as a pickle.

    It holds nothing but paths and numbers. The node needs benchctl at the same place as the one that submits, as on
    a shared disk.
    """

    words: tuple[str, ...]
    """The command that measures the block, in a container where there is one."""
    requeues: int
    """Times that a task may begin again after its time limit."""

    def __call__(self) -> int:
        """Run the command and return its exit code.

        Signals of the scheduler reach every process of a task, so that the command ends its run by itself; we stay
        until it has. A task that was warned of its time limit begins again as the same job; one that Slurm ends, as
        it does by scancel and when another job has precedence, is Slurm's to queue again.
        """
        ends: list[int] = []
        for each in (_WARNING, signal.SIGCONT, signal.SIGUSR1):
            signal.signal(each, lambda _signum, _frame: None)
        signal.signal(signal.SIGTERM, lambda signum, _frame: ends.append(signum))
        code = subprocess.run(self.words, check=False).returncode
        if code == INTERRUPTED_CODE and not ends:
            self._begin_again()
        if code:
            # The exit code of the task is that of the block, for those who look at the job.
            os._exit(code if code > 0 else 128 - code)
        return code

    def _begin_again(self) -> None:
        """Ask Slurm to begin this job again, unless it did so as often as it may."""
        if int(os.environ.get("SLURM_RESTART_COUNT", "0")) >= self.requeues:
            _LOG.warning("the block was cut off by its time limit as often as cluster.resubmissions allows")
            return
        try:
            _output("scontrol", "requeue", os.environ["SLURM_JOB_ID"])
            signal.pause()  # Slurm ends this task
        except SlurmCommandError as error:
            _LOG.warning(f"the block was cut off by its time limit, and its job cannot begin again: {error}")


@dataclass(frozen=True, slots=True)
class ArrayJob:
    """One array of blocks as it is submitted."""

    directory: Path
    """Result directory, absolute, as the nodes see it, too."""
    profile: Profile
    options: tuple[str, ...] = ()
    """Further words of the command of each block."""

    @property
    def _runtime(self) -> str | None:
        """The program that starts the container; None without one."""
        settings = self.profile.cluster
        return None if settings.container is None else settings.container_runtime

    def words(self, block: int) -> tuple[str, ...]:
        """The command that measures one block on a node, inside the container where apptainer starts it."""
        directory, container = str(self.directory), self.profile.cluster.container
        python = self.profile.cluster.python or (sys.executable if container is None else "python3")
        words = (python, "-m", "benchctl", "run", "--block", str(block), "--into", directory, "--quiet")
        if container is None or self._runtime != "apptainer":
            return words + self.options
        # --nv passes the devices and the driver on; the directory is bound, because only some are by default.
        return ("apptainer", "exec", "--nv", "--bind", directory, container, *words, *self.options)

    def python(self) -> str:
        """The interpreter of the task itself as a word of a shell; with pyxis it is in the container, too."""
        own = self.profile.cluster.python or ("python3" if self._runtime else sys.executable)
        return shlex.quote(sys.executable if self._runtime == "apptainer" else own)

    def parameters(self, num_blocks: int) -> dict[str, Any]:
        """The parameters of submitit for ``num_blocks`` tasks."""
        settings, num_gpus = self.profile.cluster, gpus_of_block(self.profile)
        options = {
            "partition": settings.partition,
            "account": settings.account,
            "qos": settings.qos,
            "cpus_per_task": settings.cpus,
            "mem": None if settings.mem is None else str(settings.mem),
            "constraint": settings.constraint,
            "exclude": settings.exclude,
            "exclusive": settings.exclusive or None,
            "gres": f"gpu:{num_gpus}" if num_gpus else None,
        }
        # srun takes over neither how files are opened (a job that begins again goes on in its log) nor the cores
        srun_words = ["--open-mode=append"]
        if settings.cpus is not None:
            srun_words.append(f"--cpus-per-task={settings.cpus}")
        if self._runtime == "pyxis":
            srun_words += [
                f"--container-image={settings.container}",
                f"--container-mounts={self.directory}:{self.directory}",
            ]
        return {
            **{key: value for key, value in options.items() if value is not None},
            "job_name": f"benchctl-{self.profile.name}"[:MAX_JOB_NAME],
            "time": None if settings.time_s is None else math.ceil(settings.time_s / SECONDS_PER_MINUTE),
            "wckey": None,
            "signal_delay_s": settings.warn_s,
            "array_parallelism": min(settings.parallel or num_blocks, num_blocks),
            "stderr_to_stdout": True,
            "setup": list(settings.setup) or None,
            "srun_args": srun_words,
            "additional_parameters": {"requeue": True},
        }

    def script(self, folder: Path, num_blocks: int) -> str:
        """The text of the script as it is submitted; a single block is a plain job. Raises ImportError."""
        from submitit.slurm.slurm import _make_sbatch_string  # noqa: PLC0415 - there is no public way without Slurm

        return _make_sbatch_string(
            command=f"{self.python()} -u -m submitit.core._submit {shlex.quote(str(folder))}",
            folder=folder,
            map_count=num_blocks if num_blocks > 1 else None,
            **self.parameters(num_blocks),
        )


def submit_blocks(array: ArrayJob, blocks: Sequence[int]) -> Submission:
    """Submit one task for each block; returns what was submitted, which is also stored in the directory.

    The caller knows that no task of an earlier submission has one of them, so that their tasks take them over.
    Raises UsageError with Slurm's own words where it refuses the job.
    """
    from submitit.core.utils import FailedJobError, FailedSubmissionError  # noqa: PLC0415 - an extra
    from submitit.slurm.slurm import SlurmExecutor  # noqa: PLC0415 - an extra

    results = ResultDirectory(array.directory)
    folder = array.directory / SUBMISSIONS / f"{dt.datetime.now(dt.UTC):%Y%m%dT%H%M%S.%fZ}"
    earlier = {f"slurm {task}" for submission in read_submissions(array.directory) for task in submission.tasks}
    tasks = []
    for block in blocks:
        owner = owner_of(results, block)
        is_lost = owner is not None and owner.job in earlier
        tasks.append(
            BlockTask(
                array.words(block) + (("--take-over",) if is_lost else ()), array.profile.cluster.resubmissions
            )
        )
    executor = SlurmExecutor(folder, python=array.python())
    executor.update_parameters(**array.parameters(len(blocks)))
    try:
        folder.mkdir(parents=True)
        with _environment_of_tasks(), executor.batch():
            jobs = [executor.submit(task) for task in tasks]
    except (FailedJobError, FailedSubmissionError, OSError) as error:
        words_of_slurm = " ".join(str(error).split())
        raise UsageError(
            f"Slurm refused the job: {words_of_slurm}; correct the section cluster of the profile, or give "
            f"--cluster FILE, and continue with: benchctl run --resume {array.directory} --on slurm"
        ) from error
    submission = Submission(
        schema_version=SCHEMA_VERSION,
        job=jobs[0].job_id.partition("_")[0],
        tasks={job.job_id: block for job, block in zip(jobs, blocks, strict=True)},
    )
    write_submission(array.directory, folder, submission)
    return submission


def is_passed_on(variable: str) -> bool:
    """False for a variable of this environment that a task must not inherit."""
    return variable not in _NOT_PASSED_ON and not (
        variable.startswith(_OF_A_JOB) and variable not in _OF_THE_CLUSTER
    )


@contextmanager
def _environment_of_tasks() -> Iterator[None]:
    """Inside, this process has the environment that tasks inherit; ``sbatch`` reads options from it as well."""
    removed = {name: os.environ.pop(name) for name in list(os.environ) if not is_passed_on(name)}
    try:
        yield
    finally:
        os.environ.update(removed)


def _states_of_tasks() -> dict[str, str]:
    """Slurm's word for the state of each task of this user that it still knows. Raises SlurmCommandError."""
    lines = _output("squeue", "--me", "--noheader", "--array", "--states", "all", "--format", "%i %T").splitlines()
    return {task: state for task, _, state in (line.partition(" ") for line in lines)}


def _is_gone(states: Mapping[str, str], task: str) -> bool:
    return states.get(task, _UNKNOWN) in _GONE


def queued_blocks(directory: Path) -> dict[str, int]:
    """The blocks of earlier submissions whose tasks are queued or running, by task. Raises SlurmCommandError."""
    states = _states_of_tasks()
    submitted = (submission.tasks.items() for submission in read_submissions(directory))
    return {task: block for tasks in submitted for task, block in tasks if not _is_gone(states, task)}


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
        self._array = array
        self._results = ResultDirectory(array.directory)
        self._task_of = {block: task for task, block in tasks.items()}
        """The newest task of each block that is not over."""
        self._gone = frozenset[str]()
        """Tasks that were gone at the last look."""
        self._submitted = Counter[int]()
        self._asked_s = float("-inf")
        self._problem = ""
        self._on_submit = on_submit
        self._on_problem = on_problem
        self.cancelled: dict[int, str] = {}
        """Blocks whose task somebody cancelled, which is not submitted again, by that task."""
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
        """Ask the queue, if it was not asked a moment ago, and see to the blocks whose tasks are gone.

        One that ended without its block is believed at the second look: files of its node may appear late.
        """
        now_s = time.monotonic()
        if now_s - self._asked_s < _POLL_S:
            return
        self._asked_s = now_s
        try:
            states = _states_of_tasks()
        except SlurmCommandError as error:
            if str(error) != self._problem:
                self._on_problem(f"the queue cannot be read, it is tried again: {error}")
            self._problem = str(error)
            return
        again = []
        gone = {block: task for block, task in self._task_of.items() if _is_gone(states, task)}
        for block, task in sorted(gone.items()):
            if has_ended(self._results, block):
                del self._task_of[block]
            elif task not in self._gone or self._is_measured(block, states):
                continue
            elif states.get(task) == _CANCELLED:
                self.cancelled[block] = self._task_of.pop(block)
            elif self._submitted[block] >= self._array.profile.cluster.resubmissions:
                self.given_up[block] = self._task_of.pop(block)
            else:
                again.append(block)
        self._gone = frozenset(gone.values())
        if again:
            submission = submit_blocks(self._array, again)
            self._submitted.update(again)
            self._task_of |= {block: task for task, block in submission.tasks.items()}
            self._on_submit(submission)

    def _is_measured(self, block: int, states: Mapping[str, str]) -> bool:
        """A process has the block that lives on this machine, or whose task is not gone."""
        owner = living_owner(self._results, block)
        if owner is None or owner.boot_id == boot_id():
            return owner is not None
        return owner.job is None or not _is_gone(states, owner.job.removeprefix("slurm "))
