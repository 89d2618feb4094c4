"""Hardware of runs: what of machine, devices and engine build can change a number.

Blocks that ran on other machines are pooled where these have the same hardware. What only identifies, such as the
name of a node or a device, makes no difference. Two arms may differ by what the profile sets, so that each is held
against its own runs in other blocks.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from benchctl.analysis.validity.comparability.differences import ABSENT, Cells, Difference
from benchctl.analysis.validity.comparability.sites import num_cores
from benchctl.formats import first_of, in_a_row
from benchctl.records.loaded import LoadedRun
from benchctl.records.node import NodeGpu, NodeInfo
from benchctl.records.run import RunRecord
from benchctl.untrusted.text import visible_line

HARDWARE = "hardware"
"""Key of the difference, as ``allowed_differences`` and ``--allow-difference`` take it."""
_OTHER_NAMES = ("host",)
"""Whoever allows other hosts, as one had to before runs recorded their hardware, allows their hardware."""
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
        return (Difference(HARDWARE, first, " and ".join(others), names=_OTHER_NAMES),)
    a, b = (" or ".join(_blocks_on_each(side, differing)) or "unknown" for side in sides)
    return (Difference(HARDWARE, a, b, names=_OTHER_NAMES),)


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
