"""Places of this host on which blocks can be measured at the same time, each with devices or cores of its own.

The cores of a device do not depend on how many blocks run at a time: a host with eight GPUs gives the first of them
the same cores whether one block runs or eight.
"""

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchctl.errors import UsageError
from benchctl.measure.devices import gpus_of_block
from benchctl.measure.server.process import number_ranges
from benchctl.measure.telemetry.gpus import open_gpu
from benchctl.measure.telemetry.reading import VARIABLE, names_mig
from benchctl.profile.engine_table import ENGINES, is_virtual
from benchctl.profile.model import Profile
from benchctl.profile.planning import arms, variant_settings
from benchctl.records.schema import NodeGpu
from benchctl.units import count_of
from benchctl.untrusted.text import visible_value

_SYSTEM: Final = Path("/sys/devices/system")
_RANGE: Final = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6}))?")
_NODE: Final = re.compile(r"node([0-9]{1,6})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One place for one block at a time; no two slots share a device or a core."""

    index: int
    """Number of the slot, from 0."""
    gpus: tuple[str, ...] = ()
    """UUIDs of its devices, as ``CUDA_VISIBLE_DEVICES`` takes them; empty on a host without any."""
    cores: tuple[int, ...] = ()
    """Processor cores of server and client; empty for all."""
    handles: tuple[int, ...] = ()
    """Open files whose locks say that the slot is ours; empty for one that is not held."""

    def __str__(self) -> str:
        cores = f"{count_of(len(self.cores), 'core')} ({number_ranges(frozenset(self.cores))})"
        return f"{', '.join(self.gpus)}, {cores}" if self.gpus else cores


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


def check_beside(profile: Profile, num: int) -> None:
    """Raise UsageError for an experiment of which no ``num`` blocks can be measured beside each other."""
    for variant, cell in arms(profile):
        server = variant_settings(profile, variant, cell).server
        if VARIABLE in getattr(server, "env", {}):
            raise UsageError(
                f"variant {variant!r}: engine.options.env.{VARIABLE} names the devices of all servers, and --on "
                f"local gives each block its own; leave it out, and set {VARIABLE} for benchctl itself to choose "
                "among those of this host"
            )
        if num > 1 and ENGINES[profile.engine.kind].is_attached:
            raise UsageError(
                f"variant {variant!r}: all blocks would share the server that is attached; take --parallel 1"
            )
        if num > 1 and server.fixed_port is not None:
            raise UsageError(
                f"variant {variant!r}: engine.options.port is {server.fixed_port}, which one server has at a time; "
                "take --parallel 1"
            )


def this_host(system: Path = _SYSTEM) -> Host:
    """This host with what this process may use; ``system`` is the kernel's directory of devices.

    Raises UsageError where CUDA_VISIBLE_DEVICES names parts of devices, which cannot be handed out.
    """
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
        together = tuple(
            sorted((_listed(system / f"cpu/cpu{thread}/topology/thread_siblings_list") | {thread}) & usable)
        )
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


def slots_for(profile: Profile, num: int) -> tuple[Slot, ...]:
    """Slots of this host for ``num`` blocks of an experiment at a time. Raises as ``slots_of_host`` does."""
    host = this_host()
    return slots_of_host(
        host,
        num,
        gpus_of_block(profile, has_gpus=bool(host.visible)) or 0,
        is_virtual=is_virtual(profile.engine.kind),
    )


def slots_of_host(host: Host, num: int, gpus_per_block: int, *, is_virtual: bool = False) -> tuple[Slot, ...]:
    """At least ``num`` slots: all that the host has devices for, or without devices ``num`` equal sets of cores.

    On a virtual clock, whose times do not depend on cores, blocks may share a physical core. Raises UsageError
    where the host has too few devices or cores.
    """
    if gpus_per_block:
        return _gpu_slots(host, num, gpus_per_block)
    return _core_slots(host, num, is_virtual=is_virtual)


def _gpu_slots(host: Host, num: int, gpus_per_block: int) -> tuple[Slot, ...]:
    groups = _groups([gpu for gpu in host.gpus if gpu.index in host.visible], gpus_per_block)
    if len(groups) < num:
        raise UsageError(
            f"{count_of(num, 'block')} at a time, each on {count_of(gpus_per_block, 'GPU')}, need "
            f"{num * gpus_per_block}, and of {len(host.gpus)} here {len(host.visible)} may be used ({VARIABLE}; "
            f"'benchctl doctor --gpu' shows them); --parallel {len(groups)} is the most"
        )
    shares = _cores_by_gpu(host)
    slots = tuple(
        Slot(
            index=index,
            gpus=tuple(gpu.uuid or str(gpu.index) for gpu in group),
            cores=tuple(sorted(core for gpu in group for core in shares[gpu.index])),
        )
        for index, group in enumerate(groups)
    )
    if not slots[0].cores:
        raise UsageError(
            f"{count_of(len(host.gpus), 'GPU')} share {_cores_text(host)}, and each block needs its own; allow "
            "more cores, or hide devices from the driver"
        )
    return slots


def _groups(gpus: Sequence[NodeGpu], size: int) -> list[tuple[NodeGpu, ...]]:
    """Devices of one NUMA node together as far as they go, then what is left of all nodes."""
    by_node: dict[int, list[NodeGpu]] = {}
    for gpu in gpus:
        by_node.setdefault(-1 if gpu.numa_node is None else gpu.numa_node, []).append(gpu)
    nodes = [members for _, members in sorted(by_node.items())]
    left = [gpu for members in nodes for gpu in members[len(members) // size * size :]]
    return [
        tuple(members[first : first + size])
        for members in (*nodes, left)
        for first in range(0, len(members) - size + 1, size)
    ]


def _cores_by_gpu(host: Host) -> dict[int, tuple[int, ...]]:
    """The hardware threads of each device's equal share, by its number: of its own NUMA node where the system tells
    all nodes and each has a core for every device, else of all cores.
    """
    nodes = {gpu.index: gpu.numa_node for gpu in host.gpus}
    cores_of = {
        node: [core for core in host.cores if host.numa_nodes.get(core[0]) == node] for node in nodes.values()
    }
    demand = Counter(nodes.values())
    if None in cores_of or any(len(cores_of[node]) < count for node, count in demand.items()):
        return dict(zip(nodes, _equal_sets(host.cores, len(nodes)), strict=True))
    shares: dict[int, tuple[int, ...]] = {}
    for node, cores in cores_of.items():
        members = [index for index, its_node in nodes.items() if its_node == node]
        shares |= zip(members, _equal_sets(cores, len(members)), strict=True)
    return shares


def _core_slots(host: Host, num: int, *, is_virtual: bool) -> tuple[Slot, ...]:
    cores = host.cores
    if is_virtual and len(cores) < num:
        cores = tuple((thread,) for core in cores for thread in core)
    if len(cores) < num:
        raise UsageError(
            f"{count_of(num, 'block')} at a time need {count_of(num, 'processor core')}, one for each, and "
            f"{_cores_text(host)} may be used here; --parallel {len(cores)} is the most"
        )
    return tuple(Slot(index=index, cores=share) for index, share in enumerate(_equal_sets(cores, num)))


def _equal_sets(cores: Sequence[tuple[int, ...]], num: int) -> list[tuple[int, ...]]:
    """``num`` sets of neighbouring cores, all of one size; what does not divide is left free."""
    size = len(cores) // num
    return [_threads(cores[index * size : (index + 1) * size]) for index in range(num)]


def _threads(cores: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sorted(thread for core in cores for thread in core))


def _cores_text(host: Host) -> str:
    return f"{count_of(len(host.cores), 'core')} ({number_ranges(frozenset(_threads(host.cores)))})"
