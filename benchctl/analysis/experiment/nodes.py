"""Nodes of runs."""

from benchctl.records.run import RunRecord


def node_of_run(record: RunRecord) -> str | None:
    """The name of the node that did a run; None where no machine did it, or none is recorded.

    Older records have the name of the host instead. Runs in virtual time without a server depend on no machine.
    """
    return None if record.is_simulated else record.node_name
