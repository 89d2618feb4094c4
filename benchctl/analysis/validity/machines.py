"""Machines and sites of runs: those that measured them, and the devices that each server could see.

Arms are compared within blocks because there they met the same machine. A block of which some runs were measured
elsewhere compares machines with one another, and is left out. The numbers of a simulator with its own clock do not
depend on it.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from msgspec.structs import asdict

from benchctl.formats import first_of, in_a_row
from benchctl.profile.model import VariantSettings
from benchctl.records.loaded import LoadedResults
from benchctl.records.record import Manifest, RunRecord
from benchctl.records.schema import NodeGpu, NodeInfo, ResultWarning
from benchctl.untrusted.text import visible_line

ABSENT: Final = "absent"
"""Value of a setting or a part that one side lacks."""
_CHOICE: Final = "CUDA_VISIBLE_DEVICES"
_RANGE: Final = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A machine with the devices that a server could see."""

    node: str
    devices: frozenset[str] | None
    """Identities of the devices; None where the arm itself chooses them, and may have others than other arms."""

    def __str__(self) -> str:
        devices = f" with {', '.join(sorted(self.devices))}" if self.devices else ""
        return f"{self.node}{devices}"


def site_of(record: RunRecord, *, chooses_devices: bool = False) -> Site | None:
    """The site of a run; None where its numbers do not depend on one, or none is recorded."""
    if record.node is None or record.clock == "virtual":
        return None
    devices = frozenset(gpu.uuid or f"GPU {gpu.index}" for gpu in record.node.gpus)
    return Site(node=record.node.name, devices=None if chooses_devices else devices)


def chooses_devices(settings: VariantSettings | None) -> bool:
    """True where the profile itself gives devices to the servers of an arm."""
    return settings is not None and _CHOICE in getattr(settings.server, "env", {})


def scattered_blocks(sites: Iterable[tuple[RunRecord, Site | None]]) -> Mapping[int, str]:
    """The blocks whose runs were measured at several sites, with the sentence that says which were."""
    by_block: dict[int, list[tuple[RunRecord, Site]]] = {}
    for record, site in sites:
        if site is not None:
            by_block.setdefault(record.block, []).append((record, site))
    return {block: _sentence(placed) for block, placed in sorted(by_block.items()) if _is_scattered(placed)}


def _is_scattered(placed: list[tuple[RunRecord, Site]]) -> bool:
    nodes = {site.node for _, site in placed}
    devices = {site.devices for _, site in placed if site.devices is not None}
    return len(nodes) > 1 or len(devices) > 1


def _sentence(placed: list[tuple[RunRecord, Site]]) -> str:
    has_one_node = len({site.node for _, site in placed}) == 1
    runs_at: dict[str, list[str]] = {}
    for record, site in placed:
        runs_at.setdefault(str(site) if has_one_node else site.node, []).append(record.run_id)
    described = [f"{where} ({', '.join(run_ids)})" for where, run_ids in runs_at.items()]
    what = "devices" if has_one_node else "nodes"
    return visible_line(f"its runs were measured on several {what}: {in_a_row(described)}")


def have_same_cores(records: Iterable[RunRecord]) -> bool:
    """True where no two runs had other cores of a host; older runs of one host count as the same."""
    return len({None if record.node is None else record.node.cores for record in records}) <= 1


def num_cores(ranges: str) -> int:
    """The number of cores in a list such as ``0-7,16-23``."""
    return sum(int(last or first) - int(first) + 1 for first, last in _RANGE.findall(ranges))


def has_one_host(records: Iterable[RunRecord], hostname: str | None) -> bool:
    """True where no two runs were measured on different hosts.

    Those that record no node were measured on ``hostname``; None where they had several.
    """
    hosts = {hostname if record.node is None else record.node.hostname for record in records}
    return len(hosts) <= 1 and None not in hosts


