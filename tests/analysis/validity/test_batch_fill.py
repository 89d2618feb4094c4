"""An engine that steps with less than the load has in flight: found where it is, and nowhere else."""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.results.builders import write_results
from support.steps import with_steps

from benchctl.analysis.validity.checks import MIN_IN_STEP_FRAC, in_step_frac, underfilled_batch_warnings
from benchctl.records.loaded import LoadedRun, load_results
from benchctl.records.record import ChoiceRecord, RequestError, RequestRecord
from benchctl.records.schema import StepRecord

STEP_NS = 4_000_000


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    return load_results(write_results(tmp_path_factory.mktemp("results")).path).runs[0]


def request_of(index, num_steps, num_choices=1, **changes):
    """A request that is in flight for ``num_steps`` steps from time 0."""
    choices = tuple(ChoiceRecord(index=i, chunk_ns=(num_steps * STEP_NS,)) for i in range(num_choices))
    record = RequestRecord(request_id=f"r{index}", index=index, scheduled_ns=0, sent_ns=0, choices=choices)
    return msgspec.structs.replace(record, done_ns=num_steps * STEP_NS, completion_tokens=1, **changes)


def step_of(number, num_seqs, **changes):
    step = StepRecord(
        step=number, start_ns=number * STEP_NS, dur_ns=STEP_NS, clock="host", phase="decode", num_seqs=num_seqs
    )
    return msgspec.structs.replace(step, **changes)


def run_of(template: LoadedRun, requests, steps, clock="host") -> LoadedRun:
    record = msgspec.structs.replace(template.record, clock=clock)
    return with_steps(replace(template, record=record, requests=tuple(requests)), steps)


@given(num_requests=st.integers(1, 40), num_steps=st.integers(1, 60))
def test_an_engine_that_always_holds_the_whole_load_has_all_of_its_time(template, num_requests, num_steps):
    run = run_of(
        template,
        [request_of(i, num_steps) for i in range(num_requests)],
        [step_of(i, num_requests) for i in range(num_steps)],
    )
    assert in_step_frac(run) == pytest.approx(1)
    assert underfilled_batch_warnings(run) == ()


def test_an_engine_that_gets_one_request_of_twelve_at_a_time_is_starved(template):
    run = run_of(template, [request_of(i, 120) for i in range(12)], [step_of(i, 1) for i in range(120)])
    assert in_step_frac(run) == pytest.approx(1 / 12)
    (doubt,) = underfilled_batch_warnings(run)
    assert doubt.code == "underfilled-batch"


def test_every_choice_of_a_request_is_a_sequence_of_its_own(template):
    run = run_of(template, [request_of(0, 10, num_choices=4)], [step_of(i, 4) for i in range(10)])
    assert in_step_frac(run) == pytest.approx(1)


def test_what_lies_between_steps_is_overhead_up_to_a_limit(template):
    for dur_ns, is_doubted in ((0.75 * STEP_NS, False), (0.65 * STEP_NS, True)):
        steps = [step_of(i, 3, dur_ns=int(dur_ns)) for i in range(50)]
        run = run_of(template, [request_of(i, 50) for i in range(3)], steps)
        assert (in_step_frac(run) < MIN_IN_STEP_FRAC) is is_doubted
        assert bool(underfilled_batch_warnings(run)) is is_doubted


def test_the_warm_up_takes_no_part(template):
    requests = [request_of(0, 10), request_of(1, 1000, is_warmup=True)]
    steps = [step_of(i, 1) for i in range(10)] + [step_of(10, 900, is_warmup=True)]
    assert in_step_frac(run_of(template, requests, steps)) == pytest.approx(1)


def test_nothing_is_said_without_steps_on_a_virtual_clock_or_when_requests_failed(template):
    requests, steps = [request_of(0, 10)], [step_of(0, 1)]
    failed = request_of(1, 10, error=RequestError(kind="timeout", message="late"))
    assert in_step_frac(run_of(template, requests, [])) is None
    assert in_step_frac(run_of(template, requests, steps, clock="virtual")) is None
    assert in_step_frac(run_of(template, [*requests, failed], steps)) is None
