"""Machines of runs: those that measured them, the devices that each server could see, and the noise of other ones.

Arms are compared within blocks because there they met the same machine. A block of which some runs were measured
elsewhere compares machines with one another, and is left out. The numbers of a simulator with its own clock do not
depend on it. Noise floors are those of a machine, a server and a time, and warnings tell where these are others.
"""

import datetime as dt
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from msgspec.structs import asdict

from benchctl.profile.engine_table import is_virtual
from benchctl.profile.model import VariantSettings
from benchctl.records.loaded import LoadedResults
from benchctl.records.record import RunRecord
from benchctl.records.schema import NodeGpu, NodeInfo, ResultWarning
from benchctl.records.stores import NoiseFloor, NoiseKey
from benchctl.records.warning_codes import warnings_of
from benchctl.units import count_of, first_of, in_a_row, s_from_ns
from benchctl.untrusted.text import visible_line

ABSENT: Final = "absent"
"""Value of a setting or a part that one side lacks."""
_RANGE: Final = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_MOST_NAMED: Final = 4
_MOST_NODES: Final = 3
_REMEDY: Final = "measure it again: benchctl run NAME --aa"


def chooses_devices(settings: VariantSettings | None) -> bool:
    """True where the profile itself gives devices to the servers of an arm."""
    return settings is not None and "CUDA_VISIBLE_DEVICES" in getattr(settings.server, "env", {})


def scattered_blocks(runs: Iterable[tuple[RunRecord, VariantSettings | None]]) -> Mapping[int, str]:
    """The blocks whose runs were measured on several nodes or devices, with the sentence that says which were.

    Runs whose numbers depend on no machine, or that record none, do not count; nor do devices that the settings of
    an arm choose, which may be others than those of other arms.
    """
    by_block: dict[int, list[tuple[str, str, str | None]]] = {}
    for record, settings in runs:
        if record.node is not None and not record.is_virtual:
            uuids = sorted({gpu.uuid or f"GPU {gpu.index}" for gpu in record.node.gpus})
            devices = None if chooses_devices(settings) else ", ".join(uuids)
            by_block.setdefault(record.block, []).append((record.run_id, record.node.name, devices))
    scattered = {}
    for block, of_runs in sorted(by_block.items()):
        has_one_node = len({node for _, node, _ in of_runs}) == 1
        if has_one_node and len({devices for _, _, devices in of_runs if devices is not None}) <= 1:
            continue
        runs_at: dict[str, list[str]] = {}
        for run_id, node, devices in of_runs:
            runs_at.setdefault(f"{node} with {devices}" if has_one_node and devices else node, []).append(run_id)
        described = in_a_row([f"{where} ({', '.join(run_ids)})" for where, run_ids in runs_at.items()])
        several = "devices" if has_one_node else "nodes"
        scattered[block] = visible_line(f"its runs were measured on several {several}: {described}")
    return scattered


def num_cores(ranges: str) -> int:
    """The number of cores in a list such as ``0-7,16-23``."""
    return sum(int(last or first) - int(first) + 1 for first, last in _RANGE.findall(ranges))


def gpu_names_text(gpus: Iterable[NodeGpu]) -> str:
    """``2 x NVIDIA H100``; empty without any."""
    counts = Counter(gpu.name for gpu in gpus)
    return in_a_row([f"{count} x {name}" for name, count in sorted(counts.items())]) if counts else ""


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


def machines_of(results: LoadedResults) -> tuple[Machine, ...]:
    """The machines that measured the runs of an experiment, in their order; at least one.

    Runs of older versions, and those in virtual time, record none: theirs is that of the manifest. Of that one the
    manifest also knows what its runs do not, such as the devices beside a server that someone else started.
    """
    host = results.manifest.host
    here = Machine(
        node=host.hostname,
        hostname=host.hostname,
        platform=host.platform,
        cpu_model=host.cpu_model,
        num_cores=host.num_cores,
        memory_bytes=host.memory_bytes,
        gpus=tuple(NodeGpu(**asdict(gpu)) for gpu in results.manifest.gpus),
    )
    records = [run.record for run in results.runs]
    by_node: dict[str, dict[int, list[NodeInfo]]] = {}
    for record in records:
        if record.node is not None:
            by_node.setdefault(record.node.name, {}).setdefault(record.block, []).append(record.node)
    machines = tuple(_machine(by_block, here) for by_block in by_node.values())
    is_here = here.hostname not in {machine.hostname for machine in machines} and any(
        record.host == here.hostname for record in records if record.node is None
    )
    return (here, *machines) if is_here or not machines else machines


