"""Processor cores and ports that a server takes on a machine that it shares with the client."""

import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Final, Literal

import psutil

from benchctl.errors import PortTakenError, RunError

_THREADS = Path("/proc/self/task")
_CORES_FOR_ONE: Final = 8
"""Cores of a machine on which a server hardly misses the one that is reserved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreSplit:
    """Numbers of the cores of either side; no core is in both."""

    server: frozenset[int]
    client: frozenset[int]

    def as_config(self) -> dict[str, str]:
        """The split in the effective configuration of a run, under the name of the option in the profile."""
        return {
            "server.client_cores": f"client on {core_ranges(self.client)}, server on {core_ranges(self.server)}"
        }


def split_cores(option: Literal["auto"] | int, num_processes: int = 1) -> CoreSplit | None:
    """The last of our cores for the client, the others, at least one, for the server.

    ``auto`` gives the client a core for each of its ``num_processes``, if that is an eighth of all or less. None if
    it gets no core: there are too few, the option is 0, or the system cannot bind processes to cores.
    """
    if not hasattr(os, "sched_getaffinity"):
        return None
    usable = sorted(os.sched_getaffinity(0))
    if option == "auto":
        option = num_processes if num_processes * _CORES_FOR_ONE <= len(usable) else 0
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
        for thread in _THREADS.iterdir():
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


def core_ranges(cores: frozenset[int]) -> str:
    """``0-2,5`` for 0, 1, 2 and 5, as Linux writes lists of cores."""
    numbered = enumerate(sorted(cores))
    runs = [[core for _, core in run] for _, run in groupby(numbered, key=lambda pair: pair[1] - pair[0])]
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
            holder = port_holder(fixed)
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
    message = f"no port from {candidates.start} to {candidates.stop - 1} is free; end some servers"
    raise RunError(message, cause="port-taken")


def port_holder(port: int) -> psutil.Process | None:
    """The process that listens on ``port``, if we may see it."""
    return next((process for process in psutil.process_iter() if is_listening(process, port)), None)


def is_listening(process: psutil.Process, port: int) -> bool:
    try:
        connections = process.net_connections(kind="tcp")
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
    return any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in connections)


def belongs_to(port: int, processes: Iterable[psutil.Process]) -> bool:
    return any(is_listening(process, port) for process in processes)


def wait_free(port: int, limit_s: float) -> bool:
    """Wait until ``port`` is free again; False when it is not within ``limit_s``."""
    deadline = time.monotonic() + limit_s
    while not is_free(port):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True
