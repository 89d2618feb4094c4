"""TCP ports on the loopback interface: find a free one, name the holder of a taken one, check who listens."""

import os
import socket
import time
from collections.abc import Iterable
from typing import Final

import psutil

from benchctl.errors import PortTakenError, RunError

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