def _machine(by_block: Mapping[int, Sequence[NodeInfo]], here: Machine) -> Machine:
    """The machine of these blocks; ``here`` is the one of the manifest."""
    infos = [info for of_block in by_block.values() for info in of_block]
    first, gpus = infos[0], {gpu.uuid or str(gpu.index): gpu for info in infos for gpu in info.gpus}
    cores, is_here = ",".join({info.cores: None for info in infos if info.cores}), first.hostname == here.hostname
    return Machine(
        node=first.name,
        hostname=first.hostname,
        platform=first.platform,
        cpu_model=first.cpu_model,
        num_cores=here.num_cores if is_here else num_cores(cores) or None,
        memory_bytes=first.memory_bytes,
        gpus=tuple(gpus.values()) or (here.gpus if is_here else ()),
        blocks=tuple(sorted(by_block)),
    )


def gpu_names(machines: Iterable[Machine]) -> tuple[str, ...]:
    """Names of the devices of all machines, one for each device."""
    return tuple(gpu.name for machine in machines for gpu in machine.gpus)


def machines_text(machines: Sequence[Machine]) -> str:
    """``gpu-1, NVIDIA H100``; of several ``4 nodes (n1, n2, n3, n4), 4 x NVIDIA H100``."""
    if len(machines) == 1:
        return f"{machines[0].node}, {', '.join(gpu_names(machines)) or 'no GPU'}"
    names = first_of([machine.node for machine in machines], _MOST_NAMED)
    devices = gpu_names_text(gpu for machine in machines for gpu in machine.gpus) or "no GPU"
    return f"{len(machines)} nodes ({names}), {devices}"


def machine_warnings(a: LoadedResults, b: LoadedResults) -> tuple[ResultWarning, ...]:
    """Warnings about two experiments that were measured on different machines or with different software."""
    of_a, of_b = _facts(a), _facts(b)
    facts = {name: (text, of_b[name]) for name, text in of_a.items()}
    builds = _builds(a), _builds(b)
    if all(builds):
        names = [name for name in sorted({**builds[0], **builds[1]}) if builds[0].get(name) != builds[1].get(name)]
        left, right = (", ".join(f"{name} {of_side.get(name, ABSENT)}" for name in names) for of_side in builds)
        facts["engine build"] = left, right
    return tuple(
        ResultWarning(code="machines-differ", message=f"{name} differs: {left} against {right}", where=name)
        for name, (left, right) in facts.items()
        if left and right and left != right
    )


def _facts(results: LoadedResults) -> dict[str, str]:
    """Facts about the machines and the software of an experiment, by name; empty where one is unknown."""
    machines, git = machines_of(results), results.manifest.git
    nodes = "" if len(machines) == 1 else f"{len(machines)} nodes: "
    nodes_of: dict[str, list[str]] = {}
    for machine in machines:
        cores = "unknown" if machine.num_cores is None else machine.num_cores
        kind = f"{machine.cpu_model or 'unknown CPU'}, {cores} cores, {machine.platform or 'unknown system'}"
        nodes_of.setdefault(kind, []).append(machine.node)
    gpus = [gpu for machine in machines for gpu in machine.gpus]
    drivers = ", ".join(f"{gpu.name} driver {gpu.driver or 'unknown'}" for gpu in gpus) or "none"
    if len(machines) > 1:
        of_all = ", ".join(sorted({gpu.driver or "unknown" for gpu in gpus}))
        drivers = f"{gpu_names_text(gpus)} driver {of_all}" if gpus else "no GPU"
    priorities = (run.record.client_priority for run in results.runs)
    return {
        "host": nodes + "; ".join(f"{first_of(names, _MOST_NAMED)} ({kind})" for kind, names in nodes_of.items()),
        "GPUs": nodes + drivers,
        "engine version": ", ".join(sorted({run.record.engine_version or "unknown" for run in results.runs})),
        "benchctl version": results.manifest.benchctl_version,
        "git commit": "unknown" if git is None else git.sha[:12] + (" with changes" if git.is_dirty else ""),
        # without their reasons
        "priority of the load client": ", ".join(sorted({text.partition(" (")[0] for text in priorities if text})),
    }


def _builds(results: LoadedResults) -> dict[str, str]:
    """Versions in the environments of the engine, by package."""
    versions: dict[str, set[str]] = {}
    for node in (run.record.node for run in results.runs):
        for name, version in node.build.items() if node is not None else ():
            versions.setdefault(name, set()).add(version)
    return {name: " and ".join(sorted(of_runs)) for name, of_runs in versions.items()}


def noise_warnings(noise: NoiseFloor, request_set_sha256: str | None, begins_at: str) -> tuple[ResultWarning, ...]:
    """Warnings about the stored noise for an experiment; none about its workload without a request set."""
    days = age_days(noise, dt.datetime.fromisoformat(begins_at))
    is_other = request_set_sha256 not in {None, noise.request_set_sha256}
    other_workload = (
        f"the noise floor is that of the A/A experiment {noise.source}, which had another request set; larger or "
        "smaller loads scatter differently: run this workload as an A/A experiment"
    )
    old = f"the noise floor is {days} days older than this experiment; {_REMEDY}"
    return warnings_of(
        {
            "noise-of-another-workload": other_workload if is_other else None,
            # Drivers, clocks, neighbours and temperatures change
            "noise-old": old if days > 30 else None,
        }
    )


