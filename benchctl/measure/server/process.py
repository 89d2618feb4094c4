"""A program that we start with all its processes: nothing of it is left behind, also if one of us is killed.

``supervise.py`` starts it, and is asked and told through two pipes.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Final, Literal

import psutil

from benchctl.errors import PortTakenError, RunError
from benchctl.measure.server import supervise
from benchctl.measure.server.supervise import Launched
from benchctl.units import MS_PER_S

_ANSWER_S: Final = 20.0
"""Time for an answer of the supervisor beyond what it waits for."""


class Supervised:
    """A program that runs from the creation of this value to ``stop``, in a session of its own.

    It may use only ``cores``, or with None all that we may use. Raises OSError where it cannot be started, with its
    name or that of its log.
    """

    def __init__(self, launched: Launched, cores: frozenset[int] | None = None) -> None:
        self._events: dict[str, Any] = {}
        self._unread = b""
        self._is_over = False
        with thread_on(cores):
            self._supervisor = subprocess.Popen(
                (sys.executable, "-I", "-S", supervise.__file__),
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._tell(json.dumps(launched._asdict()))
        self._await("started", "refused")
        if "started" not in self._events:
            self._end_supervisor()
            number = self._events.get("refused") or 0
            raise OSError(number, os.strerror(number), self._events.get("of"))
        self.supervisor_pid = self._supervisor.pid
        """The parent of all its processes, directly or not."""
        self.pid: int = self._events["started"]
        self.start_ns: int = self._events["at_ns"]

    @property
    def returncode(self) -> int | None:
        """The exit code of its first process; None while that lives."""
        self._take_events()
        code: int | None = self._events.get("ended")
        return code

    @property
    def supervisor_end(self) -> int | None:
        """The exit code of the supervisor where something else has ended it; None while it lives."""
        self._take_events()
        return self._supervisor.wait(_ANSWER_S) if self._is_over and self._supervisor.stdin is not None else None

    def is_ready(self) -> None:
        """Tell the supervisor that the server is up, and wait until it has looked which shared memory is used."""
        self._tell("ready")
        self._await("looked")

    def stop(self, grace_s: float) -> Sequence[int]:
        """End all processes, those that remain after ``grace_s`` with force; returns those that live on.

        Done at most once.
        """
        self._tell(f"stop {grace_s}")
        self._await("survivors", limit_s=grace_s + _ANSWER_S)
        if "survivors" not in self._events:  # it was killed or stopped: the kernel ends the first process with it
            self._supervisor.kill()
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        self._tell("done")
        self._end_supervisor()
        survivors: Sequence[int] = self._events.get("survivors", ())
        return survivors

    def _tell(self, line: str) -> None:
        if self._supervisor.stdin is not None:
            with suppress(OSError):  # it has ended
                self._supervisor.stdin.write(f"{line}\n".encode())

    def _await(self, *names: str, limit_s: float = _ANSWER_S) -> None:
        """Wait for an event with one of these names if there are any, or for the end of the supervisor."""
        deadline = time.monotonic() + limit_s
        while not (self._is_over or self._events.keys() & set(names)) and time.monotonic() < deadline:
            self._take_events(deadline - time.monotonic())

    def _take_events(self, limit_s: float = 0.0) -> None:
        """Take in what the supervisor has said, waiting up to ``limit_s`` for it."""
        output = self._supervisor.stdout
        if output is None or output.closed:
            return
        poll = select.poll()  # files may have numbers that are too high for select
        poll.register(output, select.POLLIN)
        while not self._is_over and poll.poll(max(limit_s, 0.0) * MS_PER_S):
            piece, limit_s = os.read(output.fileno(), 1 << 16), 0.0
            self._is_over = not piece
            *lines, self._unread = (self._unread + piece).split(b"\n")
            for line in lines:
                self._events |= json.loads(line)

    def _end_supervisor(self) -> None:
        self._await()  # its output ends with it
        if not self._is_over:
            self._supervisor.kill()
        self._supervisor.wait()
        for pipe in (self._supervisor.stdin, self._supervisor.stdout):
            if pipe is not None:
                pipe.close()


def descendants(pid: int) -> list[psutil.Process]:
    """The living processes that a process has started, directly or not."""
    with suppress(psutil.NoSuchProcess):
        return [process for process in psutil.Process(pid).children(recursive=True) if is_alive(process)]
    return []


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


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreSplit:
    """Numbers of the cores of either side; no core is in both."""

    server: frozenset[int]
    client: frozenset[int]

    def as_config(self) -> dict[str, str]:
        """The split in the effective configuration of a run, under the name of the option in the profile."""
        return {
            "server.client_cores": f"client on {number_ranges(self.client)}, server on {number_ranges(self.server)}"
        }


def split_cores(option: Literal["auto"] | int, num_processes: int = 1) -> CoreSplit | None:
    """The last of our cores for the client, the others, at least one, for the server.

    ``auto`` gives the client a core for each of its ``num_processes``, if that is an eighth of all or less. None if
    it gets no core: there are too few, or the option is 0.
    """
    usable = sorted(os.sched_getaffinity(0))
    if option == "auto":
        # On so many cores a server hardly misses those that are reserved
        option = num_processes if num_processes * 8 <= len(usable) else 0
    count = min(option, len(usable) - 1)
    if count < 1:
        return None
    return CoreSplit(server=frozenset(usable[:-count]), client=frozenset(usable[-count:]))


def thread_on(cores: frozenset[int] | None) -> AbstractContextManager[None]:
    """Bind the calling thread, and what it starts meanwhile, to ``cores``; None changes nothing."""
    return _bound(cores, partial(os.sched_setaffinity, 0))


def process_on(cores: frozenset[int] | None) -> AbstractContextManager[None]:
    """Bind all threads of this process, and what they start meanwhile, to ``cores``; None changes nothing."""

    def bind(cores: Iterable[int]) -> None:
        for thread in Path("/proc/self/task").iterdir():
            with suppress(ProcessLookupError):  # it has ended since
                os.sched_setaffinity(int(thread.name), cores)

    return _bound(cores, bind)


@contextmanager
def _bound(cores: frozenset[int] | None, bind: Callable[[Iterable[int]], None]) -> Iterator[None]:
    if cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    bind(cores)
    try:
        yield
    finally:
        bind(before)


def number_ranges(numbers: frozenset[int]) -> str:
    """``0-2,5`` for 0, 1, 2 and 5, as Linux writes lists of cores."""
    numbered = enumerate(sorted(numbers))
    runs = [[number for _, number in run] for _, run in groupby(numbered, key=lambda pair: pair[1] - pair[0])]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


HOST: Final = "127.0.0.1"
PORTS: Final = range(20_000, 32_000)
"""Candidates for a free port: below the range of outgoing connections, so that no client takes the port between our
check and the server's own bind."""
_POLL_S: Final = 0.02


