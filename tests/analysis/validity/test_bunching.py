"""Tokens that reach the client in bursts: found where they are, and nowhere else."""

import itertools
import math
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.results.builders import T0_NS, edit_requests, edit_run, write_results

from benchctl.analysis.metrics import arrivals as bunching
from benchctl.analysis.metrics.arrivals import BUNCHED_FRAC, UNEVEN_STEPS, bunching_warnings
from benchctl.records.columns import columns_from
from benchctl.records.loaded import load_results
from benchctl.records.record import ChoiceRecord, RequestRecord
from benchctl.records.schema import ClientSample, StepRecord
from benchctl.records.warning_codes import SUSPECT_CODES

STEP_NS = 4_000_000


def short_gap_frac(requests, steps=()):
    num_short, num_gaps = bunching.count_gaps(requests, columns_from(steps) if steps else None)
    return num_short / num_gaps


def delivery_unevenness_steps(requests, steps):
    return bunching.delivery_unevenness_steps(requests, columns_from(steps))


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


def test_a_few_gaps_say_nothing(results):
    assert bunching_warnings(run_of(results, [request_of(0, in_bursts(16, 8))], ())) == ()
    assert bunching_warnings(run_of(results, [], ())) == ()


def one_after_another(num_steps, num_seqs=1):
    """Steps without a gap between them, each with a token for every sequence."""
    return [
        StepRecord(
            step=i,
            start_ns=i * STEP_NS,
            dur_ns=STEP_NS,
            clock="host",
            phase="decode",
            num_seqs=num_seqs,
            output_tokens=num_seqs,
        )
        for i in range(num_steps)
    ]


@given(delay_ns=st.integers(0, 10**9), num_requests=st.integers(1, 8))
def test_a_delay_that_all_tokens_share_is_no_unevenness(delay_ns, num_requests):
    requests = [request_of(r, evenly(64, STEP_NS, delay_ns)) for r in range(num_requests)]
    assert delivery_unevenness_steps(requests, one_after_another(64, num_requests)) == 0


