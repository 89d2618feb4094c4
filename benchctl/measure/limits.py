"""Limits of this machine that a planned load would meet: open files, memory, disk space, a GPU."""

import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchctl.engines.engine import engine_for
from benchctl.errors import address_space_shortfall
from benchctl.load.demand import LoadSize, max_open, num_workers
from benchctl.load.process import usable_open_files
from benchctl.profile.model import Profile
from benchctl.profile.planning import arms
from benchctl.units import megabytes

OWN_OPEN_FILES: Final = 32
"""Open files of a process beside its streams: 24 of benchctl and 16 of the simulator with 32 and with 256 streams
(logs, samplers, event loop), and some for the library of a device."""
ADDRESS_SPACE_BYTES: Final = 900_000_000
"""Address space of benchctl in a run with its report, on two cores: 891 MB with 32 streams and 896 MB with 256."""
_BYTES_PER_TOKEN: Final = 67
"""Bytes of a run for each output token, beside steps: arrival, text, copy of the numbers, ``result.json``; 64 to 71
measured on the simulator."""
_BYTES_PER_STEP: Final = 1_000
"""Bytes of a run for each step, as the engine logs it and as a record; 930 to 1,120 measured on the simulator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortfall:
    """A limit below what a load takes."""

    message: str
    """Text with the remedy."""
    is_certain: bool = True
    """False where the load may stay below the limit: an open loop opens as many streams as the server is slow."""


def shortfalls(profile: Profile, size: LoadSize, results: Path) -> tuple[Shortfall, ...]:
    """The limits that measuring ``profile`` into ``results`` would meet; ``size`` is that of each run's load."""
    return (*open_files_shortfalls(profile, size), *memory_shortfalls(), *disk_shortfalls(profile, size, results))


def open_files_shortfalls(profile: Profile, size: LoadSize) -> Iterator[Shortfall]:
    """The limit of open files, where the streams of one process exceed it: each is one file.

    A server that we start inherits the limit and serves all streams; the workers of a load divide them.
    """
    arrival, limit = profile.workload.arrival, usable_open_files()
    streams = max_open(arrival, size)
    if not engine_for(profile.engine.kind).is_launched:
        streams = math.ceil(
            streams / num_workers(profile.load.workers, arrival, size, len(os.sched_getaffinity(0)))
        )
    if streams + OWN_OPEN_FILES <= limit:
        return
    is_certain = arrival.max_concurrency is not None or not arrival.is_open_loop
    begin = f"{streams:,} requests {'are' if is_certain else 'may be'} open at once"
    most = max(limit - OWN_OPEN_FILES, 0)
    lower = f", or set workload.arrival.max_concurrency to at most {most:,}" if most else ""
    needed = streams + OWN_OPEN_FILES
    yield Shortfall(
        message=f"{begin}, each an open file, and a process may have {limit:,} (ulimit -n, the hard limit); raise "
        f"it to {needed:,}: ulimit -n {needed}, in a container --ulimit nofile={needed}{lower}",
        is_certain=is_certain,
    )


def memory_shortfalls() -> Iterator[Shortfall]:
    """The limit of address space, where benchctl itself takes more."""
    if (message := address_space_shortfall(ADDRESS_SPACE_BYTES)) is not None:
        yield Shortfall(message=message)


def disk_shortfalls(profile: Profile, size: LoadSize, results: Path) -> Iterator[Shortfall]:
    """Space for results, where less is free than the runs are estimated to write for their tokens and steps."""
    streams = max_open(profile.workload.arrival, size) * size.num_outputs / max(size.num_requests, 1)
    num_steps = size.num_tokens / max(streams, 1)
    of_run = size.num_tokens * _BYTES_PER_TOKEN + num_steps * _BYTES_PER_STEP
    needed = round(profile.blocks * len(arms(profile)) * of_run)
    free = shutil.disk_usage(existing_parent(results)).free
    if free < needed:
        yield Shortfall(
            message=f"{results.absolute()}: the experiment writes about {megabytes(needed)}, and {megabytes(free)} "
            "are free there; free space, or name another directory: --output-dir DIR"
        )


def existing_parent(path: Path) -> Path:
    """``path``, or the nearest directory above it that exists."""
    path = path.absolute()
    return next(parent for parent in (path, *path.parents) if parent.exists())
