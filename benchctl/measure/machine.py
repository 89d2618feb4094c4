"""The machine, the code and the versions behind a measurement; what is unknown is absent."""

import datetime as dt
import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Final

import msgspec
import psutil

import benchctl
from benchctl.analysis.stopping_rule import stopping_rule
from benchctl.measure.redaction import redacted_argv, redacted_tree
from benchctl.measure.server.process import core_ranges
from benchctl.profile.load import profile_sha256
from benchctl.profile.model import Profile
from benchctl.records.record import Manifest
from benchctl.records.schema import SCHEMA_VERSION, GitState, HostInfo, NodeGpu, NodeInfo
from benchctl.untrusted.secrets import environment_redactor
from benchctl.workload.prepare import PreparedSet

_NO_BUILD: Final[Mapping[str, str]] = MappingProxyType({})
_CPUINFO: Final = Path("/proc/cpuinfo")
_NUMA_NODES: Final = Path("/sys/devices/system/node")


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
        _machine(), name=node_name(), job=job_name(), cores=usable_cores(), gpus=tuple(gpus), build=dict(build)
    )


@cache
def _machine() -> NodeInfo:
    """The part that stays the same while this process lives."""
    return NodeInfo(
        name=platform.node(),
        hostname=platform.node(),
        platform=platform.platform(),
        cpu_model=cpu_model(),
        num_numa_nodes=_num_numa_nodes(),
        memory_bytes=psutil.virtual_memory().total,
    )


def cpu_model(cpuinfo: Path = _CPUINFO) -> str | None:
    """The name of the processor; None where the system does not give it."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else None


def usable_cores() -> str | None:
    """The cores that this process may use, such as ``0-7,16-23``; None where the system cannot bind processes."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    return core_ranges(frozenset(os.sched_getaffinity(0)))


def _num_numa_nodes() -> int | None:
    try:
        return sum(1 for entry in _NUMA_NODES.iterdir() if re.fullmatch(r"node\d+", entry.name)) or None
    except OSError:
        return None


_PACKAGES: Final = (
    "aiohttp", "httpx", "llama-cpp-python", "msgspec", "numpy", "nvidia-ml-py", "pydantic",
    "scipy", "sglang", "torch", "transformers", "uvloop", "vllm",
)  # fmt: skip
"""Packages whose version can change a number: those of the client, and engines in the same environment."""
_GIT_LIMIT_S: Final = 10.0
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
    if not _git(package, "ls-files", "."):
        return None
    status = _git(package, "status", "--porcelain=v2", "--branch", "--no-ahead-behind", "--", ".")
    if status is None:
        return None
    lines = status.splitlines()
    sha = next((line.removeprefix(_COMMIT) for line in lines if line.startswith(_COMMIT)), _NO_COMMIT)
    is_dirty = any(not line.startswith("#") for line in lines)
    return None if sha == _NO_COMMIT else GitState(sha=sha, is_dirty=is_dirty)


def _git(directory: Path, *arguments: str) -> str | None:
    try:
        output = subprocess.run(
            ("git", "-C", str(directory), *arguments),  # noqa: S607 - the git of the user
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=True,
            timeout=_GIT_LIMIT_S,
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
