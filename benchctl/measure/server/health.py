"""The health of a server: the end of its log, a hang, and the explanation of its end.

A server that the system ends cannot report it itself: memory ran out, or there was no room for its log.
"""

import asyncio
import contextlib
import errno
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

import psutil

from benchctl.engines.engine import Diagnosis
from benchctl.errors import LoadError, ServerStartError, failure_in_text, system_failure
from benchctl.load.exchange import Activity
from benchctl.units import NS_PER_S, s_from_ns
from benchctl.untrusted.secrets import Redactor
from benchctl.untrusted.text import visible_line

if TYPE_CHECKING:
    from benchctl.measure.server.server import AnyServer

Diagnose: TypeAlias = Callable[[str], Diagnosis | None]
"""Maps the end of a log to the failure that it shows, if the engine knows one."""

_SEARCHED_BYTES: Final = 65_536
"""Size of the end that is searched for known failures: the cause is above the traces of its consequences."""
_TAIL_LINES: Final = 20
_COLOURS: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
"""Colours and moves of the cursor, which servers' progress bars are full of."""

_KILLS_IN_GROUP: Final = {"": ("", "memory.events"), "memory": ("memory", "memory.oom_control")}
"""Hierarchies that count the processes of a group that the kernel killed, by controllers: their folder and file."""
_MEMORY: Final = Diagnosis(
    cause="out-of-memory",
    remedy="memory ran out and the system killed a process of its control group; choose a smaller model or cache, "
    "or free memory",
)
_DISK: Final = Diagnosis(
    cause="disk-full", remedy="the disk of its log is full; free space, then continue with --resume"
)
_OF_THE_PROGRAM: Final = {errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ENOEXEC, errno.EPERM}
"""Errors of a program that is not there, or is none."""

_CHECKS_PER_LIMIT: Final = 8
"""A stall is found at most an eighth of the limit too late."""


class ServerLog:
    """The end of the log at ``path``, which exists; its size does not matter. After ``close`` it stays as it was.

    The file is read even after it was renamed, deleted or truncated. What is shown of it has no secrets.
    """

    def __init__(self, path: Path, redactor: Redactor) -> None:
        self._handle: int | None = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._redactor = redactor
        self._closed_end = b""

    def close(self) -> None:
        """Close the file, keeping its end in memory."""
        if self._handle is not None:
            self._closed_end = self._end()
            os.close(self._handle)
            self._handle = None

    def end(self) -> str:
        """As much as is searched for known failures, secrets included."""
        return self._end().decode(errors="replace")

    def tail(self) -> str:
        """The last lines for a message or a record."""
        content, _ = self._redactor.content(self._end())
        return "\n".join(content[-16_384:].decode(errors="replace").splitlines()[-_TAIL_LINES:])

    def last_line(self) -> str:
        """The last line that is not blank, shortened; of a line that was overwritten, its last state."""
        for line in reversed(self.tail().splitlines()):
            if text := visible_line(_COLOURS.sub("", line).strip(), 100):
                return text
        return ""

    def _end(self) -> bytes:
        if self._handle is None:
            return self._closed_end
        size_bytes = os.fstat(self._handle).st_size
        return os.pread(self._handle, _SEARCHED_BYTES, max(0, size_bytes - _SEARCHED_BYTES))


class Shortage:
    """A lack of memory or disk space since this was created, just before the start of a server.

    Its log is in ``directory``. ``groups`` lists the control groups of the server, which are ours, and below
    ``group_files`` the kernel counts the processes of each that it killed: what it killed elsewhere on the machine
    tells nothing.
    """

    def __init__(
        self,
        directory: Path,
        *,
        groups: Path = Path("/proc/self/cgroup"),
        group_files: Path = Path("/sys/fs/cgroup"),
        # With less free space than this a server may not have written the end of its log
        log_room_bytes: int = 65_536,
    ) -> None:
        self._directory = directory
        self._groups, self._group_files = groups, group_files
        self._log_room_bytes = log_room_bytes
        self._num_kills = self._count_kills()

    def diagnosis(self) -> Diagnosis | None:
        """The shortage that has occurred since; None without one."""
        if self._count_kills() > self._num_kills:
            return _MEMORY
        return _DISK if shutil.disk_usage(self._directory).free < self._log_room_bytes else None

    def _count_kills(self) -> int:
        """Processes of the server's control group that the kernel has killed for lack of memory; 0 if uncounted."""
        with contextlib.suppress(OSError):
            for line in self._groups.read_text(encoding="utf-8").splitlines():
                _, controllers, group = line.split(":", 2)
                folder, file = _KILLS_IN_GROUP.get(controllers, ("", ""))
                counts = self._group_files / folder / group.lstrip("/") / file
                if file and counts.is_file():
                    words = counts.read_text(encoding="utf-8").split()
                    return int(words[words.index("oom_kill") + 1]) if "oom_kill" in words else 0
        return 0


