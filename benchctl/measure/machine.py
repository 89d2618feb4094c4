"""The machine, the code and the versions behind a measurement, and the limits that a planned load would meet.

What is unknown is absent. The limits are those of open files, memory and disk space.
"""

import datetime as dt
import importlib.metadata
import math
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

import msgspec
import psutil

import benchctl
from benchctl.engines.engine import engine_for
from benchctl.errors import address_space_shortfall
from benchctl.load.demand import LoadSize, max_open, num_workers, size_of
from benchctl.load.process import usable_open_files
from benchctl.measure.redaction import redacted_argv, redacted_tree
from benchctl.measure.server.process import number_ranges
from benchctl.profile.load import profile_sha256
from benchctl.profile.model import Profile
from benchctl.profile.planning import arms, stopping_rule
from benchctl.profile.settings import load_points, under_load
from benchctl.records.directory import RequestSets
from benchctl.records.record import Manifest, PreparedRequest
from benchctl.records.schema import SCHEMA_VERSION, Cell, GitState, HostInfo, NodeGpu, NodeInfo
from benchctl.units import megabytes
from benchctl.untrusted.secrets import environment_redactor
from benchctl.workload.prepare import PreparedSet

_NO_BUILD: Final[Mapping[str, str]] = MappingProxyType({})


def node_name() -> str:
    """The name of this node in its cluster, or of the host, unless the user names it, as in a pod."""
    return os.environ.get("BENCHCTL_NODE_NAME") or os.environ.get("SLURMD_NODENAME") or platform.node()


def job_name() -> str | None:
    """The job of the scheduler that runs us, such as ``slurm 17_3``; None outside of one."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    if array and task:
        return f"slurm {array}_{task}"
    job = os.environ.get("SLURM_JOB_ID")
    return f"slurm {job}" if job else None


def this_node(gpus: Sequence[NodeGpu] = (), build: Mapping[str, str] = _NO_BUILD) -> NodeInfo:
    """This machine as it is now, with the devices that a server can see and the build of its engine.

    What the system does not tell is absent. The first call reads the system, later ones take microseconds.
    """
    return msgspec.structs.replace(
        _machine(),
        name=node_name(),
        job=job_name(),
        cores=number_ranges(frozenset(os.sched_getaffinity(0))),
        gpus=tuple(gpus),
        build=dict(build),
    )


@cache
def _machine() -> NodeInfo:
    """The part that stays the same while this process lives."""
    return NodeInfo(
        name=platform.node(),
        hostname=platform.node(),
        platform=platform.platform(),
        cpu_model=cpu_model(),
        num_numa_nodes=len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or None,
        memory_bytes=psutil.virtual_memory().total,
    )


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    """The name of the processor; None where the system does not give it."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else None


_PACKAGES: Final = (
    "httptools", "httpx", "llama-cpp-python", "msgspec", "numpy", "nvidia-ml-py", "pydantic",
    "scipy", "sglang", "torch", "transformers", "uvicorn", "uvloop", "vllm",
)  # fmt: skip
"""Packages whose version can change a number: those of the client, and engines in the same environment."""
_COMMIT, _NO_COMMIT = "# branch.oid ", "(initial)"
"""The commit in the output of ``git status``."""


