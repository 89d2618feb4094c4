"""Processes that we start: each the leader of its own session, ended as a whole, with nothing left behind.

A server is often several processes (a launcher, engine workers); some ignore or delay a polite signal, and some
leave their workers running when they are killed. Therefore everything here speaks of the *tree*: the members
of the session, and all descendants that were seen before stopping, wherever they have moved since.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeAlias

import psutil

_POLL_S: Final = 0.01
_KILL_WAIT_S: Final = 5.0
_PR_SET_PDEATHSIG: Final = 1


Started: TypeAlias = subprocess.Popen[bytes]


def start(argv: Sequence[str], env: Mapping[str, str], log: Path) -> Started:
    """Start ``argv`` in a session of its own, with both of its outputs appended to ``log``."""
    with log.open("ab") as output:
        return subprocess.Popen(
            argv,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent_hook(),  # noqa: PLW1509 - one system call, and no thread of ours runs yet
        )


def _die_with_parent_hook() -> Callable[[], None] | None:
    """A hook for the child after which the kernel ends it should we be killed without a chance to stop it."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def hook() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

    return hook


def tree(leader_pid: int) -> list[psutil.Process]:
    """Living processes of the tree: the session that ``leader_pid`` leads, and its descendants."""
    found: dict[int, psutil.Process] = {}
    try:
        leader = psutil.Process(leader_pid)
        found = {process.pid: process for process in (leader, *leader.children(recursive=True))}
    except psutil.NoSuchProcess:
        pass
    for pid in psutil.pids():
        if pid not in found and _session_of(pid) == leader_pid:
            try:
                found[pid] = psutil.Process(pid)
            except psutil.NoSuchProcess:
                continue
    return [process for process in found.values() if is_alive(process)]


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except (ProcessLookupError, PermissionError):
        return None


def is_alive(process: psutil.Process) -> bool:
    """Whether the very process (not a later one of the same id) still runs; a zombie does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def stop(process: Started, grace_s: float) -> list[psutil.Process]:
    """End the whole tree: ask, wait up to ``grace_s``, then kill. Returns whoever lives even so."""
    members = tree(process.pid)
    _signal(process.pid, members, signal.SIGTERM)
    survivors = _wait_gone(process, members, grace_s)
    if survivors:
        _signal(process.pid, survivors, signal.SIGKILL)
        survivors = _wait_gone(process, survivors, _KILL_WAIT_S)
    process.poll()
    return survivors


def _signal(leader_pid: int, members: Sequence[psutil.Process], number: signal.Signals) -> None:
    """Signal the group at once, so that nobody forks away in between, and each member that left the group."""
    if not members:
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader_pid, number)
    for member in members:
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(member.pid) != leader_pid:
                member.send_signal(number)


def _wait_gone(process: Started, members: Sequence[psutil.Process], limit_s: float) -> list[psutil.Process]:
    """Wait until no member lives, those born meanwhile included; returns the living when time is up."""
    deadline = time.monotonic() + limit_s
    while True:
        process.poll()  # reaps the leader, which would stay a zombie otherwise
        living = [member for member in members if is_alive(member)] or tree(process.pid)
        if not living or time.monotonic() >= deadline:
            return living
        members = living
        time.sleep(_POLL_S)
