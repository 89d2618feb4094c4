"""Tokens that reach the client in bursts: found where they are, and nowhere else."""

import itertools
import math
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.results.builders import BASELINE, ONE_BLOCK, T0_NS, edit_requests, edit_run, write_results

from benchctl.analysis.metrics import arrivals
from benchctl.analysis.metrics.arrivals import BUNCHED_FRAC, UNEVEN_STEPS, bunching_warnings
from benchctl.records.columns import columns_from
from benchctl.records.loaded import load_results
from benchctl.records.record import ChoiceRecord, RequestRecord
from benchctl.records.schema import ClientSample, StepRecord
from benchctl.records.warning_codes import SUSPECT_CODES

STEP_NS = 4_000_000


def short_gap_frac(requests, steps=()):
    num_short, num_gaps = arrivals.count_gaps(requests, columns_from(steps) if steps else None)
    return num_short / num_gaps


def unevenness(requests, steps):
    return arrivals.delivery_unevenness_steps(requests, columns_from(steps))


def request_of(index, arrivals_ns, tokens_per_chunk=1):
    counts = (tokens_per_chunk,) * len(arrivals_ns)
    return RequestRecord(
        request_id=f"r{index}",
        index=index,
        scheduled_ns=0,
        sent_ns=0,
        done_ns=arrivals_ns[-1] + 1,
        choices=(ChoiceRecord(index=0, chunk_ns=tuple(arrivals_ns), chunk_tokens=counts),),
        completion_tokens=sum(counts),
    )


def evenly(num_chunks, gap_ns=STEP_NS, start_ns=0):
    return [start_ns + i * gap_ns for i in range(1, num_chunks + 1)]


