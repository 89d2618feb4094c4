"""Inspection of this machine before measuring on it: every topic in order, with those of its hardware and software.

    software ▸ machine ▸ GPUs ▸ peaks ▸ memory ▸ engines ▸ datasets: one ``Check`` for each part

Nothing is changed or downloaded, and programs are started only to read their version.
"""

import os
import platform
import resource
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from timeit import timeit
from typing import Final

import psutil

from benchctl import __version__
from benchctl.engines.engine import Installation, engine_for
from benchctl.errors import EngineUnavailableError, UsageError
from benchctl.load.process import Priority, load_priority, usable_open_files
from benchctl.measure.devices import kv_shortfalls, value_models
from benchctl.measure.doctor.check import Check
from benchctl.measure.doctor.gpu import gpu_checks, peak_checks
from benchctl.measure.machine import OWN_OPEN_FILES, existing_parent, git_state, host_info, memory_shortfalls
from benchctl.measure.telemetry.gpus import gpu_inventory
from benchctl.profile.choices import ServerOptions
from benchctl.profile.engine_table import ENGINES, EngineSpec
from benchctl.profile.model import Profile
from benchctl.units import GIB, MIB, NS_PER_S
from benchctl.workload.datasets.base import data_directory, dataset_files, file_state

_SHORT_SHA: Final = 12


def inspect_machine(
    results: Path, engines: Mapping[str, ServerOptions], profile: Profile | None = None, *, needs_gpu: bool = False
) -> tuple[Check, ...]:
    """All checks, topic after topic, for measurements into ``results``.

    ``engines`` are those that must be installed, with the options that name their environments, by kind;
    ``profile`` is an experiment whose memory is checked.
    """
    gpus = gpu_checks(is_needed=needs_gpu or any(options.uses_gpu for options in engines.values()))
    has_gpu = not any(check.is_missing for check in gpus)
    return (
        *_versions(),
        *host_checks(results),
        *gpus,
        *peak_checks([gpu.name for gpu in gpu_inventory()]),
        *(() if profile is None else memory_checks(profile)),
        *engine_checks(engines, has_gpu=has_gpu),
        *(_data_set(name, data_directory()) for name in dataset_files()),
    )


def _versions() -> Iterator[Check]:
    python, git = platform.python_version(), git_state()
    yield Check(
        "software",
        "python",
        f"{python} ({sys.executable})",
        facts={"version": python, "executable": sys.executable},
    )
    commit = None if git is None else git.sha[:_SHORT_SHA] + (" with changes" if git.is_dirty else "")
    yield Check(
        "software",
        "benchctl",
        __version__ + (f", commit {commit}" if commit else ""),
        facts={"version": __version__, "commit": commit},
    )


def memory_checks(profile: Profile) -> Iterator[Check]:
    """One check for each value model of the profile, and one where the KV caches of the arms may differ."""
    check = partial(Check, "memory", is_needed=True)
    try:
        for directory, memory in value_models(profile).items():
            yield check(
                "value model",
                f"{memory} ({directory})",
                facts={"directory": directory, "weight_bytes": memory.weights, "prefix_bytes": memory.prefixes},
            )
    except UsageError as error:
        yield check(
            "value model",
            str(error),
            remedy="name the directory of a value model with --set variants.NAME.server.value_model=DIR",
            is_missing=True,
        )
    for shortfall in kv_shortfalls(profile):
        yield check(
            "KV cache",
            shortfall.message,
            remedy="change one of these with --set, or in the profile",
            is_missing=shortfall.is_certain,
        )


def engine_checks(needed: Mapping[str, ServerOptions], *, has_gpu: bool) -> tuple[Check, ...]:
    """Check the simulator, which is always available, and each engine that can be installed."""
    specs = [
        spec
        for spec in ENGINES.values()
        if spec.installed_by is not None and (spec.kind in needed or not spec.is_optional_check)
    ]
    with ThreadPoolExecutor(max_workers=len(specs)) as workers:
        installed = tuple(workers.map(lambda spec: _engine(spec, needed.get(spec.kind), has_gpu=has_gpu), specs))
    return (Check("engine", "sim", "the simulator is part of benchctl", is_needed=True), *installed)