def gpu_names_text(gpus: Iterable[NodeGpu]) -> str:
    """``2 x NVIDIA H100``; empty without any."""
    counts = Counter(gpu.name for gpu in gpus)
    return in_a_row([f"{count} x {name}" for name, count in sorted(counts.items())]) if counts else ""


_MOST_NAMED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One machine that measured runs."""

    node: str
    """Its name in the cluster, or that of the host."""
    hostname: str
    platform: str | None = None
    cpu_model: str | None = None
    num_cores: int | None = None
    """Its cores; of a machine that the manifest does not describe, those that benchctl could use there."""
    memory_bytes: int | None = None
    gpus: tuple[NodeGpu, ...] = ()
    """The devices that servers could see there."""
    blocks: tuple[int, ...] = ()
    """The blocks of which it measured runs; empty where no run records its node."""

    def __str__(self) -> str:
        cores = "unknown" if self.num_cores is None else self.num_cores
        return (
            f"{self.node} ({self.cpu_model or 'unknown CPU'}, {cores} cores, {self.platform or 'unknown system'})"
        )


def machines_of(results: LoadedResults) -> tuple[Machine, ...]:
    """The machines that measured the runs of an experiment, in their order; at least one.

    Runs of older versions, and those in virtual time, record none: theirs is that of the manifest. Of that one the
    manifest also knows what its runs do not, such as the devices beside a server that someone else started.
    """
    records = [run.record for run in results.runs]
    nodes: dict[str, list[NodeInfo]] = {}
    for record in records:
        if record.node is not None:
            nodes.setdefault(record.node.name, []).append(record.node)
    machines = tuple(_machine(infos, records, results.manifest) for infos in nodes.values())
    hosts = {machine.hostname for machine in machines}
    here = results.manifest.host.hostname
    is_here = not machines or (
        here not in hosts and any(record.host == here for record in records if not record.node)
    )
    return (*((_of_manifest(results.manifest),) if is_here else ()), *machines)


def _machine(infos: Sequence[NodeInfo], records: Iterable[RunRecord], manifest: Manifest) -> Machine:
    first, host = infos[0], manifest.host
    is_described = first.hostname == host.hostname
    cores = ",".join({info.cores: None for info in infos if info.cores})
    gpus = {gpu.uuid or str(gpu.index): gpu for info in infos for gpu in info.gpus}
    return Machine(
        node=first.name,
        hostname=first.hostname,
        platform=first.platform,
        cpu_model=first.cpu_model,
        num_cores=host.num_cores if is_described else num_cores(cores) or None,
        memory_bytes=first.memory_bytes,
        gpus=tuple(gpus.values()) or (_gpus_of(manifest) if is_described else ()),
        blocks=tuple(
            sorted(
                {record.block for record in records if record.node is not None and record.node.name == first.name}
            )
        ),
    )


def _of_manifest(manifest: Manifest) -> Machine:
    host = manifest.host
    return Machine(
        node=host.hostname,
        hostname=host.hostname,
        platform=host.platform,
        cpu_model=host.cpu_model,
        num_cores=host.num_cores,
        memory_bytes=host.memory_bytes,
        gpus=_gpus_of(manifest),
    )


def _gpus_of(manifest: Manifest) -> tuple[NodeGpu, ...]:
    return tuple(NodeGpu(**asdict(gpu)) for gpu in manifest.gpus)


def gpu_names(machines: Iterable[Machine]) -> tuple[str, ...]:
    """Names of the devices of all machines, one for each device."""
    return tuple(gpu.name for machine in machines for gpu in machine.gpus)


def machines_text(machines: Sequence[Machine]) -> str:
    """``gpu-1, NVIDIA H100``; of several ``4 nodes (n1, n2, n3, n4), 4 x NVIDIA H100``."""
    if len(machines) == 1:
        return f"{machines[0].node}, {', '.join(gpu_names(machines)) or 'no GPU'}"
    names = first_of([machine.node for machine in machines], _MOST_NAMED)
    return f"{len(machines)} nodes ({names}), {devices_text(machines)}"


def devices_text(machines: Sequence[Machine]) -> str:
    """``4 x NVIDIA H100``, over all machines."""
    return gpu_names_text(gpu for machine in machines for gpu in machine.gpus) or "no GPU"


def hosts_text(machines: Sequence[Machine]) -> str:
    """Each machine with its processor, cores and system; of many, those that differ in these once."""
    if len(machines) == 1:
        return str(machines[0])
    kinds: dict[str, list[str]] = {}
    for machine in machines:
        kinds.setdefault(str(machine).removeprefix(machine.node), []).append(machine.node)
    described = [f"{first_of(names, _MOST_NAMED)}{kind}" for kind, names in kinds.items()]
    return f"{len(machines)} nodes: {'; '.join(described)}"


def drivers_text(machines: Sequence[Machine]) -> str:
    """The devices with their drivers: each of one machine; of several ``4 nodes: 4 x NVIDIA H100 driver 570.1``."""
    if len(machines) == 1:
        return ", ".join(f"{gpu.name} driver {gpu.driver or 'unknown'}" for gpu in machines[0].gpus) or "none"
    gpus = [gpu for machine in machines for gpu in machine.gpus]
    drivers = sorted({gpu.driver or "unknown" for gpu in gpus})
    return f"{len(machines)} nodes: " + (
        f"{gpu_names_text(gpus)} driver {', '.join(drivers)}" if gpus else "no GPU"
    )


def machine_warnings(a: LoadedResults, b: LoadedResults) -> tuple[ResultWarning, ...]:
    """Warnings about two experiments that were measured on different machines or with different software."""
    here, there = machines_of(a), machines_of(b)
    builds = _differing_builds(a, b)
    pairs = {
        "host": (hosts_text(here), hosts_text(there)),
        "GPUs": (drivers_text(here), drivers_text(there)),
        "engine version": (_engine_versions(a), _engine_versions(b)),
        "benchctl version": (a.manifest.benchctl_version, b.manifest.benchctl_version),
        "git commit": (_commit(a.manifest), _commit(b.manifest)),
    }
    if builds is not None:
        pairs["engine build"] = builds
    priorities = _client_priorities(a), _client_priorities(b)
    if all(priorities):  # older results do not record them
        pairs["priority of the load client"] = priorities
    return tuple(
        ResultWarning(code="machines-differ", message=f"{name} differs: {left} against {right}", where=name)
        for name, (left, right) in pairs.items()
        if left != right
    )


def _engine_versions(results: LoadedResults) -> str:
    return ", ".join(sorted({run.record.engine_version or "unknown" for run in results.runs})) or "unknown"


def _differing_builds(a: LoadedResults, b: LoadedResults) -> tuple[str, str] | None:
    """Versions in the engines' environments that differ; None where all are the same, or a side records none."""
    left, right = _builds(a), _builds(b)
    names = sorted(name for name in left.keys() | right.keys() if left.get(name) != right.get(name))
    if not left or not right or not names:
        return None
    a_text, b_text = (
        ", ".join(f"{name} {of_side.get(name, ABSENT)}" for name in names) for of_side in (left, right)
    )
    return a_text, b_text


def _builds(results: LoadedResults) -> dict[str, str]:
    versions: dict[str, set[str]] = {}
    for run in results.runs:
        for name, version in ({} if run.record.node is None else run.record.node.build).items():
            versions.setdefault(name, set()).add(version)
    return {name: " and ".join(sorted(of_runs)) for name, of_runs in versions.items()}


def _client_priorities(results: LoadedResults) -> str:
    """Priorities without their reasons; empty if no run records one."""
    priorities = (run.record.client_priority for run in results.runs)
    return ", ".join(sorted({priority.partition(" (")[0] for priority in priorities if priority is not None}))


def _commit(manifest: Manifest) -> str:
    if manifest.git is None:
        return "unknown"
    return manifest.git.sha[:12] + (" with changes" if manifest.git.is_dirty else "")
