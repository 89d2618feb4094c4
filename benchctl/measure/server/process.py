"""A program that we start with all its processes: nothing of it is left behind, also if one of us is killed.

``supervise.py`` starts it, and is asked and told through two pipes.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

import psutil

from benchctl.measure.server import supervise
from benchctl.measure.server.resources import thread_on
from benchctl.measure.server.supervise import Launched
from benchctl.units import MS_PER_S

_ANSWER_S: Final = 20.0
"""Time for an answer of the supervisor beyond what it waits for."""
_EVENT_BYTES: Final = 1 << 16


class Supervised:
    """A program that runs from the creation of this value to ``stop``, in a session of its own.

    It may use only ``cores``, or with None all that we may use. Raises OSError where it cannot be started, with its
    name or that of its log.
    """

    def __init__(self, launched: Launched, cores: frozenset[int] | None = None) -> None:
        self._events: dict[str, Any] = {}
        self._unread = b""
        self._is_over = False
        with thread_on(cores):
            self._supervisor = subprocess.Popen(
                (sys.executable, "-I", "-S", supervise.__file__),
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=launched.pipes,
            )
        self._tell(json.dumps(launched._asdict()))
        self._await("started", "refused")
        if "started" not in self._events:
            self._end_supervisor()
            number = self._events.get("refused") or 0
            raise OSError(number, os.strerror(number), self._events.get("of"))
        self.pid: int = self._events["started"]
        self.start_ns: int = self._events["at_ns"]

    @property
    def supervisor_pid(self) -> int:
        """The parent of all its processes, directly or not."""
        return self._supervisor.pid

    @property
    def returncode(self) -> int | None:
        """The exit code of its first process; None while that lives."""
        self._take_events()
        code: int | None = self._events.get("ended")
        return code

    def wait(self) -> int | None:
        """The exit code of its first process, which is about to end; None where it does not."""
        self._await("ended")
        return self.returncode

    @property
    def lost(self) -> Sequence[str]:
        """The essential processes that have gone, by id and title."""
        self._take_events()
        lost: Sequence[str] = self._events.get("lost", ())
        return lost

    @property
    def supervisor_end(self) -> int | None:
        """The exit code of the supervisor where something else has ended it; None while it lives."""
        self._take_events()
        return self._supervisor.wait(_ANSWER_S) if self._is_over and self._supervisor.stdin is not None else None

    def is_ready(self) -> None:
        """Tell the supervisor that the program has started its processes: it looks for new ones less often."""
        self._tell("ready")

    def stop(self, grace_s: float) -> tuple[Sequence[int], Sequence[str]]:
        """End all processes, those that remain after ``grace_s`` with force; done at most once.

        Returns the processes that live on and the paths of the shared memory that is still there.
        """
        self._tell(f"stop {grace_s}")
        self._await("survivors", limit_s=grace_s + _ANSWER_S)
        if "survivors" not in self._events:  # it was killed or stopped: the kernel ends the first process with it
            self._supervisor.kill()
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        self._tell("done")
        self._end_supervisor()
        return self._events.get("survivors", ()), self._events.get("segments", ())

    def _tell(self, line: str) -> None:
        if self._supervisor.stdin is not None:
            with suppress(OSError):  # it has ended
                self._supervisor.stdin.write(f"{line}\n".encode())

    def _await(self, *names: str, limit_s: float = _ANSWER_S) -> None:
        """Wait for an event with one of these names, or for the end of the supervisor."""
        deadline = time.monotonic() + limit_s
        while not (self._is_over or self._events.keys() & set(names)) and time.monotonic() < deadline:
            self._take_events(deadline - time.monotonic())

    def _take_events(self, limit_s: float = 0.0) -> None:
        """Take in what the supervisor has said, waiting up to ``limit_s`` for it."""
        output = self._supervisor.stdout
        if output is None or output.closed:
            return
        poll = select.poll()  # files may have numbers that are too high for select
        poll.register(output, select.POLLIN)
        while not self._is_over and poll.poll(max(limit_s, 0.0) * MS_PER_S):
            piece, limit_s = os.read(output.fileno(), _EVENT_BYTES), 0.0
            self._is_over = not piece
            *lines, self._unread = (self._unread + piece).split(b"\n")
            for line in lines:
                self._events |= json.loads(line)

    def _end_supervisor(self) -> None:
        try:
            self._supervisor.wait(_ANSWER_S)
        except subprocess.TimeoutExpired:
            self._supervisor.kill()
            self._supervisor.wait()
        for pipe in (self._supervisor.stdin, self._supervisor.stdout):
            if pipe is not None:
                pipe.close()


def descendants(pid: int) -> list[psutil.Process]:
    """The living processes that a process has started, directly or not."""
    with suppress(psutil.NoSuchProcess):
        return [process for process in psutil.Process(pid).children(recursive=True) if is_alive(process)]
    return []


def is_alive(process: psutil.Process) -> bool:
    """True when this very process (not a later one of the same id) still runs.

    A zombie does not, unless only its first thread has ended: such a process looks like a zombie, cannot be reaped
    and holds its port until its other threads have ended, too.
    """
    try:
        if not process.is_running():
            return False
        return process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1
    except psutil.NoSuchProcess:
        return False