def is_free(port: int) -> bool:
    """True when a server could listen on ``port`` now; connections that linger after their end do not count."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def choose_port(fixed: int | None, candidates: range = PORTS) -> int:
    """``fixed`` if given, else a free port among ``candidates``.

    Raises PortTakenError when ``fixed`` is in use, RunError when no port is free.
    """
    if fixed is not None:
        if not is_free(fixed):
            holder = next((each for each in psutil.process_iter() if is_listening(each, fixed)), None)
            who = f"process {holder.pid} ({holder.name()})" if holder else "a process of another user"
            raise PortTakenError(
                f"port {fixed} of {HOST} is taken by {who}; end it, or choose another with --set "
                "engine.options.port=…, or leave the port out of the profile to use a free one"
            )
        return fixed
    first = os.getpid() * 7  # programs running side by side begin with different ports
    for offset in range(len(candidates)):
        port = candidates[(first + offset) % len(candidates)]
        if is_free(port):
            return port
    raise RunError(
        f"no port from {candidates.start} to {candidates.stop - 1} is free; end some servers", cause="port-taken"
    )


def is_listening(process: psutil.Process, port: int) -> bool:
    try:
        connections = process.net_connections(kind="tcp")
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
    return any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in connections)


def wait_free(port: int, limit_s: float) -> bool:
    """Wait until ``port`` is free again; False when it is not within ``limit_s``."""
    deadline = time.monotonic() + limit_s
    while not is_free(port):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True
