"""Starts a server, knows all its processes and ends them; a program of its own, which outlives nobody.

It adopts orphans (as a child subreaper of Linux), so that every process of the server, whatever session it moves
to, is a descendant of this one. Its standard input is a pipe that only benchctl holds open. The first line is the
launch, a JSON object with the fields of ``Launched``; each later line is a command:

    ready         the server is up: look which shared memory it uses
    stop SECONDS  end all: ask politely, and kill what is left after that time
    done          benchctl has taken care of the log: end

The kernel closes the pipe however benchctl dies; then all is killed, and the log is freed of its secrets here. The
standard output has one JSON object a line: ``{"started": pid, "at_ns": time}`` or ``{"refused": errno}``, then
``{"ended": exit code}`` of the first process, ``{"looked": true}`` after ``ready``, and after ``stop``
``{"survivors": [pid]}``.

Nothing but the standard library is imported before the end, and of that no pathlib, so that it starts at once.
"""

import ctypes
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_POLL_S: Final = 0.01
_READ_BYTES: Final = 1 << 16
_MAPPED: Final = re.compile(rb" (\d+) +/dev/shm/")
"""In ``/proc/<pid>/maps``: the inode of a file, because a semaphore is mapped under another name than it keeps."""


class Launched(NamedTuple):
    """A server, as benchctl asks for it."""

    argv: Sequence[str]
    env: Mapping[str, str]
    raw_log: str
    """Its outputs go to this file, which only its owner may read."""
    log: str | None = None
    """The same without secrets, written at the end."""
    keeps_raw_log: bool = False
    sent: Mapping[str, str] = {}
    """Secrets beside those of the environment, by the names of their variables."""


def _parent_of(pid: int) -> int | None:
    """The parent of a process; None where it has ended.

    A process of which only the first thread has ended looks like a zombie, and holds its port until the others end.
    """
    with suppress(OSError, ValueError):
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        is_zombie, num_threads = fields[0] == b"Z", int(fields[17])
        return None if is_zombie and num_threads <= 1 else int(fields[1])
    return None


def family() -> list[int]:
    """All living descendants of this process."""
    children: dict[int, list[int]] = defaultdict(list)
    for name in os.listdir("/proc"):
        if name.isdigit() and (parent := _parent_of(int(name))) is not None:
            children[parent].append(int(name))
    members = children[os.getpid()]
    for member in members:
        members += children[member]
    return members


def segments() -> dict[int, str]:
    """All shared memory of the machine: the inode and the path of each file."""
    with suppress(OSError), os.scandir("/dev/shm") as entries:  # noqa: S108 - fixed by the system
        return {entry.inode(): entry.path for entry in entries}
    return {}


def mapped_segments(pids: Iterable[int]) -> set[int]:
    """The inodes of the shared memory that these processes use; of one that we may not see, none."""
    inodes = set[int]()
    for pid in pids:
        with suppress(OSError), open(f"/proc/{pid}/maps", "rb") as file:
            inodes.update(map(int, _MAPPED.findall(file.read())))
    return inodes


def _signal_family(number: signal.Signals) -> None:
    for member in family():
        with suppress(OSError):
            os.kill(member, number)


