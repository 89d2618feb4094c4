"""Processes that we start: each leads its own session and is ended as a whole, with nothing left behind.

A server is often several processes (a launcher, engine workers); some ignore or delay a polite signal, some leave
their workers running when they are killed, and some of these move to sessions of their own. Therefore everything
here handles the *tree*: the members of the session, all descendants ever seen, wherever they have moved since, and
the orphans among them, which the kernel reparents to us.
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
from typing import IO, Final, TypeAlias

import psutil

from benchctl.measure.server import guardian
from benchctl.measure.server.resources import thread_on
from benchctl.untrusted.files import open_to_append

_POLL_S: Final = 0.01
_KILL_WAIT_S: Final = 5.0
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36


Started: TypeAlias = subprocess.Popen[bytes]

_OURS: Final[set[int]] = set()
"""Ids of the leaders and of their helpers that we started and that have not been waited for."""


def start(argv: Sequence[str], env: Mapping[str, str], output: int, cores: frozenset[int] | None = None) -> Started:
    """Start ``argv`` in a session of its own, with both of its outputs to the open file ``output``.

    It may use only ``cores``, or with None all that we may use.
    """
    with thread_on(cores):
        return _started(argv, env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)


def start_piped(argv: Sequence[str], env: Mapping[str, str], log: Path) -> Started:
    """As ``start``, with pipes to its input and from its output; its standard error is appended to ``log``."""
    with open_to_append(log, within=log.parent) as errors:
        return _started(argv, env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors)


def _started(
    argv: Sequence[str], env: Mapping[str, str], *, stdin: int, stdout: int | IO[bytes], stderr: int | IO[bytes]
) -> Started:
    started = subprocess.Popen(
        argv,
        env=dict(env),
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
        preexec_fn=_die_with_parent_hook(),  # noqa: PLW1509 - a single system call, looked up before the fork
    )
    _OURS.add(started.pid)
    return started


def _die_with_parent_hook() -> Callable[[], None] | None:
    """A hook for the child that makes the kernel end it if we are killed."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def hook() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

    return hook


def tree(leader_pid: int) -> list[psutil.Process]:
    """Living processes of the tree: the session that ``leader_pid`` leads, and its descendants."""
    members: dict[int, psutil.Process] = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        leader = psutil.Process(leader_pid)
        members = {process.pid: process for process in (leader, *leader.children(recursive=True))}
    for pid in psutil.pids():
        if pid not in members and _session_of(pid) == leader_pid:
            with contextlib.suppress(psutil.NoSuchProcess):
                members[pid] = psutil.Process(pid)
    return [process for process in members.values() if is_alive(process)]


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except (ProcessLookupError, PermissionError):
        return None


def is_alive(process: psutil.Process) -> bool:
    """True when this very process (not a later one of the same id) still runs.

    A zombie does not, unless only its first thread has ended: such a process looks like a zombie, cannot be reaped
    and holds its port until its other threads have ended, too.
    """
    try:
        if not process.is_running():
            return False
        return process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1
    except psutil.NoSuchProcess:
        return False


