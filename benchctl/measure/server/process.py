"""Processes that we start: each the leader of its own session, ended as a whole, with nothing left behind.

A server is often several processes (a launcher, engine workers); some ignore or delay a polite signal, some leave
their workers running when they are killed, and some of these move to sessions of their own. Therefore everything
here speaks of the *tree*: the members of the session, all descendants ever seen, wherever they have moved since,
and the orphans among them, which the kernel hands to us in place of the process of number 1.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeAlias

import psutil

from benchctl.measure.server import guardian
from benchctl.measure.server.cores import thread_on

_POLL_S: Final = 0.01
_KILL_WAIT_S: Final = 5.0
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36


Started: TypeAlias = subprocess.Popen[bytes]

_OURS: Final[set[int]] = set()
"""Ids of the leaders and guardians that we started and that have not been waited for."""


def start(argv: Sequence[str], env: Mapping[str, str], log: Path, cores: frozenset[int] | None = None) -> Started:
    """Start ``argv`` in a session of its own, with both of its outputs appended to ``log``.

    It may use ``cores`` only; None: those that we may use.
    """
    with log.open("ab") as output, thread_on(cores):
        started = subprocess.Popen(
            argv,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent_hook(),  # noqa: PLW1509 - a single system call, looked up before the fork
        )
    _OURS.add(started.pid)
    return started


def _die_with_parent_hook() -> Callable[[], None] | None:
    """A hook for the child after which the kernel ends it should we be killed without a chance to stop it."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

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
    """Whether the very process (not a later one of the same id) still runs.

    A zombie does not, unless only its first thread has ended: such a process looks like a zombie, cannot be reaped
    and holds its port until its other threads have ended as well.
    """
    try:
        if not process.is_running():
            return False
        return process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1
    except psutil.NoSuchProcess:
        return False


class ProcessTree:
    """The processes of one server that we started, with a guardian that ends them should we be killed.

    Made at once after ``start``. Whoever was seen to belong to it belongs to it until it ends.
    """

    def __init__(self, leader: Started) -> None:
        self._leader = leader
        self._others = frozenset(child.pid for child in psutil.Process().children())
        self._seen: frozenset[psutil.Process] = frozenset()
        self._told: frozenset[psutil.Process] = frozenset()
        self._guardian = _guardian_of(leader.pid)

    def living(self) -> list[psutil.Process]:
        """Look again: all who live now."""
        found = {*tree(self._leader.pid), *self._adopted()}
        for wanderer in [process for process in self._seen - found if is_alive(process)]:
            found.add(wanderer)
            with contextlib.suppress(psutil.NoSuchProcess):
                found.update(wanderer.children(recursive=True))
        self._tell_wanderers(found - self._told)
        self._seen |= found
        return [process for process in found if is_alive(process)]

    def tell_guardian(self, line: str) -> None:
        """Tell the guardian what else to see to, in its own terms."""
        if self._guardian is not None and self._guardian.stdin is not None:
            with contextlib.suppress(OSError):  # it was ended; the server is still ours to end
                self._guardian.stdin.write(f"{line}\n".encode())

    def stop(self, grace_s: float) -> list[psutil.Process]:
        """End all: ask, wait up to ``grace_s``, then kill. Returns whoever lives even so."""
        members = self.living()
        _signal(self._leader.pid, members, signal.SIGTERM)
        survivors = self._wait_gone(members, grace_s)
        if survivors:
            _signal(self._leader.pid, survivors, signal.SIGKILL)
            survivors = self._wait_gone(survivors, _KILL_WAIT_S)
        if self._leader.poll() is not None:
            _OURS.discard(self._leader.pid)
        self._dismiss_guardian()
        return survivors

    def _adopted(self) -> list[psutil.Process]:
        """Children of ours that we did not start: orphans of the server, or of its descendants.

        What else we start lives in our session, or was there before the server.
        """
        own = os.getsid(0)
        strangers = [child for child in psutil.Process().children() if child.pid not in self._others | _OURS]
        return [child for child in strangers if _session_of(child.pid) not in {own, None}]

    def _tell_wanderers(self, found: Iterable[psutil.Process]) -> None:
        """Name to the guardian who has left the session, which may be long after it was first seen."""
        for process in found:
            if _session_of(process.pid) not in {self._leader.pid, None} and (
                entry := guardian.entry_of(process.pid)
            ):
                self.tell_guardian(f"process {process.pid} {entry.start_ticks}")
                self._told |= {process}

    def _wait_gone(self, members: Sequence[psutil.Process], limit_s: float) -> list[psutil.Process]:
        """Wait until no member lives, those born meanwhile included; returns the living when time is up."""
        deadline = time.monotonic() + limit_s
        while True:
            self._leader.poll()  # reaps the leader, which would stay a zombie otherwise
            living = [member for member in members if is_alive(member)] or self.living()
            if not living or time.monotonic() >= deadline:
                self._reap()
                return living
            members = living
            time.sleep(_POLL_S)

    def _reap(self) -> None:
        """Take leave of orphans that the kernel handed to us; they would stay zombies until we end."""
        for process in self._seen:
            if process.pid != self._leader.pid:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(process.pid, os.WNOHANG)

    def _dismiss_guardian(self) -> None:
        if self._guardian is None:
            return
        self._guardian.kill()
        self._guardian.wait()
        _OURS.discard(self._guardian.pid)
        if self._guardian.stdin is not None:
            with contextlib.suppress(OSError):
                self._guardian.stdin.close()


def _guardian_of(leader_pid: int) -> Started | None:
    """A guardian of a server; None where the system has no table of processes, or no place for one more."""
    entry = guardian.entry_of(leader_pid)
    if entry is None:
        return None
    argv = (sys.executable, "-I", "-S", guardian.__file__, str(leader_pid), str(entry.start_ticks))
    with contextlib.suppress(OSError):
        started = subprocess.Popen(
            argv,
            bufsize=0,
            env={},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        _OURS.add(started.pid)
        return started
    return None


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