class Supervisor:
    """A server with all its processes."""

    def __init__(self, launched: Launched) -> None:
        self._launched, self._commands = launched, b""
        self._older_segments, self._segments = segments().keys(), set[int]()
        self._prctl = ctypes.CDLL(None).prctl
        self._prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._woken, waking = os.pipe()
        os.set_blocking(waking, False)
        for number in (*_ENDING, signal.SIGCHLD):  # handled, not ignored: the server would inherit that
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(waking)

    def run(self) -> None:
        """Start the server, and follow benchctl's commands to their end, or benchctl's."""
        if not self._start():
            return
        while (command := self._next_command()) is not None:
            if command == "done":
                return
            if command == "ready":
                self._segments |= mapped_segments(family())
                _report(looked=True)
            if command.startswith("stop"):
                _report(survivors=self._end(float(command.partition(" ")[2])))
            self._reap()
        self._end(0.0)
        launched = self._launched
        if launched.log is not None:
            from pathlib import Path  # noqa: PLC0415 - only at the end

            raw_log, log = Path(launched.raw_log), Path(launched.log)
            finish_log(raw_log, log, launched.sent, keeps_raw_log=launched.keeps_raw_log)

    def _start(self) -> bool:
        """Start the first process; False where the system refuses."""
        launched, prctl = self._launched, self._prctl
        at_ns = time.monotonic_ns()
        try:
            log = os.open(launched.raw_log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            os.dup2(log, 2)  # a mistake of ours is told there, too
            self._process = subprocess.Popen(
                launched.argv,
                env=launched.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),  # noqa: PLW1509 - there are no threads
            )
            os.close(log)
        except OSError as error:
            _report(refused=error.errno, of=error.filename)
            return False
        _report(started=self._process.pid, at_ns=at_ns)
        return True

    def _next_command(self) -> str | None:
        """The next line from benchctl; empty where a process ends before it comes, None when benchctl is gone."""
        if b"\n" not in self._commands:
            if not self._wait(0):
                return ""
            piece = os.read(0, _READ_BYTES)
            if not piece:
                return None
            self._commands += piece
        line, _, self._commands = self._commands.partition(b"\n")
        return line.decode()

    def _wait(self, *files: int, limit_s: float | None = None) -> bool:
        """Wait for one of ``files``, or for the end of a process; True if it is one of ``files``."""
        readable, _, _ = select.select([*files, self._woken], [], [], limit_s)
        if self._woken in readable:
            os.read(self._woken, _READ_BYTES)
        return not set(files).isdisjoint(readable)

    def _reap(self) -> bool:
        """Take leave of processes that have ended; False when none is left."""
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self._process.pid:
                    self._process.returncode = os.waitstatus_to_exitcode(ended[1])
                    _report(ended=self._process.returncode)
        except ChildProcessError:
            return False
        return True

    def _end(self, grace_s: float) -> list[int]:
        """End all processes: ask, wait up to ``grace_s``, then kill, and remove the shared memory that they leave.

        Returns those that live on.
        """
        self._segments |= mapped_segments(family())
        deadline = time.monotonic() + grace_s
        _signal_family(signal.SIGTERM)
        while self._reap() and time.monotonic() < deadline:
            self._wait(limit_s=_POLL_S)
        deadline = time.monotonic() + 5.0
        while self._reap() and time.monotonic() < deadline:
            _signal_family(signal.SIGKILL)
            self._wait(limit_s=_POLL_S)
        survivors = family() if self._reap() else []
        for inode, path in segments().items():
            if inode in self._segments - self._older_segments:
                with suppress(OSError):
                    os.unlink(path)
        return survivors


def _report(**event: Any) -> None:
    with suppress(OSError):  # benchctl was killed
        os.write(1, json.dumps(event).encode() + b"\n")


def finish_log(raw_log: "Path", log: "Path", sent: Mapping[str, str], *, keeps_raw_log: bool) -> Mapping[str, int]:
    """Write ``log``, which is ``raw_log`` without its secrets, and delete that unless it is kept.

    Returns the number of secrets by what they are. Raises OSError where the log cannot be written.
    """
    from benchctl.untrusted.secrets import copy_redacted, environment_redactor  # noqa: PLC0415 - only at the end

    try:
        return copy_redacted(raw_log, log, environment_redactor(sent))
    finally:
        if not keeps_raw_log:
            raw_log.unlink(missing_ok=True)


if __name__ == "__main__":
    # Last, so that nothing there stands for the standard library
    sys.path.append(os.path.abspath(os.path.join(__file__, *[".."] * 4)))
    Supervisor(Launched(**json.loads(sys.stdin.buffer.readline()))).run()
    os._exit(0)  # at once: benchctl waits for it
