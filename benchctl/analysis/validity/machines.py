"""Hardware of runs: what of machine, devices and engine build can change a number.

The machines of an experiment: those that measured its runs.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import asdict

from benchctl.analysis.validity.comparability.sites import num_cores
from benchctl.analysis.validity.comparable import ABSENT, Cells, Difference
from benchctl.formats import first_of, in_a_row
from benchctl.records.loaded import LoadedResults, LoadedRun
from benchctl.records.record import Manifest, RunRecord
from benchctl.records.schema import NodeGpu, NodeInfo, ResultWarning
from benchctl.untrusted.text import visible_line

HARDWARE = "hardware"
"""Key of the difference, as ``allowed_differences`` and ``--allow-difference`` take it."""
_MOST_NODES = 4


def hardware_parts(record: RunRecord) -> Mapping[str, str]:
    """The parts of a run's hardware by name; empty where its numbers do not depend on any, or none is recorded."""
    node = record.node
    if node is None or record.clock == "virtual":
        return {}
    parts = {"GPUs": gpu_names_text(node.gpus) or "no visible GPU", "processor": node.cpu_model or "unknown"}
    if node.gpus:
        parts |= {"driver": _each(gpu.driver for gpu in node.gpus), "clocks": _each(map(_clocks, node.gpus))}
        parts["power limit"] = _each(_watts(gpu.power_limit_w) for gpu in node.gpus)
    else:
        parts["cores"] = _num_cores_text(node)
    return parts | node.build


def hardware_differences(cells: Cells, *, has_one_experiment: bool) -> tuple[Difference, ...]:
    """The difference between blocks that were measured on unlike hardware: which blocks, on which of it; or none.

    The sides of one experiment ran on the same machines. Those of two may differ, with a warning, if each had one
    hardware.
    """
    differing = {name for sides in cells.values() for side in sides for name in _changing_parts(side)}
    if not differing:
        return ()
    sides = [list({id(r): r for pair in cells.values() for r in pair[i]}.values()) for i in (0, 1)]
    if has_one_experiment:
        first, *others = _blocks_on_each([*sides[0], *sides[1]], differing)
        return (Difference(HARDWARE, first, " and ".join(others)),)
    a, b = (" or ".join(_blocks_on_each(side, differing)) or "unknown" for side in sides)
    return (Difference(HARDWARE, a, b),)


def _changing_parts(runs: Sequence[LoadedRun]) -> set[str]:
    """Names of the parts that differ between the runs of one arm that record any."""
    parts = [of_run for run in runs if (of_run := hardware_parts(run.record))]
    names = {name for of_run in parts for name in of_run}
    return {name for name in names if len({of_run.get(name, ABSENT) for of_run in parts}) > 1}


def _blocks_on_each(runs: Sequence[LoadedRun], names: set[str]) -> list[str]:
    """For each hardware: its differing parts, with the blocks and nodes of its runs; most blocks first."""
    records: dict[str, list[RunRecord]] = {}
    for record in sorted((run.record for run in runs), key=lambda record: record.index):
        if parts := hardware_parts(record):
            text = ", ".join(_part_text(name, parts.get(name, ABSENT)) for name in _in_order(parts, names))
            records.setdefault(text, []).append(record)
    ranked = sorted(records.items(), key=lambda entry: -len({record.block for record in entry[1]}))
    return [visible_line(f"{text} ({_blocks_text(of_it)})") for text, of_it in ranked]


def _in_order(parts: Mapping[str, str], names: set[str]) -> list[str]:
    return [*(name for name in parts if name in names), *sorted(names - parts.keys())]


def _part_text(name: str, value: str) -> str:
    return value if name == "GPUs" else f"{name} {value}"


def _blocks_text(records: Sequence[RunRecord]) -> str:
    blocks = sorted({record.block for record in records})
    nodes = list(dict.fromkeys(record.node.name for record in records if record.node is not None))
    numbers = first_of([str(block) for block in blocks], 2 * _MOST_NODES)
    return f"block{'' if len(blocks) == 1 else 's'} {numbers} on {first_of(nodes, _MOST_NODES)}"


def gpu_names_text(gpus: Iterable[NodeGpu]) -> str:
    """``2 x NVIDIA H100``; empty without any."""
    counts = Counter(gpu.name for gpu in gpus)
    return in_a_row([f"{count} x {name}" for name, count in sorted(counts.items())]) if counts else ""


def _each(values: Iterable[str | None]) -> str:
    """The distinct values of the devices of a server."""
    return " and ".join(sorted({value or "unknown" for value in values}))


def _clocks(gpu: NodeGpu) -> str | None:
    if gpu.max_sm_clock_mhz is None and gpu.max_memory_clock_mhz is None:
        return None
    return f"up to {gpu.max_sm_clock_mhz or '?'} and {gpu.max_memory_clock_mhz or '?'} MHz"


def _watts(power_limit_w: float | None) -> str | None:
    return None if power_limit_w is None else f"{power_limit_w:.0f} W"


def _num_cores_text(node: NodeInfo) -> str:
    """The number of cores for a server without devices, whose speed is theirs."""
    return "unknown" if node.cores is None else str(num_cores(node.cores))


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
