"""Starts a server, knows all its processes and ends them; a program of its own, which outlives nobody.

It adopts orphans (as a child subreaper of Linux), so that every process of the server, whatever session it moves
to, is a descendant of this one. Its standard input is a pipe that only benchctl holds open. The first line is the
launch, a JSON object with the fields of ``Launched``; each later line is a command:

    ready         the server is up: look at its processes less often
    stop SECONDS  end all: ask politely, and kill what is left after that time
    done          benchctl has taken care of the log: end

The kernel closes the pipe however benchctl dies; then all is killed, and the log is freed of its secrets here. The
standard output has one JSON object a line: ``{"started": pid, "at_ns": time}`` or ``{"refused": errno}``, then
``{"ended": exit code}`` of the first process, ``{"lost": ["12 (VLLM::Worker)"]}`` for processes without which the
server cannot work, and after ``stop`` ``{"survivors": [pid], "segments": [path]}``.

Nothing but the standard library is imported before the end, so that it starts at once.
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
from pathlib import Path
from typing import Any, Final, NamedTuple

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_WATCH_S: Final = 0.2
"""Between looks at the essential processes, and at all of them while the server starts or is broken."""
_SCAN_S: Final = 10.0
"""Between looks at all processes of a server that is ready: each reads the table of the whole machine."""
_POLL_S: Final = 0.01
_KILL_S: Final = 5.0
_READ_BYTES: Final = 1 << 16
_TITLE_CHARS: Final = 40
_PROC: Final = Path("/proc")
_SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - fixed by the system
_MAPPED: Final = re.compile(rb" (\d+) +/dev/shm/.*$", re.MULTILINE)
"""A line of ``/proc/<pid>/maps``: the inode of the file, and its name when it was mapped."""


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
    essential: Sequence[str] = ()
    """Parts of the titles of the processes, other than the first, without which the server cannot work."""


class Segments:
    """Shared memory of a server in ``/dev/shm``, from a moment before its start.

    A segment is the server's when one of its processes has mapped or opened it and it is younger than the server.
    Files are compared by inode: names prove nothing, and a semaphore is mapped under another name than it keeps.
    """

    def __init__(self) -> None:
        self._older = _segments()
        self._ours: dict[str, int] = {}

    def scan(self, pids: Iterable[int]) -> None:
        """Look which of the new segments these processes, the server's, use."""
        if fresh := dict(_segments().items() - self._older.items() - self._ours.items()):
            used = {inode for pid in pids for inode in _segments_of(pid)}
            self._ours |= {path: inode for path, inode in fresh.items() if inode in used}

    def left(self) -> dict[str, int]:
        """The inodes of those that still exist, by their paths."""
        return dict(self._ours.items() & _segments().items())

    def remove(self) -> list[str]:
        """Remove what the server left and no process uses; returns what is still there."""
        left = self.left()
        if left:
            used = {inode for pid in _pids() for inode in _segments_of(pid)}
            for path in [path for path, inode in left.items() if inode not in used]:
                with suppress(OSError):
                    Path(path).unlink(missing_ok=True)
                    del left[path]
        return sorted(left)


def _segments() -> dict[str, int]:
    """The inode of each segment by its path."""
    with suppress(OSError), os.scandir(_SHARED_MEMORY) as entries:
        return {entry.path: entry.inode() for entry in entries}
    return {}


def _segments_of(pid: int) -> set[int]:
    """Inodes of the segments that a process has mapped or open; empty if we may not see them."""
    process, inodes = _PROC / str(pid), set()
    with suppress(OSError):
        inodes |= {int(inode) for inode in _MAPPED.findall((process / "maps").read_bytes())}
    with suppress(OSError):
        for handle in (process / "fd").iterdir():
            with suppress(OSError):
                if str(handle.readlink()).startswith(f"{_SHARED_MEMORY}/"):
                    inodes.add(handle.stat().st_ino)
    return inodes


def _pids() -> list[int]:
    return [int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit()]