def new_manifest(profile: Profile, prepared: PreparedSet, argv: Sequence[str]) -> Manifest:
    """Everything that is known about a measurement before it begins."""
    return Manifest(
        schema_version=SCHEMA_VERSION,
        state="planned",
        profile=profile.name,
        profile_sha256=profile_sha256(profile),
        request_set_sha256=prepared.sha256,
        request_sets=prepared.listed,
        dataset=prepared.dataset,
        seed=profile.seed,
        blocks=profile.blocks,
        baseline=profile.baseline,
        stop=profile.stop,
        lengths_from=prepared.lengths_from,
        stopping=stopping_rule(profile),
        engine=profile.engine.kind,
        created_at=dt.datetime.now(dt.UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        argv=redacted_argv(argv),
        benchctl_version=benchctl.__version__,
        versions=package_versions(),
        git=git_state(),
        host=host_info(),
        warnings=redacted_tree(prepared.warnings, environment_redactor()),
    )


def package_versions() -> dict[str, str]:
    packages = ((name, next(iter(importlib.metadata.distributions(name=name)), None)) for name in _PACKAGES)
    return {name: _version(package) for name, package in packages if package is not None}


def _version(package: importlib.metadata.Distribution) -> str:
    """The version line of the metadata: ``Distribution.version`` parses the whole description, which is slow."""
    match = re.search(r"^Version: *(\S+)", package.read_text("METADATA") or "", re.MULTILINE)
    return package.version if match is None else match[1]


def git_state(package: Path = Path(benchctl.__file__).parent) -> GitState | None:
    """Commit of the measuring code; None if ``package`` is not part of a git work tree, or git is absent.

    A package in an ignored directory of a work tree (in a virtual environment, for example) has no commit.
    """
    if not git_output(package, "ls-files", "."):
        return None
    status = git_output(package, "status", "--porcelain=v2", "--branch", "--no-ahead-behind", "--", ".")
    if status is None:
        return None
    lines = status.splitlines()
    sha = next((line.removeprefix(_COMMIT) for line in lines if line.startswith(_COMMIT)), _NO_COMMIT)
    is_dirty = any(not line.startswith("#") for line in lines)
    return None if sha == _NO_COMMIT else GitState(sha=sha, is_dirty=is_dirty)


def git_output(directory: Path, *arguments: str) -> str | None:
    """The output of git in a directory; None where it refuses, or is absent."""
    try:
        output = subprocess.run(
            ("git", "-C", str(directory), *arguments),  # noqa: S607 - the git of the user
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=True,
            timeout=10.0,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return output.stdout


def host_info() -> HostInfo:
    return HostInfo(
        hostname=platform.node(),
        platform=platform.platform(),
        python=platform.python_version(),
        cpu_model=cpu_model(),
        num_cores=psutil.cpu_count() or 1,
        memory_bytes=psutil.virtual_memory().total,
    )


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


class LoadToSend(NamedTuple):
    """The profile under one load, which has no load factors, and the load's requests with their totals."""

    profile: Profile
    size: LoadSize
    requests: tuple[PreparedRequest, ...] = ()
    """Left out where they are too many to hold."""


def loads_at(
    profile: Profile, requests: RequestSets, cells: Iterable[Cell] | None = None
) -> tuple[LoadToSend, ...]:
    """The loads of cells; without them those of all load points."""
    points = load_points(profile) if cells is None else cells
    sets = ((under_load(profile, cell), requests.of(cell)) for cell in points)
    return tuple(LoadToSend(loaded, size_of(sent), sent) for loaded, sent in sets)


def most_open(loads: Sequence[LoadToSend]) -> LoadToSend:
    """The load with most requests open at once."""
    return max(loads, key=lambda load: max_open(load.profile.workload.arrival, load.size))


def shortfalls(loads: Sequence[LoadToSend], results: Path) -> tuple[Shortfall, ...]:
    """The limits that measuring ``loads``, those of all load points, into ``results`` would meet."""
    widest = most_open(loads)
    return (
        *open_files_shortfalls(widest.profile, widest.size),
        *memory_shortfalls(),
        *disk_shortfalls(loads, results),
    )


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


def disk_shortfalls(loads: Sequence[LoadToSend], results: Path) -> Iterator[Shortfall]:
    """Space for results, where less is free than the runs are estimated to write for their tokens and steps."""
    needed = 0
    for profile, size, _ in loads:
        streams = max_open(profile.workload.arrival, size) * size.num_outputs / max(size.num_requests, 1)
        num_steps = size.num_tokens / max(streams, 1)
        of_load = size.num_tokens * _BYTES_PER_TOKEN + num_steps * _BYTES_PER_STEP
        needed += round(profile.blocks * len(arms(profile)) * profile.num_loads * of_load)
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
