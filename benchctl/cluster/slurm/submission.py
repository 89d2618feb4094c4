"""Submits blocks of a shared directory as one array job, and knows which of them are still queued."""

import datetime as dt
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchctl.cluster.slurm.commands import SlurmCommandError, slurm_output
from benchctl.cluster.slurm.script import block_words, launcher_python, script_parameters, variables_not_passed_on
from benchctl.cluster.slurm.task import BlockTask
from benchctl.errors import UsageError
from benchctl.profile.sections import ClusterSettings
from benchctl.records.directory import SUBMISSIONS, Submission, read_submissions, write_submission
from benchctl.records.schema import SCHEMA_VERSION
from benchctl.untrusted.files import entry_names


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
    keeps_raw_logs: bool = False

    def parameters(self, num_blocks: int) -> dict[str, Any]:
        """The parameters of submitit."""
        return script_parameters(self.settings, self.name, self.num_gpus, num_blocks, self.directory)


def submit_blocks(array: ArrayJob, blocks: Sequence[int]) -> Submission:
    """Submit one task for each block; returns what was submitted, which is also stored in the directory.

    Raises UsageError with Slurm's own words where it refuses the job.
    """
    from submitit.core.utils import FailedJobError, FailedSubmissionError  # noqa: PLC0415 - an extra
    from submitit.slurm.slurm import SlurmExecutor  # noqa: PLC0415 - an extra

    moment = dt.datetime.now(dt.UTC)
    folder = _new_folder(array.directory, moment)
    tasks = [
        BlockTask(
            words=block_words(array.settings, array.directory, block, keeps_raw_logs=array.keeps_raw_logs),
            requeues=array.settings.resubmissions,
        )
        for block in blocks
    ]
    executor = SlurmExecutor(folder, python=launcher_python(array.settings))
    executor.update_parameters(**array.parameters(len(blocks)))
    try:
        with _environment_of_tasks(), executor.batch():
            jobs = [executor.submit(task) for task in tasks]
    except (FailedJobError, FailedSubmissionError, OSError) as error:
        words = " ".join(str(error).split())
        raise UsageError(
            f"Slurm refused the job: {words}; correct the section cluster of the profile, or give --cluster FILE, "
            f"and continue with: benchctl run --resume {array.directory} --on slurm"
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


def logs_of(directory: Path, task: str) -> tuple[Path, ...]:
    """The logs that a task of this name may have, the newest first; none need exist."""
    folders = sorted(entry_names(directory / SUBMISSIONS, within=directory), reverse=True)
    return tuple(directory / SUBMISSIONS / folder / f"{task}_0_log.out" for folder in folders)


def active_tasks() -> frozenset[str]:
    """The names of this user's tasks that are queued or running. Raises SlurmCommandError."""
    output = slurm_output(("squeue", "--me", "--noheader", "--array", "--format", "%i"))
    return frozenset(output.split())


def state_of_task(task: str) -> str | None:
    """Slurm's word for the state of a task, such as ``CANCELLED``; None where it no longer knows the task."""
    try:
        output = slurm_output(("scontrol", "show", "job", "--oneliner", task))
    except SlurmCommandError:
        return None
    return next((word.partition("=")[2] for word in output.split() if word.startswith("JobState=")), None)


def queued_blocks(directory: Path, active: Iterable[str]) -> dict[str, int]:
    """The blocks of earlier submissions whose tasks are among ``active``, by task."""
    tasks: Mapping[str, int] = {
        task: block for submission in read_submissions(directory) for task, block in submission.tasks.items()
    }
    return {task: tasks[task] for task in active if task in tasks}


def _new_folder(directory: Path, moment: dt.datetime) -> Path:
    """A new folder for the scripts, pickles and logs of one submission, named by its second."""
    stem = moment.strftime("%Y%m%dT%H%M%SZ")
    for name in (stem, *(f"{stem}-{number}" for number in range(2, 1000))):
        path = directory / SUBMISSIONS / name
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}; submit where files can be written") from error
        return path
    raise UsageError(f"{directory / SUBMISSIONS / stem}: a thousand submissions in one second; wait")


@contextmanager
def _environment_of_tasks() -> Iterator[None]:
    """Inside, this process has the environment that tasks inherit; ``sbatch`` reads options from it as well."""
    removed = {name: os.environ.pop(name) for name in variables_not_passed_on()}
    try:
        yield
    finally:
        os.environ.update(removed)
