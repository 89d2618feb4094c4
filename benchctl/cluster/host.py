"""Devices and processor cores of this host, as far as they decide which blocks can run beside each other."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchctl.errors import UsageError
from benchctl.measure.telemetry.gpu import open_gpu
from benchctl.measure.telemetry.visible_devices import VARIABLE, names_mig
from benchctl.records.schema import NodeGpu
from benchctl.untrusted.text import visible_value

_SYSTEM: Final = Path("/sys/devices/system")
_RANGE: Final = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6}))?")
_NODE: Final = re.compile(r"node([0-9]{1,6})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Devices and cores of this host, and which of them this process may use."""

    gpus: tuple[NodeGpu, ...] = ()
    """All devices that the driver shows, in its order."""
    visible: tuple[int, ...] = ()
    """Numbers of those that CUDA_VISIBLE_DEVICES leaves."""
    cores: tuple[tuple[int, ...], ...] = ()
    """The usable physical cores, each with its usable hardware threads, ordered by NUMA node and number."""
    numa_nodes: Mapping[int, int] = field(default_factory=dict)
    """NUMA node of each hardware thread, where the system tells."""

    @property
    def num_threads(self) -> int:
        """Usable hardware threads, which the system counts as processors."""
        return sum(map(len, self.cores))


def this_host(system: Path = _SYSTEM) -> Host:
    """This host with what this process may use; ``system`` is the kernel's directory of devices.

    Raises UsageError where CUDA_VISIBLE_DEVICES names parts of devices, which cannot be handed out, and on a
    system that cannot bind processes to cores.
    """
    if not hasattr(os, "sched_getaffinity"):
        raise UsageError(
            "--on local binds each block to processor cores of its own, and this system cannot; leave it out, and "
            "the blocks are measured one after the other"
        )
    visible = os.environ.get(VARIABLE)
    if names_mig(visible):
        raise UsageError(
            f"{VARIABLE} is {visible_value(visible)}, and --on local hands out whole devices; name whole GPUs there"
        )
    gpus = _gpus(None)
    chosen = gpus if visible is None else _gpus(visible)
    numa_nodes = _numa_nodes(system)
    return Host(
        gpus=gpus,
        visible=tuple(gpu.index for gpu in chosen),
        cores=_physical_cores(os.sched_getaffinity(0), numa_nodes, system),
        numa_nodes=numa_nodes,
    )


def _gpus(visible: str | None) -> tuple[NodeGpu, ...]:
    with open_gpu(visible) as reader:
        return reader.described() if reader is not None else ()


def _physical_cores(usable: set[int], numa_nodes: Mapping[int, int], system: Path) -> tuple[tuple[int, ...], ...]:
    """The usable hardware threads by physical core; each is a core of its own where the system does not tell."""
    cores: dict[int, tuple[int, ...]] = {}
    for thread in sorted(usable):
        siblings = _listed(system / f"cpu/cpu{thread}/topology/thread_siblings_list") | {thread}
        together = tuple(sorted(siblings & usable))
        cores.setdefault(together[0], together)
    return tuple(sorted(cores.values(), key=lambda core: (numa_nodes.get(core[0], 0), core)))


def _numa_nodes(system: Path) -> dict[int, int]:
    try:
        names = [entry.name for entry in (system / "node").iterdir()]
    except OSError:
        return {}
    nodes = {name: int(match[1]) for name in names if (match := _NODE.fullmatch(name))}
    return {thread: node for name, node in nodes.items() for thread in _listed(system / "node" / name / "cpulist")}


def _listed(path: Path) -> frozenset[int]:
    """The numbers in a file such as ``0-3,8``; none where it cannot be read."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return frozenset()
    ranges = [match for part in text.split(",") if (match := _RANGE.fullmatch(part))]
    return frozenset(number for match in ranges for number in range(int(match[1]), int(match[2] or match[1]) + 1))