def in_bursts(num_chunks, size):
    """The chunks of ``size`` steps arrive together when the last of them is made, 10 us apart."""
    return [(i // size + 1) * size * STEP_NS + (i % size) * 10_000 for i in range(num_chunks)]


def steps_of(num_steps, num_seqs=1, dur_ns=STEP_NS):
    """Steps without a gap between them, each with a token for every sequence."""
    return [
        StepRecord(
            step=i,
            start_ns=i * dur_ns,
            dur_ns=dur_ns,
            clock="host",
            phase="decode",
            num_seqs=num_seqs,
            output_tokens=num_seqs,
        )
        for i in range(num_steps)
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
        request_of(
            r, [t + wobble_ns * (i % 2) for i, t in enumerate(evenly(num_chunks, gap_ns, r))], tokens_per_chunk
        )
        for r in range(num_requests)
    ]
    steps = steps_of(num_chunks * tokens_per_chunk, dur_ns=gap_ns // tokens_per_chunk) if knows_steps else []
    assert short_gap_frac(requests, steps) == 0


@given(size=st.integers(2, 32), num_requests=st.integers(1, 12), knows_steps=st.booleans())
def test_chunks_that_arrive_together_are_called_bunched(size, num_requests, knows_steps):
    requests = [request_of(r, in_bursts(64, size)) for r in range(num_requests)]
    share = short_gap_frac(requests, steps_of(64) if knows_steps else [])
    assert share > BUNCHED_FRAC
    assert share == pytest.approx(1 - 1 / size, abs=1 / 16)


def test_requests_that_were_held_up_do_not_make_an_even_pace_a_burst():
    one = request_of(0, [2 * 10**9, *evenly(63, start_ns=4 * 10**9)])
    assert short_gap_frac([one, *(request_of(r, evenly(64)) for r in range(1, 5))]) == 0
    all_held = [request_of(r, [2 * 10**9, *evenly(63, start_ns=40 * 10**9)]) for r in range(4)]
    assert short_gap_frac(all_held) > BUNCHED_FRAC
    assert short_gap_frac(all_held, steps_of(64)) == 0, "known steps tell the pace"


def test_arrivals_without_any_pace_stay_below_the_threshold():
    gaps = [round(-STEP_NS * math.log((i * 0.6180339887) % 1)) for i in range(1, 400)]
    assert 0.05 < short_gap_frac([request_of(0, list(itertools.accumulate(gaps)))]) < 0.15 < BUNCHED_FRAC


@given(delay_ns=st.integers(0, 10**9), num_requests=st.integers(1, 8))
def test_a_delay_that_all_tokens_share_is_no_unevenness(delay_ns, num_requests):
    requests = [request_of(r, evenly(64, start_ns=delay_ns)) for r in range(num_requests)]
    assert unevenness(requests, steps_of(64, num_requests)) == 0


def test_a_front_end_that_stands_still_now_and_then_makes_few_short_gaps_and_is_found():
    """Every hundred steps it sleeps through fifteen, and delivers what they made when it wakes."""
    wakes = [STEP_NS * (i + 1 if i % 100 < 85 else (i // 100 + 1) * 100) for i in range(400)]
    requests, steps = [request_of(r, wakes) for r in range(4)], steps_of(400, 4)
    assert short_gap_frac(requests, steps) < BUNCHED_FRAC
    assert unevenness(requests, steps) == pytest.approx(9, abs=1)
    assert unevenness(requests, steps) > UNEVEN_STEPS


def test_unevenness_is_unknown_where_tokens_cannot_be_matched():
    request, steps = request_of(0, evenly(64)), steps_of(64)
    uncounted = (ChoiceRecord(index=0, chunk_ns=request.choices[0].chunk_ns),)
    assert unevenness([request], steps) is not None
    assert unevenness([msgspec.structs.replace(request, choices=uncounted)], steps) is None
    for others in (
        [],
        steps[:-1],
        [msgspec.structs.replace(step, output_tokens=None) for step in steps],
        [msgspec.structs.replace(step, clock="device") for step in steps],
    ):
        assert unevenness([request], others) is None


@pytest.fixture(name="results")
def _results(tmp_path):
    return write_results(tmp_path / "r", block_factors=ONE_BLOCK)


def move_chunks(results, place):
    """Let the chunks of each choice of the first run arrive at ``place(of the last one)``."""

    def moved(request):
        times = tuple(place(request.choices[0].chunk_ns[-1]))
        fields = {"chunk_ns": times, "chunk_late_ns": None, "chunk_chars": None}
        choices = tuple(msgspec.structs.replace(choice, **fields) for choice in request.choices)
        return msgspec.structs.replace(request, choices=choices, done_ns=times[-1])

    edit_requests(results, BASELINE, moved)


def told(results):
    return [(doubt.code, doubt.message) for doubt in bunching_warnings(load_results(results.path).runs[0])]


def test_a_bunched_run_says_what_is_left_of_it(results):
    assert told(results) == []
    move_chunks(results, lambda last_ns: range(last_ns - 700, last_ns + 1, 100))
    ((code, message),) = told(results)
    assert code == "client-bunching"
    assert "step metrics are exact" in message
    edit_run(results, BASELINE, clock="virtual", time_scale=10.0)
    assert told(results) == [], "the clock of a simulator has its own measure"
    edit_run(results, BASELINE, clock="host")
    (results.run(BASELINE).path / "steps.jsonl").unlink()
    move_chunks(results, lambda _: (T0_NS + 10**9, *(T0_NS + 2 * 10**9 + i for i in range(7))))
    ((_, message),) = told(results)
    assert "wall time and throughput hold" in message


def coalesced(index, size, num_writes=12, late_ns=50_000):
    """A stream of a server that always writes ``size`` chunks at once, read by a client in time."""
    stamps = tuple(T0_NS + (i // size + 1) * size * STEP_NS for i in range(size * num_writes))
    late, counts = (late_ns,) * len(stamps), (1,) * len(stamps)
    choice = ChoiceRecord(index=0, chunk_ns=stamps, chunk_late_ns=late, chunk_tokens=counts)
    return msgspec.structs.replace(request_of(index, stamps), sent_ns=T0_NS, choices=(choice,), stamps="kernel")


def warned(results, requests, lag_ns):
    """The warnings of a run without steps, with these requests and a loop so late."""
    client = tuple(
        ClientSample(t_ns=T0_NS + i * 10**8, loop_lag_ns=lag_ns, cpu_ns=i * 10**6, num_open=1) for i in range(60)
    )
    run = load_results(results.path).runs[0]
    return bunching_warnings(replace(run, requests=tuple(requests), client=client, columns=columns_from(())))


@pytest.mark.parametrize("size", [2, 4, 16])
def test_a_server_that_always_writes_as_many_chunks_at_once_is_told_and_not_distrusted(results, size):
    (note,) = warned(results, [coalesced(r, size) for r in range(4)], 200_000)
    assert note.code == "server-coalescing"
    assert note.code not in SUSPECT_CODES
    assert (
        f"writes {size} chunks of an answer at once: arrival times, ttft, tpot and e2el are exact" in note.message
    )


def test_whoever_made_the_bursts_is_asked_for_processors_and_a_few_gaps_say_nothing(results):
    (doubt,) = warned(results, [request_of(r, in_bursts(64, 3 + r % 5)) for r in range(8)], 200_000)
    assert doubt.message.endswith("so the server sent them in bursts: free processors for the server")
    late = [coalesced(r, 3 + r % 5, late_ns=2 * 10**6) for r in range(8)]
    (doubt,) = warned(results, late, 40 * 10**6)
    assert doubt.message.endswith("waited for the client to read: free processors for the client")
    (doubt,) = warned(results, [coalesced(r, 4) for r in range(4)], 9 * 10**6)
    assert doubt.code == "client-bunching", "a client that was never in time proves no choice of the server"
    assert warned(results, [request_of(0, in_bursts(16, 8))], 0) == warned(results, [], 0) == ()


@given(size=st.integers(2, 16), seed=st.integers(0, 99))
def test_a_size_that_varies_is_no_choice(size, seed):
    sizes = [1 + (seed + i * 7) % (2 * size) for i in range(40)]
    times = [STEP_NS * sum(sizes[: i + 1]) for i, count in enumerate(sizes) for _ in range(count)]
    assert arrivals.regular_write([request_of(0, times)]) is None


def test_tokens_that_wait_for_the_last_of_their_write_are_not_late():
    requests, steps = [coalesced(0, 16)], steps_of(192)
    assert unevenness(requests, steps) > UNEVEN_STEPS
    assert not arrivals._is_uneven(requests, columns_from(steps), 16)
    assert arrivals._is_uneven(requests, columns_from(steps), 1)
