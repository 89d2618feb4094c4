"""Checks of the machine itself: free cores, a steady clock, disk space, memory, ports."""

import os
import resource
import shutil
import time
from pathlib import Path
from typing import Final

import psutil

from benchctl.errors import RunError
from benchctl.measure.doctor.check import Check
from benchctl.measure.doctor.client import client_checks
from benchctl.measure.provenance import host_info
from benchctl.measure.server.port import choose_port
from benchctl.units import GIB, MIB, NS_PER_S

_TOPIC: Final = "machine"
_SYSTEM: Final = Path("/sys/devices/system")
_SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - only its size is read; no file is created
_FEW_CORES: Final = 4
"""With fewer cores the load client and a server that computes on the CPU compete."""
_BUSY_FRAC: Final = 0.25
"""Share of the machine that other work may take before a measurement suffers."""
_FAST_CLOCKS: Final = frozenset({"tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "arch_sys_counter"})
"""Clocks that a program reads without a system call."""
_SLOW_NS: Final = 1_000
_NUM_READINGS: Final = 2_000
_LEAST_FREE_BYTES: Final = GIB
_LEAST_SHARED_BYTES: Final = 512 * MIB
"""Containers begin with 64 MiB; engines of several processes pass tensors through shared memory."""
_LEAST_OPEN_FILES: Final = 4_096


def host_checks(results: Path) -> tuple[Check, ...]:
    """Check the machine for measurements into ``results``, which need not exist yet."""
    return (
        _cores(),
        *client_checks(_SYSTEM),
        _load(),
        governor_check(_SYSTEM),
        clock_check(_SYSTEM),
        _memory(),
        results_check(results),
        shared_memory_check(_SHARED_MEMORY),
        open_files_check(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        _ports(),
    )


def _cores() -> Check:
    host = host_info()
    detail, remedy = f"{host.num_cores} cores, {host.cpu_model or 'model unknown'}", None
    if host.num_cores is not None and host.num_cores < _FEW_CORES:
        detail += "; a server that computes on the CPU shares them with the load client"
        remedy = "prefer step metrics, which the server itself times, to those of the client"
    facts = {"num_cores": host.num_cores, "cpu_model": host.cpu_model}
    return Check(topic=_TOPIC, name="processor", finding=detail, remedy=remedy, facts=facts)


def _load() -> Check:
    load = psutil.getloadavg()[0]
    is_busy = load > _BUSY_FRAC * (psutil.cpu_count() or 1)
    return Check(
        topic=_TOPIC,
        name="load",
        finding=f"{load:.2f} processes ran or waited, on average over the last minute",
        remedy="end other work before measuring; 'top' lists it" if is_busy else None,
        facts={"load_1min": load},
    )


def governor_check(system: Path) -> Check:
    """Check that cores keep their clock; ``system`` is the kernel's directory of devices."""
    files = system.glob("cpu/cpu*/cpufreq/scaling_governor")
    governors = tuple(sorted({text for path in files if (text := _read(path)) is not None}))
    return Check(
        topic=_TOPIC,
        name="governor",
        finding=", ".join(governors) or "unknown, as is usual for a virtual machine",
        remedy="sudo cpupower frequency-set -g performance" if set(governors) - {"performance"} else None,
        facts={"governors": governors},
    )


def clock_check(system: Path) -> Check:
    """Check the source of the monotonic clock, its resolution and the time to read it."""
    source = _read(system / "clocksource/clocksource0/current_clocksource")
    resolution_ns = round(time.clock_getres(time.CLOCK_MONOTONIC) * NS_PER_S)
    reading_ns = _reading_ns()
    is_slow = max(reading_ns, resolution_ns) > _SLOW_NS or (source is not None and source not in _FAST_CLOCKS)
    detail = (
        f"CLOCK_MONOTONIC from {source or 'an unknown source'}, resolution {resolution_ns} ns, "
        f"{reading_ns:.0f} ns to read"
    )
    return Check(
        topic=_TOPIC,
        name="clock",
        finding=detail,
        remedy="boot with clocksource=tsc if the processor's counter is steady" if is_slow else None,
        facts={"source": source, "resolution_ns": resolution_ns, "reading_ns": reading_ns},
    )


def _reading_ns() -> float:
    began_ns = time.monotonic_ns()
    for _ in range(_NUM_READINGS):
        time.monotonic_ns()
    return (time.monotonic_ns() - began_ns) / _NUM_READINGS


def _memory() -> Check:
    memory = psutil.virtual_memory()
    return Check(
        topic=_TOPIC,
        name="memory",
        finding=f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB available",
        facts={"available_bytes": memory.available, "total_bytes": memory.total},
    )


def results_check(results: Path) -> Check:
    """Check the free space for result directories."""
    path = results.absolute()
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return Check(
            topic=_TOPIC,
            name="results",
            finding=f"{existing} is not a directory that can be written to",
            remedy="name another one: --output-dir DIR, here and for 'benchctl run'",
            is_missing=True,
            is_needed=True,
            facts={"path": str(path)},
        )
    free_bytes = shutil.disk_usage(existing).free
    return Check(
        topic=_TOPIC,
        name="results",
        finding=f"{free_bytes / GIB:.1f} GiB free for {path}",
        remedy="free space, or name another directory: --output-dir DIR"
        if free_bytes < _LEAST_FREE_BYTES
        else None,
        is_needed=True,
        facts={"path": str(path), "free_bytes": free_bytes},
    )


def shared_memory_check(directory: Path) -> Check:
    """Check the space for memory that the processes of an engine share."""
    if not directory.is_dir():
        return Check(
            topic=_TOPIC,
            name="shared memory",
            finding=f"{directory} does not exist; engines of several processes need it",
            remedy=f"sudo mkdir {directory} && sudo mount -t tmpfs tmpfs {directory}",
            is_missing=True,
        )
    usage = shutil.disk_usage(directory)
    remedy = f"sudo mount -o remount,size=8G {directory}; start a container with --shm-size=8g"
    return Check(
        topic=_TOPIC,
        name="shared memory",
        finding=f"{usage.free / GIB:.2f} of {usage.total / GIB:.2f} GiB free at {directory}",
        remedy=remedy if usage.free < _LEAST_SHARED_BYTES else None,
        facts={"free_bytes": usage.free, "total_bytes": usage.total},
    )


def open_files_check(limit: int) -> Check:
    """Check ``limit``, the soft limit of files that a process may have open."""
    is_unlimited = limit == resource.RLIM_INFINITY
    return Check(
        topic=_TOPIC,
        name="open files",
        finding=f"{'no limit' if is_unlimited else f'{limit:,} at once'}; each request in flight takes one",
        remedy=None if is_unlimited or limit >= _LEAST_OPEN_FILES else "ulimit -n 65536",
        facts={"limit": None if is_unlimited else limit},
    )


def _ports() -> Check:
    try:
        port = choose_port(None)
    except RunError as error:
        return Check(
            topic=_TOPIC,
            name="ports",
            finding=str(error),
            remedy="end servers that are not needed; 'ss -ltnp' lists them",
            is_missing=True,
            is_needed=True,
        )
    return Check(topic=_TOPIC, name="ports", finding=f"free, for example {port}", facts={"free_port": port})


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
