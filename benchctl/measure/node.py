"""The node on which a run is measured."""

import os
import platform
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Final

import msgspec
import psutil

from benchctl.measure.server.cores import core_ranges
from benchctl.records.schema import NodeGpu, NodeInfo

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
