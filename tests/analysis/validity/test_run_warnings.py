"""Warnings about single runs: starved batches, late recordings, neighbours on a node; and which is told first."""

import datetime as dt
import itertools
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.results.builders import (
    BASELINE,
    GUIDED,
    ONE_BLOCK,
    change_steps,
    edit_run,
    write_results,
)
from support.steps import with_steps

from benchctl.analysis.analyzed import analyze_directory
from benchctl.analysis.validity.checks import in_step_frac, underfilled_batch_warnings, value_model_warnings
from benchctl.analysis.validity.machines import side_by_side_warning
from benchctl.records.loaded import load_results
from benchctl.records.record import ChoiceRecord, RequestError, RequestRecord, RunRecord, RunTimes
from benchctl.records.schema import SCHEMA_VERSION, NodeInfo, ResultWarning, StepRecord
from benchctl.records.warning_codes import SUSPECT_CODES, by_severity
from benchctl.report.experiment_tables import footnotes

STEP_NS = 4_000_000


@pytest.fixture(name="results")
def _results(tmp_path):
    return write_results(tmp_path / "r", block_factors=ONE_BLOCK)


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    return load_results(write_results(tmp_path_factory.mktemp("results")).path).runs[0]


def request_of(index, num_steps, num_choices=1, **changes):
    """A request that is in flight for ``num_steps`` steps from time 0."""
    choices = tuple(ChoiceRecord(index=i, chunk_ns=(num_steps * STEP_NS,)) for i in range(num_choices))
    record = RequestRecord(request_id=f"r{index}", index=index, scheduled_ns=0, sent_ns=0, choices=choices)
    return msgspec.structs.replace(record, done_ns=num_steps * STEP_NS, completion_tokens=1, **changes)


def step_of(number, num_seqs, dur_ns=STEP_NS, **changes):
    return StepRecord(
        step=number, start_ns=number * STEP_NS, dur_ns=int(dur_ns), clock="host", phase="decode", num_seqs=num_seqs,
        **changes,
    )  # fmt: skip


ONE, STEP = [request_of(0, 10)], [step_of(0, 1)]
FAILED = request_of(1, 10, error=RequestError(kind="timeout", message="late"))


@pytest.mark.parametrize(
    ("requests", "steps", "clock", "share", "is_doubted"),
    [
        pytest.param(
            [request_of(i, 60) for i in range(40)], [step_of(i, 40) for i in range(60)], "host", 1, False,
            id="all that is in flight",
        ),
        pytest.param(
            [request_of(i, 120) for i in range(12)], [step_of(i, 1) for i in range(120)], "host", 1 / 12, True,
            id="one of twelve at a time",
        ),
        pytest.param(
            [request_of(0, 10, num_choices=4)], [step_of(i, 4) for i in range(10)], "host", 1, False,
            id="every choice is a sequence",
        ),
        pytest.param(
            [request_of(i, 50) for i in range(3)], [step_of(i, 3, 0.75 * STEP_NS) for i in range(50)], "host", 0.75,
            False, id="overhead between steps",
        ),
        pytest.param(
            [request_of(i, 50) for i in range(3)], [step_of(i, 3, 0.65 * STEP_NS) for i in range(50)], "host", 0.65,
            True, id="too much of it",
        ),
        pytest.param(
            [*ONE, request_of(1, 1000, is_warmup=True)],
            [*(step_of(i, 1) for i in range(10)), step_of(10, 900, is_warmup=True)], "host", 1, False,
            id="a warm-up",
        ),
        pytest.param(ONE, [], "host", None, False, id="no steps"),
        pytest.param(ONE, STEP, "virtual", None, False, id="a virtual clock"),
        pytest.param([*ONE, FAILED], STEP, "host", None, False, id="a failed request"),
    ],
)  # fmt: skip
def test_an_engine_that_steps_with_less_than_the_load_has_in_flight_is_doubted(
    template, requests, steps, clock, share, is_doubted
):
    record = msgspec.structs.replace(template.record, clock=clock)
    run = with_steps(replace(template, record=record, requests=tuple(requests)), steps)
    assert in_step_frac(run) == (None if share is None else pytest.approx(share))
    assert [warning.code for warning in underfilled_batch_warnings(run)] == ["underfilled-batch"] * is_doubted


def value_warnings(results):
    return value_model_warnings(load_results(results.path).runs[1])


def test_passes_that_the_load_recorded_make_a_run_suspect_with_their_number_and_time(results):
    assert value_warnings(results) == (), "a log that knows nothing of recordings"
    change_steps(results, GUIDED, value_recordings=0, dur_ns=10_000_000)
    assert value_warnings(results) == ()
    change_steps(results, GUIDED, 5, value_recordings=2, dur_ns=300_000_000)
    change_steps(results, GUIDED, 3, value_recordings=1, dur_ns=300_000_000)
    change_steps(results, GUIDED, 4, value_recordings=None)
    (warning,) = value_warnings(results)
    assert warning.code == "value-passes-recorded-late"
    assert warning.code in SUSPECT_CODES
    assert "2 of 8 steps of the load recorded 3 passes" in warning.message
    assert "these steps took 0.6 s, 90.9% of the time of all; raise max_num_seqs" in warning.message
    change_steps(results, GUIDED, 1, 2, 3, 4, 5, is_warmup=True)
    assert value_warnings(results) == ()


