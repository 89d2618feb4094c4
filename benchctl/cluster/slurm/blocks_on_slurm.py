"""The blocks of one command on their way through Slurm: queued, running, ended, or submitted again.

Files say what became of a block, Slurm only whether its task is still there: a task may end without its block (a
lost node, a time limit), and another process may measure a block while our task gives up.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from benchctl.cluster.slurm.commands import SlurmCommandError
from benchctl.cluster.slurm.submission import ArrayJob, active_tasks, state_of_task, submit_blocks
from benchctl.errors import RecordError
from benchctl.profile.sections import ClusterSettings
from benchctl.records.claims import boot_id, living_owner
from benchctl.records.directory import ResultDirectory, RunDirectory, Submission

POLL_S: Final = 5.0
"""Seconds between two questions to the controller."""
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


class BlocksOnSlurm:
    """Watches tasks and submits blocks again whose task ended without ending them.

    ``on_submit`` is told of each further submission, ``on_problem`` in words when the controller is not reached.
    """

    def __init__(
        self,
        results: ResultDirectory,
        array: ArrayJob,
        tasks: Mapping[str, int],
        *,
        on_submit: Callable[[Submission], None],
        on_problem: Callable[[str], None],
    ) -> None:
        self._results = results
        self._array = array
        self._tasks = dict(tasks)
        self._waiting = set(tasks.values())
        self._ended_before = {block for block in self._waiting if self._has_ended(block)}
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
        return not self._waiting

    @property
    def settings(self) -> ClusterSettings:
        """The settings of its jobs."""
        return self._array.settings

    @property
    def jobs(self) -> tuple[str, ...]:
        """Numbers of the jobs that have tasks left."""
        return tuple(dict.fromkeys(task.partition("_")[0] for task in self._tasks))

    def look(self) -> None:
        """Ask the queue, if it was not asked a moment ago, and see to the blocks whose tasks are gone."""
        now_s = time.monotonic()
        if now_s - self._asked_s < POLL_S:
            return
        self._asked_s = now_s
        self._look_at_queue()
        missing = dict[int, str]()
        for block in sorted(self._waiting):
            tasks = [task for task, its in self._tasks.items() if its == block]
            num_absent = min(self._absent[task] for task in tasks)
            # While a task is there, the end of a block that had ended before is that of its earlier attempt.
            if (num_absent or block not in self._ended_before) and self._has_ended(block):
                self._waiting.discard(block)
            elif num_absent >= _LOOKS_UNTIL_GONE and not self._is_measured(block):
                missing[block] = tasks[-1]
        if missing:
            self._see_to(missing)

    def _is_measured(self, block: int) -> bool:
        """A process has the block that is not one of the tasks that are gone, or that lives on this machine."""
        owner = living_owner(self._results, block)
        of_tasks = {f"slurm {task}" for task in self._tasks}
        return owner is not None and (owner.boot_id == boot_id() or owner.job not in of_tasks)

    def _has_ended(self, block: int) -> bool:
        """Every run of the block has ended, for better or worse."""
        return all(
            _has_ended(self._results.run(planned.run_id))
            for planned in self._results.due_plan().runs
            if planned.block == block
        )

    def _look_at_queue(self) -> None:
        try:
            active = active_tasks()
        except SlurmCommandError as error:
            if str(error) != self._problem:
                self._on_problem(f"the queue cannot be read, it is tried again: {error}")
            self._problem = str(error)
            return
        self._problem = ""
        for task in self._tasks:
            self._absent[task] = 0 if task in active else self._absent[task] + 1

    def _see_to(self, missing: Mapping[int, str]) -> None:
        """Submit the blocks again, but for those that somebody cancelled or that were lost too often."""
        again = []
        for block, task in missing.items():
            state = state_of_task(task)
            if state is not None and state not in _GONE:
                continue  # while a job is queued again, the queue may not show it
            if state == _CANCELLED:
                self.cancelled.add(block)
                self._waiting.discard(block)
            elif self._submitted[block] >= self._array.settings.resubmissions:
                self.given_up[block] = task
                self._waiting.discard(block)
            else:
                again.append(block)
        if again:
            submission = submit_blocks(self._array, sorted(again))
            self._submitted.update(again)
            self._forget(again)
            self._tasks.update(submission.tasks)
            self._on_submit(submission)

    def _forget(self, blocks: Iterable[int]) -> None:
        for task in [task for task, block in self._tasks.items() if block in set(blocks)]:
            del self._tasks[task]
            del self._absent[task]


def _has_ended(run: RunDirectory) -> bool:
    try:
        return run.is_begun() and run.read().has_ended
    except RecordError:
        return False
