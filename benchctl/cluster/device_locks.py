"""Devices and cores that this process holds for its blocks, so that no other benchctl of the user measures on them.

The kernel holds a lock for the processes that have its file open: it ends with the last of them, however that ends.
Processes that measure for us inherit it, so that a device stays locked until its server is gone. Locks are between
processes of one user on one host; programs of others are found by the checks before and after each run.
"""

import fcntl
import os
import platform
import re
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import platformdirs
import psutil

from benchctl.errors import UsageError
from benchctl.untrusted.secrets import redacted
from benchctl.untrusted.text import visible_line

STORE_VARIABLE: Final = "BENCHCTL_LOCKS_DIR"
_ODD: Final = re.compile(r"[^A-Za-z0-9._-]+")
_PID: Final = re.compile(r"process (\d{1,9}) ")
_HOLDER_BYTES: Final = 1_000
_ENDING_S: Final = 30.0
"""Time for a server to end that was told to because the process which handed out its block was killed."""
_POLL_S: Final = 0.1
_CORE: Final = "core-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Locks:
    """Open files whose locks are held; of several names the first that another process holds, if any."""

    handles: tuple[int, ...] = ()
    refused: str | None = None
    """The name that could not be had; None where all are held."""
    holder: str = ""
    """The process that has it, in words."""


def core_names(cores: Iterable[int]) -> tuple[str, ...]:
    """Names of processor cores for ``locked``; those of devices are their UUIDs."""
    return tuple(f"{_CORE}{core}" for core in cores)


def locks_directory() -> Path:
    """``BENCHCTL_LOCKS_DIR``, or ``locks`` below the user's directory for state."""
    directory = os.environ.get(STORE_VARIABLE)
    return Path(directory).expanduser() if directory else Path(platformdirs.user_state_dir("benchctl")) / "locks"


@contextmanager
def locked(names: Sequence[str]) -> Iterator[Locks]:
    """Hold all of ``names`` inside, or none where another process has one of them.

    Where the process that took a lock has ended, those that measured for it are ending, too: they are waited for.
    Raises UsageError where the directory of locks cannot be written.
    """
    with ExitStack() as stack:
        handles: list[int] = []
        for name in names:
            handle = _opened(name)
            stack.callback(os.close, handle)
            if not _is_granted(handle, name):
                stack.close()
                yield Locks(refused=name, holder=_holder(name))
                return
            _sign(handle)
            handles.append(handle)
        yield Locks(handles=tuple(handles))


def _opened(name: str) -> int:
    path = _path(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UsageError(
            f"{path}: the lock of a device cannot be taken ({error.strerror}); name a directory for it in "
            f"{STORE_VARIABLE}"
        ) from error


def _path(name: str) -> Path:
    """A file for this host: the user's directory may be that of many."""
    return locks_directory() / f"{_ODD.sub('_', platform.node())}-{_ODD.sub('_', name)}.lock"


def _is_granted(handle: int, name: str) -> bool:
    deadline = time.monotonic() + _ENDING_S
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = _PID.match(_holder(name))
            if pid is None or psutil.pid_exists(int(pid[1])) or time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        except OSError:
            return True  # a file system without locks leaves it to the user
        else:
            return True


def _sign(handle: int) -> None:
    command = redacted(shlex.join(["benchctl", *sys.argv[1:]]))
    os.truncate(handle, 0)
    os.pwrite(handle, f"process {os.getpid()} ({command})".encode(errors="replace")[:_HOLDER_BYTES], 0)


def _holder(name: str) -> str:
    try:
        with _path(name).open("rb") as file:
            text = file.read(_HOLDER_BYTES).decode(errors="replace")
    except OSError:
        text = ""
    return visible_line(text) or "another process"
