"""Nodes of runs and blocks."""

from collections.abc import Iterable

from benchctl.records.run import RunRecord


def node_of_run(record: RunRecord) -> str | None:
    """The name of the node that did a run; None where no machine did it, or none is recorded.

    Older records have the name of the host instead. Runs in virtual time without a server depend on no machine.
    """
    return None if record.is_simulated else record.node_name


def nodes_of_blocks(records: Iterable[RunRecord]) -> dict[int, tuple[str, ...]]:
    """The nodes of each block that has any, in the order of the runs.

    A block that may be compared has one: its arms are pairs only where they met the same machine.
    """
    nodes: dict[int, dict[str, None]] = {}
    for record in records:
        node = node_of_run(record)
        if node is not None:
            nodes.setdefault(record.block, {})[node] = None
    return {block: tuple(names) for block, names in nodes.items()}
