"""What a measurement asks of the machine itself: cores that are free, a steady clock, room, ports."""

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
_SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - the place itself is looked at; no file is made there
_FEW_CORES: Final = 4
"""Below, the load client and a server that computes on the CPU take turns."""
_BUSY_FRAC: Final = 0.25
"""Share of the machine that other work may take before a measurement suffers."""
_FAST_CLOCKS: Final = frozenset({"tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "arch_sys_counter"})
"""Clocks that a program reads without asking the kernel."""
_SLOW_NS: Final = 1_000
_NUM_READINGS: Final = 2_000
_LEAST_FREE_BYTES: Final = GIB
_LEAST_SHARED_BYTES: Final = 512 * MIB
"""Containers begin with 64 MiB; engines of several processes pass tensors through shared memory."""
_LEAST_OPEN_FILES: Final = 4_096


def host_checks(results: Path) -> tuple[Check, ...]:
    """The machine, for measurements into ``results``, which need not exist yet."""
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
    said, remedy = f"{host.num_cores} cores, {host.cpu_model or 'model unknown'}", None
    if host.num_cores is not None and host.num_cores < _FEW_CORES:
        said += "; a server that computes on the CPU shares them with the load client"
        remedy = "trust step metrics, which the server times itself, before those of the client"
    facts = {"num_cores": host.num_cores, "cpu_model": host.cpu_model}
    return Check(topic=_TOPIC, name="processor", finding=said, remedy=remedy, facts=facts)


def _load() -> Check:
    load = psutil.getloadavg()[0]
    is_busy = load > _BUSY_FRAC * (psutil.cpu_count() or 1)
    return Check(
        topic=_TOPIC,
        name="load",
        finding=f"{load:.2f} processes ran or waited, on average over the last minute",
        remedy="end other work before measuring; 'top' shows who works" if is_busy else None,
        facts={"load_1min": load},
    )


def governor_check(system: Path) -> Check:
    """Whether cores keep their clock; ``system`` is where the kernel tells of its devices."""
    files = system.glob("cpu/cpu*/cpufreq/scaling_governor")
    governors = tuple(sorted({text for path in files if (text := _read(path)) is not None}))
    return Check(
        topic=_TOPIC,
        name="governor",
        finding=", ".join(governors) or "this machine does not tell, as is usual for a virtual one",
        remedy="sudo cpupower frequency-set -g performance" if set(governors) - {"performance"} else None,
        facts={"governors": governors},
    )


def clock_check(system: Path) -> Check:
    """Where the time comes from, how fine it is and what reading it takes."""
    source = _read(system / "clocksource/clocksource0/current_clocksource")
    resolution_ns = round(time.clock_getres(time.CLOCK_MONOTONIC) * NS_PER_S)
    reading_ns = _reading_ns()
    is_slow = max(reading_ns, resolution_ns) > _SLOW_NS or (source is not None and source not in _FAST_CLOCKS)
    said = (
        f"CLOCK_MONOTONIC from {source or 'an unknown source'}, resolution {resolution_ns} ns, "
        f"{reading_ns:.0f} ns to read"
    )
    return Check(
        topic=_TOPIC,
        name="clock",
        finding=said,
        remedy="boot with clocksource=tsc, where the processor's counter is steady" if is_slow else None,
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
    """Room where result directories go, or will be made."""
    asked = results.absolute()
    place = next(path for path in (asked, *asked.parents) if path.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        return Check(
            topic=_TOPIC,
            name="results",
            finding=f"{place} is no directory that can be written to",
            remedy="name another one: --output-dir DIR, here and at 'benchctl run'",
            is_missing=True,
            is_needed=True,
            facts={"path": str(asked)},
        )
    free_bytes = shutil.disk_usage(place).free
    return Check(
        topic=_TOPIC,
        name="results",
        finding=f"{free_bytes / GIB:.1f} GiB free for {asked}",
        remedy="free space, or name another place: --output-dir DIR" if free_bytes < _LEAST_FREE_BYTES else None,
        is_needed=True,
        facts={"path": str(asked), "free_bytes": free_bytes},
    )


def shared_memory_check(place: Path) -> Check:
    """Room for what the processes of one engine share."""
    if not place.is_dir():
        return Check(
            topic=_TOPIC,
            name="shared memory",
            finding=f"{place} does not exist; engines of several processes need it",
            remedy=f"sudo mkdir {place} && sudo mount -t tmpfs tmpfs {place}",
            is_missing=True,
        )
    usage = shutil.disk_usage(place)
    remedy = f"sudo mount -o remount,size=8G {place}; for a container, start it with --shm-size=8g"
    return Check(
        topic=_TOPIC,
        name="shared memory",
        finding=f"{usage.free / GIB:.2f} of {usage.total / GIB:.2f} GiB free at {place}",
        remedy=remedy if usage.free < _LEAST_SHARED_BYTES else None,
        facts={"free_bytes": usage.free, "total_bytes": usage.total},
    )


def open_files_check(limit: int) -> Check:
    """``limit`` is the soft limit of files that a process may have open."""
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
            remedy="end servers that nobody needs; 'ss -ltnp' shows them",
            is_missing=True,
            is_needed=True,
        )
    return Check(topic=_TOPIC, name="ports", finding=f"free, for example {port}", facts={"free_port": port})


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