def _engine(spec: EngineSpec, options: ServerOptions | None, *, has_gpu: bool) -> Check:
    """Check an engine, which is needed where its ``options`` are given."""
    check = partial(Check, "engine", spec.kind, is_needed=options is not None)
    finding = "not installed"
    try:
        installation = engine_for(spec.kind).installation(options)
    except EngineUnavailableError as error:
        installation = None
        finding = finding if options is None else str(error)
    if installation is None:
        where = ", on a machine with an NVIDIA GPU" if spec.needs_gpu and not has_gpu else ""
        return check(finding, remedy=f"{spec.installed_by}{where}", is_missing=True)
    finding, remedy, is_broken = _installed(spec, installation, has_gpu=has_gpu)
    facts = {"version": installation.version, "program": str(installation.program)}
    if installation.is_python:
        facts = {"version": installation.version, "torch": installation.torch, "python": str(installation.program)}
    return check(finding, remedy=remedy, is_missing=is_broken, facts=facts)


def _installed(spec: EngineSpec, installation: Installation, *, has_gpu: bool) -> tuple[str, str | None, bool]:
    """The installed software, in words; the remedy for what is wrong with it; and whether it cannot start."""
    version, program = installation.version, installation.program
    if not installation.is_python:
        return (
            f"{version or 'of unknown version'} ({program})",
            (None if version else f"'{program} --version' fails; run '{spec.installed_by} --force'"),
            version is None,
        )
    torch, missing = installation.torch, installation.missing_packages
    finding = f"{version}, torch {torch or 'missing'} ({program})"
    if missing:
        return f"{finding}; it does not start without {', '.join(missing)}", f"{spec.installed_by} --force", True
    if has_gpu and torch is not None and torch.endswith("+cpu"):
        finding += "; it computes on the CPU although a GPU is available"
        return finding, f"{spec.installed_by} --device cuda", False
    return finding, None, False


def _data_set(name: str, directory: Path) -> Check:
    """Check the size only; ``benchctl data verify`` reads the whole file."""
    file = dataset_files()[name]
    state, path = file_state(file, directory, full=False), file.path_in(directory)
    finding = {
        "present": f"{path}",
        "missing": f"not in {directory}",
        "damaged": f"{path} does not have the size of the published file",
    }[state]
    return Check(
        "data",
        name,
        finding,
        remedy=None if state == "present" else f"benchctl data fetch {name}",
        is_missing=state == "missing",
        facts={"path": str(path), "state": state},
    )


_check = partial(Check, "machine")
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
_LEAST_PROCESSES: Final = 1_024
_TO_OPEN_MORE: Final = (
    "ulimit -n 65536, as root where the hard limit is lower; in a container --ulimit nofile=65536"
)
_TO_GET_PRIORITY: Final = "sudo prlimit --pid $$ --rtprio=1 in this shell; docker run --cap-add SYS_NICE"


def host_checks(results: Path) -> tuple[Check, ...]:
    """Check the machine for measurements into ``results``, which need not exist yet."""
    most_processes = resource.getrlimit(resource.RLIMIT_NPROC)[0]  # a real engine starts some hundred
    return (
        _processor(),
        priority_check(granted_priority()),
        _load(),
        governor_check(_SYSTEM),
        clock_check(_SYSTEM),
        _memory(),
        results_check(results),
        shared_memory_check(_SHARED_MEMORY),
        open_files_check(usable_open_files()),
        _limit_check(
            "processes",
            most_processes,
            _LEAST_PROCESSES,
            f"{most_processes:,} processes and threads of this user at once (ulimit -u)",
            "ulimit -u unlimited",
        ),
    )


def _processor() -> Check:
    host = host_info()
    finding, remedy = f"{host.num_cores} cores, {host.cpu_model or 'model unknown'}", None
    if host.num_cores is not None and host.num_cores < _FEW_CORES:
        finding += "; a server that computes on the CPU shares them with the load client"
        remedy = "prefer step metrics, which the server itself times, to those of the client"
    return _check(
        "processor", finding, remedy=remedy, facts={"num_cores": host.num_cores, "cpu_model": host.cpu_model}
    )


def granted_priority() -> Priority:
    """The scheduling priority that the client gets here, tried in a temporary thread."""
    with ThreadPoolExecutor(max_workers=1) as temporary_thread:
        return temporary_thread.submit(_try_priority).result()


def _try_priority() -> Priority:
    with load_priority("auto") as granted:
        return granted


def priority_check(granted: Priority) -> Check:
    """Check that the client can take precedence over a server that keeps all cores busy."""
    is_refused = granted.level != "fifo" and "not permitted" in granted.reason
    return _check(
        "priority",
        f"of the load client: {granted}",
        remedy=_TO_GET_PRIORITY if is_refused else None,
        facts={"level": granted.level, "reason": granted.reason},
    )


