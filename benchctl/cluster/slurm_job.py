"""Blocks as an array job of Slurm, which submitit submits: its script, and the task that measures one block."""

import datetime as dt
import logging
import math
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

from benchctl.errors import UsageError
from benchctl.profile.sections import ClusterSettings
from benchctl.records.directory import SUBMISSIONS, ResultDirectory, Submission, read_submissions, write_submission
from benchctl.records.schema import SCHEMA_VERSION
from benchctl.records.writers import owner_of
from benchctl.units import SECONDS_PER_MINUTE

MAX_JOB_NAME: Final = 60
PYTHON_IN_CONTAINER: Final = "python3"
INTERRUPTED: Final = 130
"""Exit code of a block that a signal ended, or that was not begun because the time left is too short."""
_LIMIT_S: Final = 30.0
"""A controller under load answers late; one that is away never does."""
_WARNING: Final = signal.SIGUSR2
"""The signal that Slurm sends before the time limit; submitit asks for it."""
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


def slurm_output(words: Sequence[str], limit_s: float = _LIMIT_S) -> str:
    """The output of a program of Slurm. Raises SlurmCommandError."""
    try:
        done = subprocess.run(
            words, capture_output=True, encoding="utf-8", errors="replace", timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise SlurmCommandError(f"{words[0]} gave no answer in {limit_s:.0f} s") from error
    except OSError as error:
        raise SlurmCommandError(f"{words[0]}: {error.strerror}") from error
    if done.returncode != 0:
        message = " ".join((done.stderr.strip() or done.stdout.strip()).split())
        raise SlurmCommandError(message or f"{words[0]} ended with exit code {done.returncode}")
    return done.stdout


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
        until it has. A task whose time was too short, warned of its limit or not, begins again as the same job; one
        that Slurm ends, as it does by scancel and when another job has precedence, is Slurm's to queue again.
        """
        is_ended = False

        def note_end(_signum: int, _frame: FrameType | None) -> None:
            nonlocal is_ended
            is_ended = True

        for each in (_WARNING, signal.SIGCONT, signal.SIGUSR1):
            signal.signal(each, lambda _signum, _frame: None)
        signal.signal(signal.SIGTERM, note_end)
        code = subprocess.run(self.words, check=False).returncode
        if code == INTERRUPTED and not is_ended:
            self._requeue()
        if code:
            # The exit code of the task is that of the block, for those who look at the job.
            os._exit(code if code > 0 else 128 - code)
        return code

    def _requeue(self) -> None:
        """Ask Slurm to begin this job again, unless it did so as often as it may."""
        job, restarts = os.environ["SLURM_JOB_ID"], int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        if restarts >= self.requeues:
            _LOG.warning(f"the block was cut off by its time limit {restarts + 1} times; it is not tried again")
            return
        try:
            slurm_output(("scontrol", "requeue", job))
            signal.pause()  # Slurm ends this task
        except SlurmCommandError as error:
            _LOG.warning(f"the block was cut off by its time limit, and the job cannot begin again: {error}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayJob:
    """One array of blocks as it is submitted."""

    directory: Path
    """Result directory, absolute, as the nodes see it, too."""
    name: str
    """Name of the experiment."""
    settings: ClusterSettings
    num_gpus: int
    argv: tuple[str, ...]
    """The command that submits, without secrets."""
    options: tuple[str, ...] = ()
    """Further words of the command of each block."""

    def words(self, block: int) -> tuple[str, ...]:
        """The command that measures one block on a node, inside the container where apptainer starts it."""
        settings, directory = self.settings, str(self.directory)
        python = settings.python or (sys.executable if settings.container is None else PYTHON_IN_CONTAINER)
        words = (python, "-m", "benchctl", "run", "--block", str(block), "--into", directory, "--quiet")
        if settings.container is None or settings.container_runtime != "apptainer":
            return words + self.options
        # --nv passes the devices and the driver on; the directory is bound, because only some are by default.
        container = ("apptainer", "exec", "--nv", "--bind", directory, settings.container)
        return container + words + self.options

    def python(self) -> str:
        """The interpreter of the task itself as a word of a shell; with pyxis it is in the container, too."""
        settings = self.settings
        if settings.container is not None and settings.container_runtime == "pyxis":
            return shlex.quote(settings.python or PYTHON_IN_CONTAINER)
        return shlex.quote(settings.python or sys.executable if settings.container is None else sys.executable)

    def parameters(self, num_blocks: int) -> dict[str, Any]:
        """The parameters of submitit for ``num_blocks`` tasks."""
        settings = self.settings
        options = {
            "partition": settings.partition,
            "account": settings.account,
            "qos": settings.qos,
            "cpus_per_task": settings.cpus,
            "mem": None if settings.mem is None else str(settings.mem),
            "constraint": settings.constraint,
            "exclude": settings.exclude,
            "exclusive": settings.exclusive or None,
            "gres": f"gpu:{self.num_gpus}" if self.num_gpus else None,
        }
        # srun takes over neither how files are opened (a job that begins again goes on in its log) nor the cores
        srun_words = ["--open-mode=append"]
        if settings.cpus is not None:
            srun_words.append(f"--cpus-per-task={settings.cpus}")
        if settings.container is not None and settings.container_runtime == "pyxis":
            mount = f"--container-mounts={self.directory}:{self.directory}"
            srun_words += [f"--container-image={settings.container}", mount]
        return {
            **{key: value for key, value in options.items() if value is not None},
            "job_name": f"benchctl-{self.name}"[:MAX_JOB_NAME],
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

        command = f"{self.python()} -u -m submitit.core._submit {shlex.quote(str(folder))}"
        map_count = num_blocks if num_blocks > 1 else None
        return _make_sbatch_string(
            command=command, folder=folder, map_count=map_count, **self.parameters(num_blocks)
        )


def submit_blocks(array: ArrayJob, blocks: Sequence[int]) -> Submission:
    """Submit one task for each block; returns what was submitted, which is also stored in the directory.

    The caller knows that no task of an earlier submission has one of them, so that their tasks take them over.
    Raises UsageError with Slurm's own words where it refuses the job.
    """
    from submitit.core.utils import FailedJobError, FailedSubmissionError  # noqa: PLC0415 - an extra
    from submitit.slurm.slurm import SlurmExecutor  # noqa: PLC0415 - an extra

    moment, results = dt.datetime.now(dt.UTC), ResultDirectory(array.directory)
    folder = _new_folder(array.directory, moment)
    earlier = {f"slurm {task}" for submission in read_submissions(array.directory) for task in submission.tasks}
    tasks = []
    for block in blocks:
        owner = owner_of(results, block)
        is_lost = owner is not None and owner.job in earlier
        words = array.words(block) + (("--take-over",) if is_lost else ())
        tasks.append(BlockTask(words, array.settings.resubmissions))
    executor = SlurmExecutor(folder, python=array.python())
    executor.update_parameters(**array.parameters(len(blocks)))
    try:
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
        submitted_at=moment.isoformat(timespec="seconds").replace("+00:00", "Z"),
        argv=array.argv,
        cluster=array.settings.model_dump(mode="json", exclude_defaults=True),
    )
    write_submission(array.directory, folder, submission)
    return submission


def _new_folder(directory: Path, moment: dt.datetime) -> Path:
    """A new folder for the scripts, pickles and logs of one submission, named by its microsecond."""
    path = directory / SUBMISSIONS / moment.strftime("%Y%m%dT%H%M%S.%fZ")
    try:
        path.mkdir(parents=True)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; submit where files can be written") from error
    return path


def variables_not_passed_on(environment: Sequence[str] | None = None) -> tuple[str, ...]:
    """The variables of this environment that a task must not inherit. Everything else goes along."""
    names = os.environ if environment is None else environment
    return tuple(
        name
        for name in names
        if name in _NOT_PASSED_ON or (name.startswith(_OF_A_JOB) and name not in _OF_THE_CLUSTER)
    )


@contextmanager
def _environment_of_tasks() -> Iterator[None]:
    """Inside, this process has the environment that tasks inherit; ``sbatch`` reads options from it as well."""
    removed = {name: os.environ.pop(name) for name in variables_not_passed_on()}
    try:
        yield
    finally:
        os.environ.update(removed)
