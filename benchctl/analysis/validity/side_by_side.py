"""Blocks that were measured at the same time on one node, as the records of their runs tell."""

import datetime as dt
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from benchctl.formats import count_of, in_a_row
from benchctl.records.record import RunRecord
from benchctl.records.schema import ResultWarning
from benchctl.units import s_from_ns
from benchctl.untrusted.text import visible_line

_MOST_NAMED: Final = 3
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
    nodes = visible_line(in_a_row(sorted(shared))) if len(shared) <= _MOST_NAMED else count_of(len(shared), "node")
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