def test_a_front_end_that_stands_still_now_and_then_makes_few_short_gaps_and_is_found():
    """Every hundred steps it sleeps through fifteen, and delivers what they made when it wakes."""
    arrivals = [STEP_NS * (i + 1 if i % 100 < 85 else (i // 100 + 1) * 100) for i in range(400)]
    requests = [request_of(r, arrivals) for r in range(4)]
    steps = one_after_another(400, 4)
    assert short_gap_frac(requests, steps) < BUNCHED_FRAC
    assert delivery_unevenness_steps(requests, steps) == pytest.approx(9, abs=1)
    assert delivery_unevenness_steps(requests, steps) > UNEVEN_STEPS


def test_unevenness_is_unknown_where_tokens_cannot_be_matched():
    requests, steps = [request_of(0, evenly(64, STEP_NS))], one_after_another(64)
    uncounted = msgspec.structs.replace(
        requests[0], choices=(ChoiceRecord(index=0, chunk_ns=requests[0].choices[0].chunk_ns),)
    )
    assert delivery_unevenness_steps(requests, steps) is not None
    assert delivery_unevenness_steps([uncounted], steps) is None
    assert delivery_unevenness_steps(requests, steps[:-1]) is None
    assert (
        delivery_unevenness_steps(requests, [msgspec.structs.replace(s, output_tokens=None) for s in steps]) is None
    )
    assert delivery_unevenness_steps(requests, [msgspec.structs.replace(s, clock="device") for s in steps]) is None
    assert delivery_unevenness_steps(requests, []) is None


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
    return [doubt.code for doubt in bunching_warnings(load_results(results.path).runs[0])]


def test_a_bunched_run_says_that_the_steps_carry_the_truth(results):
    assert doubts_of(results) == []
    bunch(results)
    (doubt,) = bunching_warnings(load_results(results.path).runs[0])
    assert doubt.code == "client-bunching"
    assert "step metrics are exact" in doubt.message


def test_a_bunched_run_without_steps_says_what_is_left(results):
    bunch(results)
    (results.runs()[0].path / "steps.jsonl").unlink()

    def spread(request):
        ends = (T0_NS + 10**9, *(T0_NS + 2 * 10**9 + i for i in range(7)))
        chunks = {"chunk_ns": ends, "chunk_late_ns": None, "chunk_tokens": None, "chunk_chars": None}
        choices = tuple(msgspec.structs.replace(choice, **chunks) for choice in request.choices)
        return msgspec.structs.replace(request, choices=choices, done_ns=ends[-1])

    edit_requests(results, results.runs()[0].path.name, spread)
    (doubt,) = bunching_warnings(load_results(results.path).runs[0])
    assert "wall time and throughput hold" in doubt.message


def test_the_clock_of_a_simulator_has_its_own_measure(results):
    bunch(results)
    edit_run(results, results.runs()[0].path.name, clock="virtual", time_scale=10.0)
    assert doubts_of(results) == []


def coalesced(index, size, num_writes=12, gap_ns=STEP_NS, late_ns=50_000):
    """A stream of a server that always writes ``size`` chunks at once, read by a client in time."""
    stamps = [T0_NS + (i // size + 1) * size * gap_ns for i in range(size * num_writes)]
    choice = ChoiceRecord(
        index=0, chunk_ns=tuple(stamps), chunk_late_ns=(late_ns,) * len(stamps), chunk_tokens=(1,) * len(stamps)
    )
    return msgspec.structs.replace(request_of(index, stamps), sent_ns=T0_NS, choices=(choice,), stamps="kernel")


def lagging(lag_ns, num=60):
    return tuple(
        ClientSample(t_ns=T0_NS + i * 10**8, loop_lag_ns=lag_ns, cpu_ns=i * 10**6, num_open=1) for i in range(num)
    )


def run_of(results, requests, client):
    """The first run of a directory without its steps, with these requests and this client."""
    return replace(
        load_results(results.path).runs[0], requests=tuple(requests), client=client, columns=columns_from(())
    )


@pytest.mark.parametrize("size", [2, 4, 16])
def test_a_server_that_always_writes_as_many_chunks_at_once_is_told_and_not_distrusted(results, size):
    run = run_of(results, [coalesced(r, size) for r in range(4)], lagging(200_000))
    (note,) = bunching_warnings(run)
    assert note.code == "server-coalescing"
    assert note.code not in SUSPECT_CODES
    assert (
        f"writes {size} chunks of an answer at once: arrival times, ttft, tpot and e2el are exact" in note.message
    )


def test_a_client_that_was_never_in_time_proves_no_choice_of_the_server(results):
    run = run_of(results, [coalesced(r, 4) for r in range(4)], lagging(9 * 10**6))
    assert [doubt.code for doubt in bunching_warnings(run)] == ["client-bunching"]


def test_whoever_made_the_bursts_is_asked_for_processors(results):
    irregular = [request_of(r, in_bursts(64, 3 + r % 5)) for r in range(8)]
    (doubt,) = bunching_warnings(run_of(results, irregular, lagging(200_000)))
    assert doubt.message.endswith("so the server sent them in bursts: free processors for the server")
    late = [coalesced(r, 3 + r % 5, late_ns=2 * 10**6) for r in range(8)]
    (doubt,) = bunching_warnings(run_of(results, late, lagging(40 * 10**6)))
    assert doubt.message.endswith("waited for the client to read: free processors for the client")


@given(size=st.integers(2, 16), seed=st.integers(0, 99))
def test_a_size_that_varies_is_no_choice(size, seed):
    sizes = [1 + (seed + i * 7) % (2 * size) for i in range(40)]
    arrivals = [STEP_NS * sum(sizes[: i + 1]) for i, count in enumerate(sizes) for _ in range(count)]
    assert bunching.regular_write([request_of(0, arrivals)]) is None


def test_tokens_that_wait_for_the_last_of_their_write_are_not_late(results):
    steps = columns_from(one_after_another(192))
    assert delivery_unevenness_steps([coalesced(0, 16)], one_after_another(192)) > UNEVEN_STEPS
    assert not bunching._is_uneven([coalesced(0, 16)], steps, 16)
    assert bunching._is_uneven([coalesced(0, 16)], steps, 1)