class ProcessTree:
    """The processes of one server that we started, with a guardian that ends them if we are killed.

    Created right after ``start``. A process that was once seen in the tree belongs to it until it ends.
    """

    def __init__(self, leader: Started) -> None:
        self._leader = leader
        self._others = frozenset(child.pid for child in psutil.Process().children())
        self._seen: frozenset[psutil.Process] = frozenset()
        self._reported: frozenset[psutil.Process] = frozenset()
        self._guardian = _guardian_of(leader.pid)

    def living(self) -> list[psutil.Process]:
        """Scan again; returns all processes that are alive now."""
        members = {*tree(self._leader.pid), *self._adopted()}
        for wanderer in [process for process in self._seen - members if is_alive(process)]:
            members.add(wanderer)
            with contextlib.suppress(psutil.NoSuchProcess):
                members.update(wanderer.children(recursive=True))
        self._report_wanderers(members - self._reported)
        self._seen |= members
        return [process for process in members if is_alive(process)]

    def tell_guardian(self, line: str) -> None:
        """Send a line of the guardian's own format to it."""
        if self._guardian is not None and self._guardian.stdin is not None:
            with contextlib.suppress(OSError):  # it was ended; we still end the server
                self._guardian.stdin.write(f"{line}\n".encode())

    def stop(self, grace_s: float) -> list[psutil.Process]:
        """End all: terminate, wait up to ``grace_s``, then kill. Returns the survivors."""
        members = self.living()
        _signal(self._leader.pid, members, signal.SIGTERM)
        survivors = self._wait_gone(members, grace_s)
        if survivors:
            _signal(self._leader.pid, survivors, signal.SIGKILL)
            survivors = self._wait_gone(survivors, _KILL_WAIT_S)
        if self._leader.poll() is not None:
            _OURS.discard(self._leader.pid)
        if self._guardian is not None:
            end_helper(self._guardian)
        return survivors

    def _adopted(self) -> list[psutil.Process]:
        """Children of ours that we did not start: orphans of the server, or of its descendants.

        Other processes that we start are in our session, or existed before the server.
        """
        own = os.getsid(0)
        strangers = [child for child in psutil.Process().children() if child.pid not in self._others | _OURS]
        return [child for child in strangers if _session_of(child.pid) not in {own, None}]

    def _report_wanderers(self, processes: Iterable[psutil.Process]) -> None:
        """Report to the guardian the processes that have left the session, perhaps long after they were first
        seen.
        """
        for process in processes:
            if _session_of(process.pid) not in {self._leader.pid, None} and (
                entry := guardian.entry_of(process.pid)
            ):
                self.tell_guardian(f"process {process.pid} {entry.start_ticks}")
                self._reported |= {process}

    def _wait_gone(self, members: Sequence[psutil.Process], limit_s: float) -> list[psutil.Process]:
        """Wait until no member is alive, new ones included; returns those alive when the time is up."""
        deadline = time.monotonic() + limit_s
        while True:
            self._leader.poll()  # reaps the leader, which would stay a zombie otherwise
            living = [member for member in members if is_alive(member)] or self.living()
            if not living or time.monotonic() >= deadline:
                for process in self._seen:
                    if process.pid != self._leader.pid:  # orphans reparented to us would stay zombies until we end
                        with contextlib.suppress(ChildProcessError):
                            os.waitpid(process.pid, os.WNOHANG)
                return living
            members = living
            time.sleep(_POLL_S)


def _guardian_of(leader_pid: int) -> Started | None:
    """A guardian of a server; None if the system has no ``/proc`` or cannot start one more process."""
    entry = guardian.entry_of(leader_pid)
    if entry is None:
        return None
    with contextlib.suppress(OSError):
        return start_helper(Path(guardian.__file__), (leader_pid, entry.start_ticks))
    return None


def start_helper(
    program: Path,
    arguments: Iterable[int],
    *,
    stdout: int | IO[bytes] = subprocess.DEVNULL,
    stderr: int = subprocess.DEVNULL,
    pass_fds: Sequence[int] = (),
) -> Started:
    """Start a program of ours that accompanies a server, in a session of its own and with a pipe to its input.

    It has nothing of our environment. Raises OSError where the system cannot start one more process.
    """
    started = subprocess.Popen(
        (sys.executable, "-I", "-S", str(program), *map(str, arguments)),
        bufsize=0,
        env={},
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
        pass_fds=pass_fds,
    )
    _OURS.add(started.pid)
    return started


def end_helper(helper: Started) -> None:
    """End a program of ours, and close the pipes to it."""
    helper.kill()
    helper.wait()
    _OURS.discard(helper.pid)
    for pipe in (helper.stdin, helper.stderr):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def _signal(leader_pid: int, members: Sequence[psutil.Process], number: signal.Signals) -> None:
    """Signal the group at once, so that no process forks away in between, and each member that left the group."""
    if not members:
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader_pid, number)
    for member in members:
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(member.pid) != leader_pid:
                member.send_signal(number)