def _parent_of(pid: int) -> int | None:
    """The parent of a process; None where it has ended.

    A process of which only the first thread has ended looks like a zombie, and holds its port until the others end.
    """
    with suppress(OSError, ValueError):
        fields = (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
        is_zombie, num_threads = fields[0] == b"Z", int(fields[17])
        return None if is_zombie and num_threads <= 1 else int(fields[1])
    return None


def family() -> list[int]:
    """All living descendants of this process."""
    children: dict[int, list[int]] = defaultdict(list)
    for pid in _pids():
        if (parent := _parent_of(pid)) is not None:
            children[parent].append(pid)
    members = children[os.getpid()]
    for member in members:
        members += children[member]
    return members


class Supervisor:
    """A server with all its processes."""

    def __init__(self, launched: Launched) -> None:
        self._launched = launched
        self._segments = Segments()
        self._commands = b""
        self._is_ready = False
        self._next_scan, self._pause_s = 0.0, _WATCH_S
        self._named: dict[int, str] = {}
        """Processes that the last scan saw under the title of an essential one."""
        self._watched: dict[int, str] = {}
        """Those that two scans saw so: a child that was just forked has its parent's title for a moment."""
        self._lost: list[str] = []
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._woken, waking = os.pipe()
        for descriptor in (self._woken, waking):
            os.set_blocking(descriptor, False)
        for number in (*_ENDING, signal.SIGCHLD):  # handled, not ignored: the server would inherit that
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(waking)

    def run(self) -> None:
        """Start the server, and follow benchctl's commands to their end, or benchctl's."""
        if not self._start():
            return
        while (command := self._next_command(_WATCH_S)) is not None:
            if command == "done":
                return
            if command.startswith("stop"):
                survivors = self._end(float(command.partition(" ")[2]))
                _report(survivors=survivors, segments=self._segments.remove())
            self._is_ready = self._is_ready or command == "ready"
            self._watch()  # tells of a lost process before the end of the first one that may follow from it
            self._reap()
        self._end(0.0)
        self._segments.remove()
        launched = self._launched
        if launched.log is not None:
            raw_log, log = Path(launched.raw_log), Path(launched.log)
            finish_log(raw_log, log, launched.sent, keeps_raw_log=launched.keeps_raw_log)

    def _start(self) -> bool:
        """Start the first process; False where the system refuses."""
        launched, prctl = self._launched, ctypes.CDLL(None).prctl
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

    def _next_command(self, limit_s: float) -> str | None:
        """The next line from benchctl; empty where none comes in time or a process ends, None when it is gone."""
        if b"\n" not in self._commands:
            readable, _, _ = select.select([0, self._woken], [], [], limit_s)
            if self._woken in readable:
                os.read(self._woken, _READ_BYTES)
            if 0 not in readable:
                return ""
            piece = os.read(0, _READ_BYTES)
            if not piece:
                return None
            self._commands += piece
        line, _, self._commands = self._commands.partition(b"\n")
        return line.decode()

    def _watch(self) -> None:
        """Look for processes and shared memory that are new, and for essential processes that have gone."""
        lost = [f"{pid} ({title})" for pid, title in self._watched.items() if _parent_of(pid) is None]
        if lost != self._lost:
            self._lost = lost
            _report(lost=lost)
        is_steady = self._is_ready and not lost and self._process.returncode is None
        if time.monotonic() < self._next_scan and is_steady:
            return
        self._pause_s = min(2 * self._pause_s, _SCAN_S) if is_steady else _WATCH_S
        self._next_scan = time.monotonic() + self._pause_s
        members = family()
        self._segments.scan(members)
        named = {pid: title for pid in members if (title := self._essential_title(pid))}
        confirmed = {pid: title for pid, title in named.items() if pid in self._named}
        gone = {pid: title for pid, title in self._watched.items() if pid not in members}
        self._named, self._watched = named, gone | confirmed

    def _essential_title(self, pid: int) -> str:
        """The title of an essential process, of a long one the part that identifies it; empty for any other."""
        with suppress(OSError):
            title = (
                (_PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            )
            part = next((part for part in self._launched.essential if part in title), "")
            return title if part and len(title) <= _TITLE_CHARS else part
        return ""

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
        """End all processes: ask, wait up to ``grace_s``, then kill. Returns those that live on."""
        if self._reap():
            self._segments.scan(family())
        for number, limit_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, _KILL_S)):
            deadline, signalled = time.monotonic() + limit_s, set[int]()
            while self._reap() and time.monotonic() < deadline:
                if number == signal.SIGKILL or not signalled:
                    signalled |= set(members := family())
                    for member in members:
                        with suppress(OSError):
                            os.kill(member, number)
                select.select([self._woken], [], [], _POLL_S)
                with suppress(BlockingIOError):
                    os.read(self._woken, _READ_BYTES)
        return family() if self._reap() else []


def _report(**event: Any) -> None:
    with suppress(OSError):  # benchctl was killed
        os.write(1, json.dumps(event).encode() + b"\n")


def finish_log(raw_log: Path, log: Path, sent: Mapping[str, str], *, keeps_raw_log: bool) -> Mapping[str, int]:
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
    sys.path.append(str(Path(__file__).parents[3]))  # last, so that nothing there stands for the standard library
    Supervisor(Launched(**json.loads(sys.stdin.buffer.readline()))).run()
