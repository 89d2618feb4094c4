"""Host telemetry: processor time and memory of the server's process tree and of this client."""

import time
from collections.abc import Iterator
from threading import Event
from typing import Final

import psutil

from benchctl.measure.server.process import tree
from benchctl.records.schema import HostSample
from benchctl.units import s_from_ns

_SCAN_S: Final = 5.0
"""Interval between lists of the server's processes: each reads the state of all processes of the machine."""


def host_samples(server_pid: int, hz: float, stopped: Event, scan_s: float = _SCAN_S) -> Iterator[HostSample]:
    """Samples at ``hz`` until ``stopped`` is set; the first has no rates.

    The server's processes are listed every ``scan_s``.
    """
    client = psutil.Process()
    members = tree(server_pid)
    scanned_at = time.monotonic()
    psutil.cpu_percent()  # its first value has no meaning
    before_ns, before = time.monotonic_ns(), _cpu_s([*members, client])
    yield _sample(before_ns, members)
    while not stopped.wait(1 / hz):
        if time.monotonic() - scanned_at >= scan_s:
            members, scanned_at = tree(server_pid), time.monotonic()
        now_ns, now = time.monotonic_ns(), _cpu_s([*members, client])
        elapsed_s = s_from_ns(now_ns - before_ns)
        used = {pid: now[pid] - before.get(pid, 0.0) for pid in now}
        client_s = used.pop(client.pid, 0.0)
        yield _sample(
            now_ns,
            members,
            server_cpu_cores=sum(used.values()) / elapsed_s,
            client_cpu_cores=client_s / elapsed_s,
            host_cpu_frac=psutil.cpu_percent() / 100,
        )
        before_ns, before = now_ns, now


def _sample(t_ns: int, members: list[psutil.Process], **rates: float) -> HostSample:
    sizes = [size for member in members if (size := _rss_bytes(member)) is not None]
    return HostSample(
        t_ns=t_ns,
        server_rss_bytes=sum(sizes),
        server_processes=len(sizes),
        memory_available_bytes=psutil.virtual_memory().available,
        **rates,
    )


def _cpu_s(processes: list[psutil.Process]) -> dict[int, float]:
    """CPU seconds by process, for those that still live."""
    used: dict[int, float] = {}
    for process in processes:
        try:
            times = process.cpu_times()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        used[process.pid] = times.user + times.system
    return used


def _rss_bytes(process: psutil.Process) -> int | None:
    try:
        return process.memory_info().rss
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None
