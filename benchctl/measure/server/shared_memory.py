"""Shared memory that a killed server leaves in ``/dev/shm``: found while the server is alive, removed afterwards.

A segment belongs to a server when one of its processes has mapped or opened it and it did not exist before the
server was started. Files are compared by inode: names prove nothing, and a semaphore is mapped under another name
than the one it keeps. A segment is removed only when no living process uses it.
"""

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

_DIRECTORY: Final = Path("/dev/shm")  # noqa: S108 - fixed by the system
_PROC: Final = Path("/proc")
_MAPPED: Final = re.compile(rb" (\d+) +/dev/shm/.*$", re.MULTILINE)
"""A line of ``/proc/<pid>/maps``: the inode of the file, and its name when it was mapped."""


class Segment(NamedTuple):
    """A file of shared memory; the inode tells it from a later one of the same name."""

    path: str
    inode: int


class Segments:
    """The segments of one server, from a moment before its start."""

    def __init__(self) -> None:
        self._older = frozenset(_existing())
        self._ours: frozenset[Segment] = frozenset()

    def scan(self, pids: Iterable[int]) -> frozenset[Segment]:
        """Find the segments that ``pids`` use; returns the new ones. One listing of the directory if nothing was
        added.
        """
        fresh = frozenset(_existing()) - self._older - self._ours
        if fresh:
            used = {inode for pid in pids for inode in _used_by(pid)}
            fresh = frozenset(segment for segment in fresh if segment.inode in used)
            self._ours |= fresh
        return fresh

    def left(self) -> frozenset[Segment]:
        """Segments that the server has used and that still exist."""
        return self._ours & set(_existing())

    def remove(self) -> tuple[str, ...]:
        """Remove segments that the server left and no process uses; returns the paths that cannot be removed."""
        left = self.left()
        if not left:
            return ()
        pids = [int(entry.name) for entry in os.scandir(_PROC) if entry.name.isdigit()] if _PROC.is_dir() else []
        in_use = {inode for pid in pids for inode in _used_by(pid)}
        return tuple(sorted(segment.path for segment in left if segment.inode in in_use or not _unlinked(segment)))


def _existing() -> Iterable[Segment]:
    try:
        entries = list(os.scandir(_DIRECTORY))
    except OSError:  # the system has none
        return ()
    return [Segment(entry.path, entry.inode()) for entry in entries]


def _used_by(pid: int) -> set[int]:
    """Inodes of the segments that a process has mapped or open; empty if we may not see them."""
    process, inodes = _PROC / str(pid), set()
    with suppress(OSError):
        inodes |= {int(inode) for inode in _MAPPED.findall((process / "maps").read_bytes())}
    with suppress(OSError):
        for handle in (process / "fd").iterdir():
            with suppress(OSError):
                if str(handle.readlink()).startswith(f"{_DIRECTORY}/"):
                    inodes.add(handle.stat().st_ino)
    return inodes


def _unlinked(segment: Segment) -> bool:
    try:
        Path(segment.path).unlink(missing_ok=True)
    except OSError:
        return False
    return True
