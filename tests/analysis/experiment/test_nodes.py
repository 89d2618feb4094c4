"""Nodes of runs, by what their records say."""

from benchctl.analysis.compare.cells import node_of_run
from benchctl.records.record import RunRecord
from benchctl.records.schema import SCHEMA_VERSION, NodeInfo


def run_on(node: str | None, block: int = 0, host: str = "login", **fields: object) -> RunRecord:
    """A run's record."""
    return RunRecord(
        schema_version=SCHEMA_VERSION, index=0, run_id="r000", block=block, position=0, variant="base", host=host,
        node=None if node is None else NodeInfo(name=node, hostname=node), argv=("server",), **fields,
    )  # fmt: skip


def test_the_node_of_an_older_run_is_its_host() -> None:
    assert node_of_run(run_on("n1")) == "n1"
    assert node_of_run(run_on(None)) == "login"


def test_a_run_in_virtual_time_without_a_server_has_no_node() -> None:
    assert node_of_run(RunRecord(
        schema_version=SCHEMA_VERSION, index=0, run_id="r000", block=0, position=0, variant="base", host="login",
        clock="virtual",
    )) is None  # fmt: skip