@pytest.mark.parametrize(
    ("description", "is_noted"),
    [
        ({"device": "cuda", "has_kernels": False, "kernels_reason": "differs from torch by 0.3"}, True),
        ({"device": "cpu", "has_kernels": False, "kernels_reason": "kernels need a GPU"}, False),
        ({"device": "cuda", "has_kernels": True}, False),
        ({"device": "cuda", "has_kernels": False}, False),
    ],
    ids=["wanted", "a-processor", "kernels", "kernels-switched-off"],
)
def test_a_gpu_without_the_kernels_that_were_wanted_is_noted_with_the_reason(results, description, is_noted):
    config = {f"server.value_model.{name}": value for name, value in description.items()}
    edit_run(results, GUIDED, effective_config=config)
    notes = [(note.code, "differs from torch by 0.3" in note.message) for note in value_warnings(results)]
    assert notes == [("value-kernels-missing", True)] * is_noted
    assert "value-kernels-missing" not in SUSPECT_CODES


def a_run(block: int, begin_s: float, length_s: float, node: str = "n1", **fields: object) -> RunRecord:
    """A run's record; its monotonic clock began at some other time than those of others."""
    launch_ns = (block * 977 + 5) * 10**9
    started_at = dt.datetime(2026, 1, 1, tzinfo=dt.UTC) + dt.timedelta(seconds=begin_s)
    values = {
        "node": NodeInfo(name=node, hostname=node),
        "started_at": started_at.isoformat(),
        "times": RunTimes(launch_ns=launch_ns, stop_ns=launch_ns + int(length_s * 10**9)),
        "argv": ("s",),
    }
    return RunRecord(
        schema_version=SCHEMA_VERSION, index=0, run_id="r", block=block, position=0, variant="v", **values | fields
    )


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        pytest.param([a_run(0, 0, 10), a_run(1, 9, 10), a_run(0, 20, 10)], "2 of 3 runs|(n1)", id="at one time"),
        pytest.param([a_run(0, 0, 10), a_run(1, 10, 10)], None, id="one after the other"),
        pytest.param([a_run(0, 0, 10, "n1"), a_run(1, 5, 10, "n2")], None, id="on two nodes"),
        pytest.param(
            [a_run(0, 0, 10), a_run(1, 3600, 10, "n2"), a_run(2, 3605, 10, "n2")], "2 of 3 runs|(n2)",
            id="clocks an hour apart",
        ),
        pytest.param([a_run(0, 0, 10, clock="virtual"), a_run(1, 5, 10, clock="virtual")], None, id="virtual time"),
        pytest.param([a_run(0, 0, 10), a_run(1, 0, 10, times=RunTimes(), node=None)], None, id="without times"),
        pytest.param([a_run(0, 0, 10), a_run(1, 0, 10, started_at="noon")], None, id="a damaged date"),
    ],
)  # fmt: skip
def test_two_blocks_at_the_same_time_on_one_node_are_named(runs, words):
    warning = side_by_side_warning(runs)
    assert (warning is None) == (words is None)
    if warning is not None:
        assert warning.code == "neighbours-unchecked"
        assert all(part in warning.message for part in words.split("|"))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 50), st.integers(1, 20)), max_size=12))
def test_the_count_of_neighbours_is_that_of_all_pairs_compared(spans: list[tuple[int, int, int]]) -> None:
    shared = {
        index
        for (i, (block, begin, length)), (j, (other, later, long)) in itertools.combinations(enumerate(spans), 2)
        if block != other and begin < later + long and later < begin + length
        for index in (i, j)
    }
    warning = side_by_side_warning(a_run(block, begin, length) for block, begin, length in spans)
    assert (warning is None) == (not shared)
    assert warning is None or warning.message.startswith(f"{len(shared)} of {len(spans)} runs ")


def warnings(*codes):
    return tuple(ResultWarning(code=code, message=code) for code in codes)


def test_what_makes_a_run_suspect_comes_first_and_what_is_merely_absent_last(tmp_path):
    ordered = ["arrival-times-unreliable", "check-failed", "event-loop-stalls", "underfilled-batch"]
    of_all = by_severity(warnings("gpu-sampler-missing", ordered[2], ordered[0], ordered[3], ordered[1]))
    assert [warning.code for warning in of_all] == [*ordered, "gpu-sampler-missing"]
    for code in SUSPECT_CODES:
        assert [warning.code for warning in by_severity(warnings("new", code))] == [code, "new"]
    assert by_severity(warnings("b", "a", "b")) == warnings("b", "a", "b"), "equal ones keep their order"
    results = write_results(tmp_path / "r")
    edit_run(results, BASELINE, warnings=warnings("gpu-sampler-missing", "event-loop-stalls"))
    edit_run(results, "002-b1-baseline", state="suspect", warnings=warnings("arrival-times-unreliable"))
    codes = [note.code for note in footnotes(analyze_directory(results.path))]
    assert (codes[:2], codes[-1]) == (["arrival-times-unreliable", "event-loop-stalls"], "gpu-sampler-missing")
