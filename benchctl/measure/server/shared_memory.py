"""Shared memory that a killed server leaves in ``/dev/shm``: found while it lives, removed when it is gone.

A segment is a server's when one of its processes has mapped or opened it and when it did not exist before the
server was started. Files are compared by number: names prove nothing, and a semaphore is mapped under another name
than the one it is left with. It is removed only when no living process has it.
"""

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

_DIRECTORY: Final = Path("/dev/shm")  # noqa: S108 - where the system keeps it
_PROC: Final = Path("/proc")
_MAPPED: Final = re.compile(rb" (\d+) +/dev/shm/.*$", re.MULTILINE)
"""A line of ``/proc/<pid>/maps``: the number of the file, and its name as it was when it was mapped."""


class Segment(NamedTuple):
    """A file of shared memory; the number tells it from a later one of the same name."""

    path: str
    inode: int


class Segments:
    """The segments of one server, from a moment before its start."""

    def __init__(self) -> None:
        self._older = frozenset(_existing())
        self._ours: frozenset[Segment] = frozenset()

    def look(self, pids: Iterable[int]) -> frozenset[Segment]:
        """Find out what ``pids`` use; returns what is new. Costs one listing where nothing was added."""
        fresh = frozenset(_existing()) - self._older - self._ours
        if fresh:
            used = {inode for pid in pids for inode in _used_by(pid)}
            fresh = frozenset(segment for segment in fresh if segment.inode in used)
            self._ours |= fresh
        return fresh

    def left(self) -> frozenset[Segment]:
        """What the server was seen to use and what still exists."""
        return self._ours & set(_existing())

    def remove(self) -> tuple[str, ...]:
        """Remove what the server left and nobody has; returns the paths that cannot be removed."""
        left = self.left()
        if not left:
            return ()
        in_use = _in_use()
        return tuple(sorted(segment.path for segment in left if segment.inode in in_use or not _unlinked(segment)))


def _existing() -> Iterable[Segment]:
    try:
        entries = list(os.scandir(_DIRECTORY))
    except OSError:  # a system without it
        return ()
    return [Segment(entry.path, entry.inode()) for entry in entries]


def _pids() -> list[int]:
    return [int(place.name) for place in os.scandir(_PROC) if place.name.isdigit()] if _PROC.is_dir() else []


def _in_use() -> set[int]:
    return {inode for pid in _pids() for inode in _used_by(pid)}


def _used_by(pid: int) -> set[int]:
    """Numbers of the segments that a process has mapped or open; empty where we may not know."""
    place, inodes = _PROC / str(pid), set()
    with suppress(OSError):
        inodes |= {int(inode) for inode in _MAPPED.findall((place / "maps").read_bytes())}
    with suppress(OSError):
        for handle in (place / "fd").iterdir():
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
