"""Ends the server of a benchctl that was killed without a chance to end it; a program of its own.

It waits for the end of its standard input, a pipe that only benchctl holds open and that the kernel therefore
closes however benchctl dies. Then it kills the session of the server, all descendants of that and all processes
named to it, and removes the shared memory that these leave. SIGKILL also ends processes that ignore other signals
or are stopped. In the ordinary case benchctl ends the server and then its guardian.

Each line of the input names something that belongs to the server: ``process <pid> <start ticks>`` for a process
that left the session, ``segment <path>`` for a file of shared memory. The arguments are the leader as
``<pid> <start ticks>``. Few modules of the standard library are imported, so that it starts at once.
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
    """Its start in clock ticks since boot; together with the id this identifies a process for good."""
    is_zombie: bool


def entry_of(pid: int) -> Entry | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 - pathlib would double the start-up
            state, *numbers = file.read().rpartition(b")")[2].split()
    except (OSError, ValueError):
        return None
    return Entry(int(numbers[0]), int(numbers[2]), int(numbers[18]), state == b"Z")


def _members(leader: int, start_ticks: int, named: Iterable[tuple[int, int]]) -> set[int]:
    """Living processes of the session, those named, and all their descendants."""
    pids = [int(item.name) for item in os.scandir("/proc") if item.name.isdigit()]
    entries = {pid: entry for pid in pids if (entry := entry_of(pid)) is not None}
    members = {pid for pid, ticks in named if pid in entries and entries[pid].start_ticks == ticks}
    if leader not in entries or entries[leader].start_ticks == start_ticks:
        members |= {pid for pid, entry in entries.items() if entry.session == leader}
    while born := {pid for pid, entry in entries.items() if entry.parent in members} - members:
        members |= born
    return {pid for pid in members - {os.getpid()} if not entries[pid].is_zombie}


def _end(leader: int, start_ticks: int, named: Iterable[tuple[int, int]]) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while time.monotonic() < deadline and (members := _members(leader, start_ticks, named)):
        for pid in members:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)


def _main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    leader, start_ticks = int(sys.argv[1]), int(sys.argv[2])
    named, segments = [], []
    for line in sys.stdin:
        kind, _, what = line.rstrip("\n").partition(" ")
        if kind == "process":
            pid, ticks = what.split()
            named.append((int(pid), int(ticks)))
        else:
            segments.append(what)
    _end(leader, start_ticks, named)
    for path in segments:
        with suppress(OSError):
            os.unlink(path)  # noqa: PTH108 - see above


if __name__ == "__main__":
    _main()