def limit_in_log(log: str) -> Diagnosis | None:
    """A refusal of the system that the end of a server's log quotes, for engines that do not recognise it."""
    failure = failure_in_text(log)
    return (
        None if failure is None else Diagnosis(cause=failure.cause, remedy=f"{failure.problem}; {failure.remedy}")
    )


def start_refusal(program: str, error: OSError) -> ServerStartError:
    """The error of a server whose first process cannot be started."""
    failure = system_failure(error)
    if failure is None or error.errno in _OF_THE_PROGRAM:
        return ServerStartError(
            f"{program!r} cannot be started: {error}; install the engine, or correct its path", cause="cannot-start"
        )
    return ServerStartError(
        f"{program!r} cannot be started: {failure.problem}; {failure.remedy}", cause=failure.cause
    )


def describe_end(who: str, code: int | None) -> str:
    """The beginning of a sentence on the end of ``who`` with exit code ``code``, which is None while it lives."""
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"{who} was ended by {signal.Signals(-code).name}"
    return f"{who} ended with exit code {code}"


async def raise_when_stalled(activity: Callable[[], Activity], server: "AnyServer", limit_s: float) -> None:
    """Raise LoadError when no byte of any open request has arrived for ``limit_s``; never returns."""
    while True:
        await asyncio.sleep(min(limit_s / _CHECKS_PER_LIMIT, 1.0))
        now, now_ns = activity(), time.monotonic_ns()
        silent_ns = silence_ns(now, now_ns)
        if silent_ns >= limit_s * NS_PER_S:
            _raise_for_lack_of_files(server)
            requests = f"{now.num_open} requests are" if now.num_open > 1 else "1 request is"
            oldest_s = s_from_ns(now_ns - now.oldest_sent_ns)
            raise LoadError(
                f"{_hang(server)}: nothing has arrived for {s_from_ns(silent_ns):.1f} s (timeouts.stall_s is "
                f"{limit_s:g}) while {requests} open, the oldest for {oldest_s:.1f} s; read its log, or raise "
                "timeouts.stall_s",
                cause="hung",
                log_tail=server.log_tail(),
            )


def silence_ns(activity: Activity, now_ns: int) -> int:
    """Time during which nothing has arrived for any open request; 0 when none is open.

    Counted from the latest read of any request, but not from before the oldest open request was sent: requests sent
    since then are no sign of life of the server.
    """
    if not activity.num_open:
        return 0
    return now_ns - max(activity.last_arrival_ns, activity.oldest_sent_ns)


def _raise_for_lack_of_files(server: "AnyServer") -> None:
    """Raise LoadError where the server cannot accept connections: a process of it has all files that it may."""
    for process in server.processes():
        with contextlib.suppress(psutil.Error):
            limit = process.rlimit(psutil.RLIMIT_NOFILE)[0]
            limit = sys.maxsize if limit == psutil.RLIM_INFINITY else limit
            # A server that was refused a file may have closed another one since
            if process.num_fds() >= limit - 1:
                raise LoadError(
                    f"process {process.pid} of the server has all {limit:,} files open that it may have, and "
                    "accepts no more requests; raise the limit (ulimit -n), or lower max_concurrency",
                    cause="too-many-open-files",
                    log_tail=server.log_tail(),
                )


def _hang(server: "AnyServer") -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        if server.pid is not None and psutil.Process(server.pid).status() == psutil.STATUS_STOPPED:
            return f"the server hangs (its process {server.pid} is stopped)"
    return "the server hangs"
