"""Ends the server of a benchctl that was killed without a chance to end it; a program of its own.

It waits for the end of its standard input, a pipe that benchctl alone holds open and that the kernel therefore
closes with it, however it dies. Then it kills the session of the server, all descendants of that and whatever it
was told of, and removes the shared memory that these leave. Killing needs no consent: it also ends processes
that ignore polite signals or are stopped. In the ordinary case benchctl ends the server and then its guardian.

Each line of the input tells of something that belongs to the server: ``process <pid> <start ticks>`` for a process
that left the session, ``segment <path>`` for a file of shared memory. The argument is the leader as
``<pid> <start ticks>``. Only the standard library is imported, and only as far as is needed to start at once.
"""

import os
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Final, NamedTuple

_POLL_S: Final = 0.01
_LIMIT_S: Final = 30.0


class Entry(NamedTuple):
    """One process as ``/proc/<pid>/stat`` shows it."""

    parent: int
    session: int
    start_ticks: int
    """When it started, in clock ticks since boot: with its id it names a process for good."""
    is_zombie: bool


def entry_of(pid: int) -> Entry | None:
    """The entry of a process; None when there is none of this id."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 - pathlib would double the start-up
            state, *numbers = file.read().rpartition(b")")[2].split()
    except (OSError, ValueError):
        return None
    return Entry(int(numbers[0]), int(numbers[2]), int(numbers[18]), state == b"Z")


def _members(leader: int, start_ticks: int, told: Iterable[tuple[int, int]]) -> set[int]:
    """Living processes of the session, of those told, and all who descend from them."""
    pids = [int(place.name) for place in os.scandir("/proc") if place.name.isdigit()]
    entries = {pid: entry for pid in pids if (entry := entry_of(pid)) is not None}
    known = {pid for pid, ticks in told if pid in entries and entries[pid].start_ticks == ticks}
    if leader not in entries or entries[leader].start_ticks == start_ticks:
        known |= {pid for pid, entry in entries.items() if entry.session == leader}
    grown = True
    while grown:
        born = {pid for pid, entry in entries.items() if entry.parent in known} - known
        known |= born
        grown = bool(born)
    return {pid for pid in known - {os.getpid()} if not entries[pid].is_zombie}


def _end(leader: int, start_ticks: int, told: Iterable[tuple[int, int]]) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while time.monotonic() < deadline and (members := _members(leader, start_ticks, told)):
        for pid in members:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)


def _main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    leader, start_ticks = int(sys.argv[1]), int(sys.argv[2])
    told, segments = [], []
    for line in sys.stdin:
        kind, _, what = line.rstrip("\n").partition(" ")
        if kind == "process":
            pid, ticks = what.split()
            told.append((int(pid), int(ticks)))
        else:
            segments.append(what)
    _end(leader, start_ticks, told)
    for path in segments:
        with suppress(OSError):
            os.unlink(path)  # noqa: PTH108 - see above


if __name__ == "__main__":
    _main()
