"""Blocks that were measured at the same time on one node are told by the times of their runs."""

import datetime as dt
import itertools

from hypothesis import given
from hypothesis import strategies as st

from benchctl.analysis.validity.machines import side_by_side_warning
from benchctl.records.record import RunRecord, RunTimes
from benchctl.records.schema import SCHEMA_VERSION, NodeInfo

_MIDNIGHT = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
_SECOND = 1_000_000_000


def a_run(block: int, begin_s: float, length_s: float, node: str = "n1", **fields: object) -> RunRecord:
    """A run's record; its monotonic clock began at some other time than those of others."""
    launch_ns = (block * 977 + 5) * _SECOND
    return RunRecord(
        schema_version=SCHEMA_VERSION, index=0, run_id="r000", block=block, position=0, variant="base", argv=("s",),
        node=NodeInfo(name=node, hostname=node), started_at=(_MIDNIGHT + dt.timedelta(seconds=begin_s)).isoformat(),
        times=RunTimes(launch_ns=launch_ns, stop_ns=launch_ns + int(length_s * _SECOND)), **fields,
    )  # fmt: skip


def test_two_blocks_at_the_same_time_on_one_node_are_named() -> None:
    warning = side_by_side_warning([a_run(0, 0, 10), a_run(1, 9, 10), a_run(0, 20, 10)])
    assert warning is not None
    assert warning.code == "neighbours-unchecked"
    assert "2 of 3 runs" in warning.message
    assert "(n1)" in warning.message


def test_blocks_one_after_the_other_and_blocks_on_other_nodes_are_no_neighbours() -> None:
    assert side_by_side_warning([a_run(0, 0, 10), a_run(1, 10, 10)]) is None
    assert side_by_side_warning([a_run(0, 0, 10, "n1"), a_run(1, 5, 10, "n2")]) is None


def test_a_clock_that_is_an_hour_off_on_another_node_changes_nothing() -> None:
    runs = [a_run(0, 0, 10, "n1"), a_run(1, 3600, 10, "n2"), a_run(2, 3605, 10, "n2")]
    warning = side_by_side_warning(runs)
    assert warning is not None
    assert "2 of 3 runs" in warning.message
    assert "(n2)" in warning.message


def test_steps_in_virtual_time_have_no_neighbours() -> None:
    assert side_by_side_warning([a_run(0, 0, 10, clock="virtual"), a_run(1, 5, 10, clock="virtual")]) is None


def test_runs_without_times_or_with_a_damaged_date_are_not_counted() -> None:
    unknown = RunRecord(schema_version=SCHEMA_VERSION, index=0, run_id="r", block=3, position=0, variant="base")
    damaged = RunRecord(
        schema_version=SCHEMA_VERSION, index=0, run_id="r", block=4, position=0, variant="base", started_at="noon",
        node=NodeInfo(name="n1", hostname="n1"), times=RunTimes(launch_ns=1, stop_ns=2),
    )  # fmt: skip
    assert side_by_side_warning([unknown, damaged, a_run(0, 0, 10)]) is None


_spans = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 50), st.integers(1, 20)), max_size=12)


@given(_spans)
def test_the_count_is_that_of_all_pairs_compared(spans: list[tuple[int, int, int]]) -> None:
    shared = {
        index
        for (i, (block, begin, length)), (j, (other, later, long)) in itertools.combinations(enumerate(spans), 2)
        if block != other and begin < later + long and later < begin + length
        for index in (i, j)
    }
    warning = side_by_side_warning(a_run(block, begin, length) for block, begin, length in spans)
    assert (warning is None) == (not shared)
    if warning is not None:
        assert warning.message.startswith(f"{len(shared)} of {len(spans)} runs ")
