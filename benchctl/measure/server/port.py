"""TCP ports on the loopback interface: find a free one, name who holds a taken one, check who listens."""

import os
import socket
import time
from collections.abc import Iterable
from typing import Final

import psutil

from benchctl.errors import PortTakenError, RunError

HOST: Final = "127.0.0.1"
_FIRST, _NUM = 20_000, 12_000
"""Where free ports are looked for: below the range from which systems number outgoing connections, so that no
client takes the port in the moment between our look and the server's own bind."""
_POLL_S: Final = 0.02


def is_free(port: int) -> bool:
    """Whether a server could listen on ``port`` now. Connections that linger after their end do not count."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def choose_port(fixed: int | None) -> int:
    """``fixed`` where given, else a free port.

    Raises PortTakenError when ``fixed`` is in use, RunError when no port is free.
    """
    if fixed is not None:
        if not is_free(fixed):
            raise PortTakenError(_taken(fixed))
        return fixed
    first = os.getpid() * 7  # programs running side by side begin at different places
    for offset in range(_NUM):
        port = _FIRST + (first + offset) % _NUM
        if is_free(port):
            return port
    raise RunError(f"no port from {_FIRST} to {_FIRST + _NUM - 1} is free; end some servers", cause="port-taken")


def _taken(port: int) -> str:
    holder = port_holder(port)
    who = f"process {holder.pid} ({holder.name()})" if holder else "a process of another user"
    return (
        f"port {port} of {HOST} is taken by {who}; end it, or choose another with --set engine.options.port=…, "
        "or leave the port out of the profile and a free one is found"
    )


def port_holder(port: int) -> psutil.Process | None:
    """The process that listens on ``port``, where we may know it."""
    for process in psutil.process_iter():
        if is_listening(process, port):
            return process
    return None


def is_listening(process: psutil.Process, port: int) -> bool:
    """Whether this process itself listens on ``port``."""
    try:
        connections = process.net_connections(kind="tcp")
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
    return any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in connections)


def belongs_to(port: int, processes: Iterable[psutil.Process]) -> bool:
    """Whether one of ``processes`` is the one that listens on ``port``."""
    return any(is_listening(process, port) for process in processes)


def wait_free(port: int, limit_s: float) -> bool:
    """Wait until ``port`` is free again; False when it is not within ``limit_s``."""
    deadline = time.monotonic() + limit_s
    while not is_free(port):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True
