"""The explanation of a server that ended or was never ready: from its log, else from what the system lacked.

A server that the system ends cannot report it itself: memory ran out, or there was no room for its log.
"""

import contextlib
import errno
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from benchctl.engines.engine import Diagnosis
from benchctl.errors import ServerStartError, failure_in_text, system_failure

Diagnose: TypeAlias = Callable[[str], Diagnosis | None]
"""Maps the end of a log to the failure that it shows, if the engine knows one."""

_KILLS_IN_GROUP: Final = {"": ("", "memory.events"), "memory": ("memory", "memory.oom_control")}
"""Hierarchies that count the processes of a group that the kernel killed, by controllers: their folder and file."""
LOG_ROOM_BYTES: Final = 65_536
"""With less free space than this a server may not have written the end of its log."""
_MEMORY: Final = Diagnosis(
    cause="out-of-memory",
    remedy="memory ran out and the system killed a process of its control group; choose a smaller model or cache, "
    "or free memory",
)
DISK: Final = Diagnosis(
    cause="disk-full", remedy="the disk of its log is full; free space, then continue with --resume"
)
_OF_THE_PROGRAM: Final = {errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ENOEXEC, errno.EPERM}
"""Errors of a program that is not there, or is none."""


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
        log_room_bytes: int = LOG_ROOM_BYTES,
    ) -> None:
        self._directory = directory
        self._groups, self._group_files = groups, group_files
        self._log_room_bytes = log_room_bytes
        self._num_kills = self._count_kills()

    def diagnosis(self) -> Diagnosis | None:
        """The shortage that has occurred since; None without one."""
        if self._count_kills() > self._num_kills:
            return _MEMORY
        return DISK if shutil.disk_usage(self._directory).free < self._log_room_bytes else None

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
        remedy = "install the engine, or correct its path"
        return ServerStartError(f"{program!r} cannot be started: {error}; {remedy}", cause="cannot-start")
    return ServerStartError(
        f"{program!r} cannot be started: {failure.problem}; {failure.remedy}", cause=failure.cause
    )


class ServerFailure(NamedTuple):
    """A failure of a server, explained."""

    message: str
    cause: str
    log_tail: str
    is_profile_error: bool

    def start_error(self) -> ServerStartError:
        return ServerStartError(
            self.message, cause=self.cause, log_tail=self.log_tail, is_profile_error=self.is_profile_error
        )


def describe_end(code: int | None, lost: str | None) -> str:
    """The beginning of a sentence on the end of a server, with exit code ``code``.

    ``lost`` describes the loss of a process without which it cannot work, if there is one.
    """
    end = f"ended with exit code {code}"
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            end = f"was ended by {signal.Signals(-code).name}"
    if lost is None:
        return f"the server {end}"
    return lost if code is None else f"{lost} and the server {end}"
