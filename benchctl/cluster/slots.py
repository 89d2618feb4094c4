"""Places of this host on which blocks can be measured at the same time, each with devices or cores of its own.

The cores of a device do not depend on how many blocks run at a time: a host with eight GPUs gives the first of them
the same cores whether one block runs or eight.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchctl.cluster.host import Host, this_host
from benchctl.engines.engine import engine_for
from benchctl.errors import UsageError
from benchctl.measure.limits import gpus_of_block
from benchctl.measure.server.resources import core_ranges
from benchctl.profile.model import Profile
from benchctl.records.schema import NodeGpu
from benchctl.units import count_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One place for one block at a time; no two slots share a device or a core."""

    index: int
    """Number of the slot, from 0."""
    gpus: tuple[str, ...] = ()
    """UUIDs of its devices, as ``CUDA_VISIBLE_DEVICES`` takes them; empty on a host without any."""
    cores: tuple[int, ...] = ()
    """Processor cores of server and client; empty for all."""


def slots_for(profile: Profile, num: int) -> tuple[Slot, ...]:
    """Slots of this host for ``num`` blocks of an experiment at a time. Raises as ``slots_of_host`` does."""
    host = this_host()
    return slots_of_host(
        num,
        gpus_of_block(profile, has_gpus=bool(host.visible)),
        is_virtual=engine_for(profile.engine.kind).clock == "virtual",
        host=host,
    )


def slots_of_host(
    num: int, gpus_per_block: int | None = None, *, is_virtual: bool = False, host: Host | None = None
) -> tuple[Slot, ...]:
    """At least ``num`` slots: all that the host has devices for, or without devices ``num`` equal sets of cores.

    ``gpus_per_block`` is 0 for servers that need none; None for one where the host has any. On a virtual clock,
    whose times do not depend on cores, blocks may share a physical core. Raises UsageError where the host has too
    few devices or cores.
    """
    host = this_host() if host is None else host
    if gpus_per_block is None:
        gpus_per_block = 1 if host.visible else 0
    if gpus_per_block:
        return _gpu_slots(host, num, gpus_per_block)
    return _core_slots(host, num, is_virtual=is_virtual)


def _gpu_slots(host: Host, num: int, gpus_per_block: int) -> tuple[Slot, ...]:
    groups = _groups([gpu for gpu in host.gpus if gpu.index in host.visible], gpus_per_block)
    if len(groups) < num:
        raise UsageError(
            f"{count_of(num, 'block')} at a time, each on {count_of(gpus_per_block, 'GPU')}, need "
            f"{num * gpus_per_block}, and {_devices_text(host)}; "
            + (f"--parallel {len(groups)} is the most" if groups else "lower cluster.gpus_per_block")
        )
    shares = _cores_by_gpu(host)
    slots = tuple(
        Slot(
            index=index,
            gpus=tuple(_identity(gpu) for gpu in group),
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
    nodes = sorted({_node_order(gpu) for gpu in gpus})
    by_node = [[gpu for gpu in gpus if _node_order(gpu) == node] for node in nodes]
    left = [gpu for members in by_node for gpu in members[len(members) // size * size :]]
    return [group for members in (*by_node, left) for group in _whole_groups(members, size)]


def _whole_groups(gpus: Sequence[NodeGpu], size: int) -> list[tuple[NodeGpu, ...]]:
    return [tuple(gpus[first : first + size]) for first in range(0, len(gpus) - size + 1, size)]


def _node_order(gpu: NodeGpu) -> int:
    return -1 if gpu.numa_node is None else gpu.numa_node


def _identity(gpu: NodeGpu) -> str:
    return gpu.uuid or str(gpu.index)


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


def _devices_text(host: Host) -> str:
    if not host.gpus:
        return "no GPU is seen here ('benchctl doctor --gpu' says why)"
    if not host.visible:
        return f"CUDA_VISIBLE_DEVICES hides all {len(host.gpus)} here"
    if len(host.visible) < len(host.gpus):
        return f"CUDA_VISIBLE_DEVICES leaves {len(host.visible)} of {len(host.gpus)} here"
    return f"there {'are' if len(host.gpus) > 1 else 'is'} {len(host.gpus)} here"


def _cores_text(host: Host) -> str:
    threads = frozenset(_threads(host.cores))
    several = f" with {host.num_threads} hardware threads" if host.num_threads > len(host.cores) else ""
    return f"{count_of(len(host.cores), 'core')}{several} ({core_ranges(threads)})"
