"""Warnings about the noise floor of another time, workload or version, and about blocks measured side by side on
a node.
"""

import datetime as dt
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchctl.analysis.validity.machines import machines_of, machines_text
from benchctl.formats import count_of, first_of, in_a_row
from benchctl.records.loaded import LoadedResults
from benchctl.records.noise import NoiseFloor, NoiseKey
from benchctl.records.record import RunRecord
from benchctl.records.schema import ResultWarning
from benchctl.units import s_from_ns
from benchctl.untrusted.text import visible_line

_MOST_NAMED: Final = 3
FRESH_DAYS: Final = 30
"""Older noise gets a warning: drivers, clocks, neighbours and temperatures change."""
_REMEDY: Final = "measure it again: benchctl run NAME --aa"


def noise_warnings(noise: NoiseFloor, request_set_sha256: str | None, begins_at: str) -> tuple[ResultWarning, ...]:
    """Warnings about the stored noise for an experiment; none about its workload without a request set."""
    warnings = []
    if request_set_sha256 not in {None, noise.request_set_sha256}:
        message = (
            f"the noise floor is that of the A/A experiment {noise.source}, which had another request set; larger "
            "or smaller loads scatter differently: run this workload as an A/A experiment"
        )
        warnings.append(ResultWarning(code="noise-of-another-workload", message=message))
    days = (_time(begins_at) - _time(noise.measured_at)).days
    if days > FRESH_DAYS:
        message = f"the noise floor is {days} days older than this experiment; {_REMEDY}"
        warnings.append(ResultWarning(code="noise-old", message=message))
    return tuple(warnings)


def other_machine_warning(noise: NoiseFloor, results: LoadedResults) -> ResultWarning | None:
    """The warning that the noise in a result directory is that of a machine which measured none of its runs.

    None where it is that of one of them, for older runs, and for a simulator, whose noise depends on no machine.
    """
    machines = machines_of(results)
    are_recorded = any(machine.blocks for machine in machines)
    if (
        results.manifest.engine == "sim"
        or not are_recorded
        or any(noise.host == machine.hostname for machine in machines)
    ):
        return None
    message = (
        f"the noise floor is that of {noise.host}, and the runs were measured on {machines_text(machines)}: it is "
        f"left out; {_REMEDY}, on that machine"
    )
    return ResultWarning(code="noise-of-another-machine", message=message, where=str(results.path))


def other_server_warning(key: NoiseKey, on_file: Sequence[NoiseFloor], command: str | None) -> ResultWarning | None:
    """The note that noise is on file for this machine, but not for the server of ``key``; None without any.

    ``command`` measures the noise of that server.
    """
    here = [noise for noise in on_file if noise.host == key.host]
    if not here:
        return None
    described = [
        f"{noise.engine}{f' {noise.engine_version}' if noise.engine_version else ''} with {noise.model} "
        f"({_misfit(noise, key)}; {Path(noise.source).parent.name} of {noise.measured_at[:10]})"
        for noise in here
    ]
    message = (
        f"no A/A experiment of this server ({key.engine} with {key.model}) is on file; of this machine there is "
        f"{first_of(described, _MOST_NAMED)}; measure the right one: {command or 'benchctl run NAME --aa'}"
    )
    return ResultWarning(code="noise-of-another-server", message=message)


def _misfit(noise: NoiseFloor, key: NoiseKey) -> str:
    """The first part of the key in which the noise belongs to another server."""
    if noise.engine != key.engine:
        return "another engine"
    if noise.model != key.model:
        return "another model"
    return "other devices" if noise.gpus != key.gpus else "other options of the server"


def version_warning(noise: NoiseFloor, engine_version: str | None) -> ResultWarning | None:
    """The warning that the noise is that of another engine version; None if both are equal or one is unknown."""
    if noise.engine_version is None or engine_version is None or noise.engine_version == engine_version:
        return None
    message = f"the noise floor is that of {noise.engine} {noise.engine_version}, and this is {engine_version}; "
    return ResultWarning(code="noise-of-another-version", message=message + _REMEDY)


def age_days(noise: NoiseFloor, now: dt.datetime) -> int:
    """Whole days since the noise was measured."""
    return (now - _time(noise.measured_at)).days


def _time(iso: str) -> dt.datetime:
    return dt.datetime.fromisoformat(iso)


_MOST_NODES: Final = 3
"""Nodes that the message names; of more it tells the number."""


@dataclass(frozen=True, slots=True)
class _Span:
    """The time that a run took, in seconds of its node's wall clock."""

    begin_s: float
    end_s: float
    block: int


def side_by_side_warning(records: Iterable[RunRecord]) -> ResultWarning | None:
    """The warning that runs of different blocks shared a node for a time; None where none did.

    Runs of one node have one wall clock, so that their times can be compared. Steps of a simulator take their own
    time, which no neighbour changes; a run whose node or times are not recorded is not counted.
    """
    spans: dict[str, list[_Span]] = defaultdict(list)
    for record in records:
        if record.node is not None and record.clock != "virtual" and (span := _span_of(record)) is not None:
            spans[record.node.name].append(span)
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


def _span_of(record: RunRecord) -> _Span | None:
    begin_ns, end_ns = record.times.launch_ns, record.times.stop_ns
    if record.started_at is None or begin_ns is None or end_ns is None or record.node is None:
        return None
    try:
        begin_s = dt.datetime.fromisoformat(record.started_at).timestamp()
    except ValueError:
        return None
    return _Span(begin_s, begin_s + s_from_ns(end_ns - begin_ns), record.block)


def _num_overlapping(spans: Iterable[_Span]) -> int:
    """The number of spans during which one of another block went on."""
    ordered = sorted(spans, key=lambda span: span.begin_s)
    overlapping: set[int] = set()
    for number, span in enumerate(ordered):
        for other in range(number + 1, len(ordered)):
            if ordered[other].begin_s >= span.end_s:
                break
            if ordered[other].block != span.block:
                overlapping |= {number, other}
    return len(overlapping)