def age_days(noise: NoiseFloor, now: dt.datetime) -> int:
    """Whole days since the noise was measured."""
    return (now - dt.datetime.fromisoformat(noise.measured_at)).days


def version_warning(noise: NoiseFloor, engine_version: str | None) -> ResultWarning | None:
    """The warning that the noise is that of another engine version; None if both are equal or one is unknown."""
    if noise.engine_version is None or engine_version in {None, noise.engine_version}:
        return None
    message = f"the noise floor is that of {noise.engine} {noise.engine_version}, and this is {engine_version}; "
    return ResultWarning(code="noise-of-another-version", message=message + _REMEDY)


def other_machine_warning(noise: NoiseFloor, results: LoadedResults) -> ResultWarning | None:
    """The warning that the noise in a result directory is that of a machine which measured none of its runs.

    None where it is that of one of them, for older runs, and for a simulator, whose noise depends on no machine.
    """
    machines = machines_of(results)
    is_one_of_them = any(noise.host == machine.hostname for machine in machines)
    if is_virtual(results.manifest.engine) or is_one_of_them or not any(machine.blocks for machine in machines):
        return None
    message = (
        f"the noise floor is that of {noise.host}, and the runs were measured on {machines_text(machines)}: it is "
        f"left out; {_REMEDY}, on that machine"
    )
    return ResultWarning(code="noise-of-another-machine", message=message, where=str(results.path))


def other_server_warning(key: NoiseKey, on_file: Sequence[NoiseFloor]) -> ResultWarning | None:
    """The note that noise is on file for this machine, but not for the server of ``key``; None without any."""
    described = []
    for noise in on_file:
        version = f" {noise.engine_version}" if noise.engine_version else ""
        misfits = {
            "another engine": noise.engine != key.engine,
            "another model": noise.model != key.model,
            "other devices": noise.gpus != key.gpus,
        }
        misfit = next((words for words, differs in misfits.items() if differs), "other options of the server")
        source = f"{Path(noise.source).parent.name} of {noise.measured_at[:10]}"
        if noise.host == key.host:
            described.append(f"{noise.engine}{version} with {noise.model} ({misfit}; {source})")
    if not described:
        return None
    message = (
        f"no A/A experiment of this server ({key.engine} with {key.model}) is on file; of this machine there is "
        f"{first_of(described, _MOST_NODES)}; measure the right one with --aa behind the same 'benchctl run'"
    )
    return ResultWarning(code="noise-of-another-server", message=message)


def side_by_side_warning(records: Iterable[RunRecord]) -> ResultWarning | None:
    """The warning that runs of different blocks shared a node for a time; None where none did.

    Runs of one node have one wall clock, so that their times can be compared. Steps of a simulator take their own
    time, which no neighbour changes; a run whose node or times are not recorded is not counted.
    """
    spans: dict[str, list[tuple[float, float, int]]] = {}
    for record in records:
        launch_ns, stop_ns = record.times.launch_ns, record.times.stop_ns
        if record.node is None or record.is_virtual or launch_ns is None or stop_ns is None:
            continue
        try:
            begin_s = dt.datetime.fromisoformat(record.started_at or "").timestamp()
        except ValueError:
            continue
        span = begin_s, begin_s + s_from_ns(stop_ns - launch_ns), record.block
        spans.setdefault(record.node.name, []).append(span)
    shared = {node: num for node, of_node in spans.items() if (num := _num_overlapping(of_node))}
    if not shared:
        return None
    num_runs = count_of(sum(map(len, spans.values())), "run")
    nodes = visible_line(in_a_row(sorted(shared))) if len(shared) <= _MOST_NODES else count_of(len(shared), "node")
    message = (
        f"{sum(shared.values())} of {num_runs} were measured while a run of another block ran on the same node "
        f"({nodes}), and they may have disturbed each other; compare two A/A experiments, one with --parallel 1, "
        "or give each block a whole node (on Slurm: cluster.exclusive)"
    )
    return ResultWarning(code="neighbours-unchecked", message=message)


def _num_overlapping(spans: Iterable[tuple[float, float, int]]) -> int:
    """The number of spans (begin, end, block) during which one of another block went on."""
    ordered = sorted(spans)
    begins = [begin for begin, _, _ in ordered]
    overlapping: set[int] = set()
    for number, (_, end, block) in enumerate(ordered):
        during = range(number + 1, bisect_left(begins, end))
        others = [other for other in during if ordered[other][2] != block]
        overlapping.update(others, [number] if others else [])
    return len(overlapping)
