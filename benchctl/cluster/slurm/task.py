"""The task of one block: what submitit carries to a node as a pickle, and calls there.

The node needs benchctl at the same place as the one that submits, as on a shared disk.
"""

import logging
import os
import signal
import subprocess
from dataclasses import dataclass
from types import FrameType
from typing import Final

from benchctl.cluster.slurm.commands import SlurmCommandError, slurm_output

_LOG: Final = logging.getLogger(__name__)
INTERRUPTED: Final = 130
"""Exit code of a block that a signal ended, or that was not begun because the time left is too short."""
_WARNING: Final = signal.SIGUSR2
"""The signal that Slurm sends before the time limit; submitit asks for it."""


@dataclass(frozen=True, slots=True)
class BlockTask:
    """Measures one block in a process of its own. It holds nothing but paths and numbers."""

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
            _requeue(self.requeues)
        if code:
            # The exit code of the task is that of the block, for those who look at the job.
            os._exit(code if code > 0 else 128 - code)
        return code


def _requeue(most: int) -> None:
    """Ask Slurm to begin this job again, unless it did so ``most`` times."""
    job, restarts = os.environ["SLURM_JOB_ID"], int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    if restarts >= most:
        _LOG.warning(f"the block was cut off by its time limit {restarts + 1} times; it is not tried again")
        return
    try:
        slurm_output(("scontrol", "requeue", job))
        signal.pause()  # Slurm ends this task
    except SlurmCommandError as error:
        _LOG.warning(f"the block was cut off by its time limit, and the job cannot begin again: {error}")
