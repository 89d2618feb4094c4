"""Tokens that reach the client in bursts: found where they are, and nowhere else."""

import itertools
import math

import msgspec
import pytest
from builders import T0_NS, edit_requests, edit_run, write_results
from hypothesis import given
from hypothesis import strategies as st

from benchctl.analysis.bunching import BUNCHED_FRAC, bunching_doubts, short_gap_frac
from benchctl.records.directory import load_results
from benchctl.records.run import ChoiceRecord, RequestRecord, StepRecord

STEP_NS = 4_000_000


def request_of(index, arrivals_ns, tokens_per_chunk=1):
    choice = ChoiceRecord(index=0, chunk_ns=tuple(arrivals_ns), chunk_tokens=(tokens_per_chunk,) * len(arrivals_ns))
    return RequestRecord(
        request_id=f"r{index}",
        index=index,
        scheduled_ns=0,
        sent_ns=0,
        done_ns=arrivals_ns[-1] + 1,
        choices=(choice,),
        completion_tokens=len(arrivals_ns) * tokens_per_chunk,
    )


def evenly(num_chunks, gap_ns, start_ns=0):
    return [start_ns + i * gap_ns for i in range(1, num_chunks + 1)]


def in_bursts(num_chunks, size, gap_ns=STEP_NS, inside_ns=10_000):
    """The chunks of ``size`` steps arrive together when the last of them is made, ``inside_ns`` apart."""
    return [(i // size + 1) * size * gap_ns + (i % size) * inside_ns for i in range(num_chunks)]


def steps_of(durations_ns):
    return [
        StepRecord(step=i, start_ns=0, dur_ns=duration, clock="host", phase="decode", num_seqs=1)
        for i, duration in enumerate(durations_ns)
    ]


@given(
    gap_ns=st.integers(1000, 10**9),
    num_requests=st.integers(1, 20),
    num_chunks=st.integers(22, 64),
    tokens_per_chunk=st.integers(1, 8),
    wobble_frac=st.floats(0, 0.4),
    knows_steps=st.booleans(),
)
def test_an_even_pace_is_never_called_bunched(
    gap_ns, num_requests, num_chunks, tokens_per_chunk, wobble_frac, knows_steps
):
    wobble_ns = round(gap_ns * wobble_frac)
    requests = [
        request_of(r, [t + (wobble_ns if i % 2 else 0) for i, t in enumerate(evenly(num_chunks, gap_ns, r))])
        for r in range(num_requests)
    ]
    steps = steps_of([gap_ns // tokens_per_chunk] * num_chunks * tokens_per_chunk) if knows_steps else []
    for request, (index, original) in zip(requests, enumerate(requests), strict=True):
        assert request == original
        requests[index] = request_of(index, request.choices[0].chunk_ns, tokens_per_chunk)
    assert short_gap_frac(requests, steps) == 0


@given(size=st.integers(2, 32), num_requests=st.integers(1, 12), knows_steps=st.booleans())
def test_chunks_that_arrive_together_are_called_bunched(size, num_requests, knows_steps):
    requests = [request_of(r, in_bursts(64, size)) for r in range(num_requests)]
    share = short_gap_frac(requests, steps_of([STEP_NS] * 64) if knows_steps else [])
    assert share > BUNCHED_FRAC
    assert share == pytest.approx(1 - 1 / size, abs=1 / 16)


def test_one_request_that_was_held_up_does_not_make_its_even_pace_a_burst():
    held = [2 * 10**9, *evenly(63, STEP_NS, 4 * 10**9)]
    others = [request_of(r, evenly(64, STEP_NS)) for r in range(1, 5)]
    assert short_gap_frac([request_of(0, held), *others]) == 0


def test_known_steps_keep_requests_that_were_all_held_up_from_looking_bunched():
    held = [2 * 10**9, *evenly(63, STEP_NS, 40 * 10**9)]
    requests = [request_of(r, held) for r in range(4)]
    assert short_gap_frac(requests) > BUNCHED_FRAC
    assert short_gap_frac(requests, steps_of([STEP_NS] * 64)) == 0


def test_arrivals_without_any_pace_stay_below_the_threshold():
    uniform = [(i * 0.6180339887) % 1 for i in range(1, 400)]
    gaps = [round(-STEP_NS * math.log(u)) for u in uniform]
    share = short_gap_frac([request_of(0, list(itertools.accumulate(gaps)))])
    assert 0.05 < share < 0.15 < BUNCHED_FRAC


def test_a_few_gaps_say_nothing():
    assert short_gap_frac([request_of(0, in_bursts(16, 8))]) is None
    assert short_gap_frac([]) is None


@pytest.fixture(name="results")
def _results(tmp_path):
    return write_results(tmp_path / "r", block_factors=({"baseline": 1.0, "guided": 1.0},))


def bunch(results):
    """The first run of a directory, with all chunks of a choice at the moment of its last one, or near it."""

    def together(request):
        choices = tuple(
            msgspec.structs.replace(
                c, chunk_ns=tuple(c.chunk_ns[-1] - 100 * i for i in range(len(c.chunk_ns)))[::-1]
            )
            for c in request.choices
        )
        return msgspec.structs.replace(request, choices=choices)

    edit_requests(results, results.runs()[0].path.name, together)


def doubts_of(results):
    return [doubt.code for doubt in bunching_doubts(load_results(results.path).runs[0])]


def test_a_bunched_run_says_that_the_steps_carry_the_truth(results):
    assert doubts_of(results) == []
    bunch(results)
    (doubt,) = bunching_doubts(load_results(results.path).runs[0])
    assert doubt.code == "client-bunching"
    assert "step metrics carry the truth" in doubt.message


def test_a_bunched_run_without_steps_says_what_is_left(results):
    bunch(results)
    (results.runs()[0].path / "steps.jsonl").unlink()

    def spread(request):
        ends = [T0_NS + 10**9, *(T0_NS + 2 * 10**9 + i for i in range(7))]
        return msgspec.structs.replace(
            request, choices=tuple(msgspec.structs.replace(c, chunk_ns=tuple(ends)) for c in request.choices)
        )

    edit_requests(results, results.runs()[0].path.name, spread)
    (doubt,) = bunching_doubts(load_results(results.path).runs[0])
    assert "wall time and throughput hold" in doubt.message


def test_the_clock_of_a_simulator_has_its_own_measure(results):
    bunch(results)
    edit_run(results, results.runs()[0].path.name, clock="virtual", time_scale=10.0)
    assert doubts_of(results) == []