def _load() -> Check:
    load = psutil.getloadavg()[0]
    is_busy = load > _BUSY_FRAC * (psutil.cpu_count() or 1)
    return _check(
        "load",
        f"{load:.2f} processes ran or waited, on average over the last minute",
        remedy="end other work before measuring; 'top' lists it" if is_busy else None,
        facts={"load_1min": load},
    )


def governor_check(system: Path) -> Check:
    """Check that cores keep their clock; ``system`` is the kernel's directory of devices."""
    governors = tuple(
        sorted(
            {text for path in system.glob("cpu/cpu*/cpufreq/scaling_governor") if (text := _read(path)) is not None}
        )
    )
    return _check(
        "governor",
        ", ".join(governors) or "unknown, as is usual for a virtual machine",
        remedy="sudo cpupower frequency-set -g performance" if set(governors) - {"performance"} else None,
        facts={"governors": governors},
    )


def clock_check(system: Path) -> Check:
    """Check the source of the monotonic clock, its resolution and the time to read it."""
    source = _read(system / "clocksource/clocksource0/current_clocksource")
    resolution_ns = round(time.clock_getres(time.CLOCK_MONOTONIC) * NS_PER_S)
    reading_ns = timeit(time.monotonic_ns, number=_NUM_READINGS) / _NUM_READINGS * NS_PER_S
    is_slow = max(reading_ns, resolution_ns) > _SLOW_NS or (source is not None and source not in _FAST_CLOCKS)
    return _check(
        "clock",
        f"CLOCK_MONOTONIC from {source or 'an unknown source'}, resolution {resolution_ns} ns, "
        f"{reading_ns:.0f} ns to read",
        remedy="boot with clocksource=tsc if the processor's counter is steady" if is_slow else None,
        facts={"source": source, "resolution_ns": resolution_ns, "reading_ns": reading_ns},
    )


def _memory() -> Check:
    memory = psutil.virtual_memory()
    shortfall = next(memory_shortfalls(), None)
    finding = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB available"
    facts = {"available_bytes": memory.available, "total_bytes": memory.total}
    if shortfall is None:
        return _check("memory", finding, facts=facts)
    finding += f"; {shortfall.message.partition(';')[0]}"
    return _check("memory", finding, remedy="ulimit -v unlimited", is_missing=True, is_needed=True, facts=facts)


def results_check(results: Path) -> Check:
    """Check the free space for result directories."""
    path, existing = results.absolute(), existing_parent(results)
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return _check(
            "results",
            f"{existing} is not a directory that can be written to",
            remedy="name another one: --output-dir DIR, here and for 'benchctl run'",
            is_missing=True,
            is_needed=True,
            facts={"path": str(path)},
        )
    free_bytes = shutil.disk_usage(existing).free
    return _check(
        "results",
        f"{free_bytes / GIB:.1f} GiB free for {path}",
        remedy=None
        if free_bytes >= _LEAST_FREE_BYTES
        else "free space, or name another directory: --output-dir DIR",
        is_needed=True,
        facts={"path": str(path), "free_bytes": free_bytes},
    )


def shared_memory_check(directory: Path) -> Check:
    """Check the space for memory that the processes of an engine share."""
    if not directory.is_dir():
        return _check(
            "shared memory",
            f"{directory} does not exist; engines of several processes need it",
            remedy=f"sudo mkdir {directory} && sudo mount -t tmpfs tmpfs {directory}",
            is_missing=True,
        )
    usage = shutil.disk_usage(directory)
    remedy = f"sudo mount -o remount,size=8G {directory}; start a container with --shm-size=8g"
    return _check(
        "shared memory",
        f"{usage.free / GIB:.2f} of {usage.total / GIB:.2f} GiB free at {directory}",
        remedy=remedy if usage.free < _LEAST_SHARED_BYTES else None,
        facts={"free_bytes": usage.free, "total_bytes": usage.total},
    )


def open_files_check(limit: int) -> Check:
    """Check ``limit``, the most files that a process may open once its soft limit is raised to the hard one."""
    return _limit_check(
        "open files",
        limit,
        _LEAST_OPEN_FILES,
        f"{limit:,} at once, enough for {max(limit - OWN_OPEN_FILES, 0):,} requests in flight",
        _TO_OPEN_MORE,
    )


def _limit_check(name: str, limit: int, least: int, finding: str, remedy: str) -> Check:
    if limit in {resource.RLIM_INFINITY, sys.maxsize}:
        return _check(name, "no limit", facts={"limit": None})
    return _check(name, finding, remedy=None if limit >= least else remedy, facts={"limit": limit})


def _read(path: Path) -> str | None:
    with suppress(OSError, UnicodeDecodeError):
        return path.read_text(encoding="ascii").strip()
    return None
