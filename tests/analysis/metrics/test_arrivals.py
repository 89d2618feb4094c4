"""Arrival times: bursts are told where they are and nowhere else; metrics that rest on late reads have bounds."""

import itertools
import math
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, strategies as st
from support.closed_loops import T0_NS as LOAD_NS, closed
from support.results.builders import (
    GUIDED,
    ONE_BLOCK,
    T0_NS,
    edit_requests,
    run_ids,
    write_results,
)
from support.results.comparing import compare_arms, metric_of
from test_client_guard import codes, run_of, samples_of

from benchctl.analysis.analyzed import analyze_directory
from benchctl.analysis.metrics import arrivals
from benchctl.analysis.metrics.arrivals import BUNCHED_FRAC, UNEVEN_STEPS, bunching_warnings
from benchctl.analysis.metrics.chunks import chunks_of
from benchctl.analysis.metrics.run import load_figures, metrics_and_tails, run_metrics
from benchctl.analysis.validity.client import client_suspect_warnings, client_warnings
from benchctl.interop.vllm_result import vllm_result
from benchctl.records.columns import columns_from
from benchctl.records.loaded import load_results
from benchctl.records.record import ChoiceRecord, RequestRecord
from benchctl.records.schema import ClientSample, StepRecord
from benchctl.records.warning_codes import SUSPECT_CODES
from benchctl.report.experiment_tables import runs_table
from benchctl.report.load_tables import durations_table
from benchctl.units import NS_PER_MS, UNKNOWN

STEP_NS = 4_000_000


def short_gap_frac(requests, steps=()):
    num_short, num_gaps = arrivals.count_gaps(chunks_of(requests), columns_from(steps) if steps else None)
    return num_short / num_gaps


def unevenness(requests, steps):
    return arrivals.delivery_unevenness_steps(chunks_of(requests), columns_from(steps))


def uncertain_metrics(run):
    return arrivals.uncertain_metrics(run, chunks_of(run.requests).completed)


def request_of(index, arrivals_ns, tokens_per_chunk=1, late_ns=None, sent_ns=0):
    """An answer whose chunks have these stamps; of the kernel, and read so late, where ``late_ns`` is given."""
    counts = (tokens_per_chunk,) * len(arrivals_ns)
    late = None if late_ns is None else (late_ns,) * len(arrivals_ns)
    stamps = {"chunk_ns": tuple(arrivals_ns), "chunk_late_ns": late, "chunk_tokens": counts}
    return RequestRecord(
        request_id=f"r{index}",
        index=index,
        scheduled_ns=sent_ns,
        sent_ns=sent_ns,
        done_ns=arrivals_ns[-1] + (late_ns or 1),
        stamps="loop" if late is None else "kernel",
        choices=(ChoiceRecord(index=0, **stamps),),
        completion_tokens=sum(counts),
    )


def evenly(num_chunks, gap_ns=STEP_NS, start_ns=0):
    return [start_ns + i * gap_ns for i in range(1, num_chunks + 1)]


def steps_of(num_steps, num_seqs=1, dur_ns=STEP_NS, **changes):
    """Steps without a gap between them, each with a token for every sequence."""
    values = {"dur_ns": dur_ns, "clock": "host", "phase": "decode", "num_seqs": num_seqs, "output_tokens": num_seqs}
    return [StepRecord(step=i, start_ns=i * dur_ns, **values | changes) for i in range(num_steps)]


def in_bursts(num_chunks, size):
    """The chunks of ``size`` steps arrive together when the last of them is made, 10 us apart."""
    return [(i // size + 1) * size * STEP_NS + (i % size) * 10_000 for i in range(num_chunks)]


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
    for others in ([], steps[:-1], steps_of(64, output_tokens=None), steps_of(64, clock="device")):
        assert unevenness([request], others) is None


@pytest.fixture(name="results")
def _results(tmp_path):
    return write_results(tmp_path / "r", block_factors=ONE_BLOCK)


def warned_of_moved(results, times_ns, *, has_steps=True, **changes):
    """The warnings of the first run if the chunks of each choice arrive at these times."""
    run = load_results(results.path).runs[0]
    moved = [
        msgspec.structs.replace(
            request,
            choices=tuple(ChoiceRecord(index=i, chunk_ns=times_ns, chunk_tokens=(1,) * 8) for i in range(2)),
            done_ns=times_ns[-1],
        )
        for request in run.requests
    ]
    record = msgspec.structs.replace(run.record, **changes)
    columns = run.columns if has_steps else columns_from(())
    return bunching_warnings(replace(run, record=record, requests=tuple(moved), columns=columns))


def test_a_bunched_run_says_what_is_left_of_it(results):
    run = load_results(results.path).runs[0]
    last_ns = run.requests[0].choices[0].chunk_ns[-1]
    at_once = tuple(range(last_ns - 700, last_ns + 1, 100))
    assert bunching_warnings(run) == warned_of_moved(results, at_once, clock="virtual", time_scale=10.0) == ()
    (warning,) = warned_of_moved(results, at_once)
    assert warning.code == "client-bunching"
    assert "step metrics are exact" in warning.message
    late = (T0_NS + 10**9, *(T0_NS + 2 * 10**9 + i for i in range(7)))
    (warning,) = warned_of_moved(results, late, has_steps=False)
    assert "wall time and throughput hold" in warning.message


def coalesced(index, size, num_writes=12, late_ns=50_000):
    """A stream of a server that always writes ``size`` chunks at once, read by a client in time."""
    stamps = [T0_NS + (i // size + 1) * size * STEP_NS for i in range(size * num_writes)]
    return request_of(index, stamps, late_ns=late_ns, sent_ns=T0_NS)


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
    assert (note.code, note.code in SUSPECT_CODES) == ("server-coalescing", False)
    assert (
        f"writes {size} chunks of an answer at once: arrival times, ttft, tpot and e2el are exact" in note.message
    )


def test_whoever_made_the_bursts_is_asked_for_processors_and_a_few_gaps_say_nothing(results):
    bursts = [request_of(r, in_bursts(64, 3 + r % 5)) for r in range(8)]
    late = [coalesced(r, 3 + r % 5, late_ns=2 * 10**6) for r in range(8)]
    never_in_time = [coalesced(r, 4) for r in range(4)]  # which proves no choice of the server
    for requests, lag_ns, words in (
        (bursts, 200_000, "so the server sent them in bursts: free processors for the server"),
        (late, 40 * 10**6, "waited for the client to read: free processors for the client"),
        (never_in_time, 9 * 10**6, ""),
    ):
        (doubt,) = warned(results, requests, lag_ns)
        assert (doubt.code, doubt.message.endswith(words)) == ("client-bunching", True)
    assert warned(results, [request_of(0, in_bursts(16, 8))], 0) == warned(results, [], 0) == ()


@given(size=st.integers(2, 16), seed=st.integers(0, 99))
def test_a_size_that_varies_is_no_choice(size, seed):
    sizes = [1 + (seed + i * 7) % (2 * size) for i in range(40)]
    times = [STEP_NS * sum(sizes[: i + 1]) for i, count in enumerate(sizes) for _ in range(count)]
    assert arrivals.regular_write(chunks_of([request_of(0, times)])) is None


TTFTS = {"ttft_ms", "p90_ttft_ms", "p95_ttft_ms", "p99_ttft_ms"}
HELD_UP = samples_of(400, lag_ms=45.0)


def stream(index, arrivals_ms, late_ms=0.1):
    """A request every 20 ms whose chunks have these stamps, in ms after its send."""
    sent_ns = LOAD_NS + 20 * index * NS_PER_MS
    stamps = [sent_ns + round(ms * NS_PER_MS) for ms in arrivals_ms]
    return request_of(index, stamps, late_ns=round(late_ms * NS_PER_MS), sent_ns=sent_ns)


def on_time(index):
    """A first token after 17 ms and nine more, every 20 ms."""
    return stream(index, [17 + 20 * i for i in range(10)])


def late_at_first(index):
    """The same answer to a client that was away until the third token had come."""
    return stream(index, [57, 57, 57, *(17 + 20 * i for i in range(3, 10))])


def late_later(index):
    """The same, away while the sixth to the eighth token came."""
    return stream(index, [17, 37, 57, 77, 97, 157, 157, 157, 177, 197])


TOGETHER = [stream(i, [20 + 80 * (k // 4) for k in range(40)]) for i in range(400)]


def load_with(num_late, num=400, late=late_at_first):
    return [late(i) if i < num_late else on_time(i) for i in range(num)]


def bounds_of(requests, samples=HELD_UP):
    return uncertain_metrics(run_of(requests, samples))


def test_a_tail_of_first_tokens_that_were_read_late_is_named_with_the_truth_inside():
    """What once was told as 57 ms was 17: one in eighty first tokens is more than one in a hundred."""
    requests = load_with(5)
    metrics = run_metrics(run_of(requests, HELD_UP))
    tails = [metrics[f"p{percent}_ttft_ms"] for percent in (50, 95, 99)]
    assert tails == [17, 17, None]
    low, high = bounds_of(requests)["p99_ttft_ms"]
    assert low <= 17 < high == 57
    low, high = bounds_of(load_with(40))["p99_tpot_ms"]
    assert low <= 20 <= high


@pytest.mark.parametrize(
    ("num_late", "bounded"),
    [
        pytest.param(0, set(), id="none"),
        pytest.param(3, {"ttft_ms"}, id="fewer than one in a hundred: a mean of 17 ms moves by 2 %"),
        pytest.param(10, TTFTS - {"p90_ttft_ms", "p95_ttft_ms"}, id="one in forty"),
        pytest.param(30, TTFTS - {"p90_ttft_ms"}, id="one in thirteen"),
        pytest.param(60, TTFTS, id="one in seven"),
        pytest.param(220, TTFTS | {"p50_ttft_ms"}, id="every second"),
    ],
)
def test_which_percentile_rests_on_bounds_is_a_matter_of_how_many_first_tokens_do(num_late, bounded):
    bounds = bounds_of(load_with(num_late))
    assert {name for name in bounds if name.endswith("ttft_ms")} == bounded
    assert not [name for name in bounds if "e2el" in name or name in {"wall_s", "output_throughput"}]


def test_late_reads_in_mid_stream_leave_first_tokens_alone_and_a_client_in_time_all():
    assert bounds_of(load_with(40, late=late_later)).keys() == {"p99_itl_ms"}  # what one loses its neighbour gains
    assert bounds_of(TOGETHER, samples_of(400, lag_ms=0.1)) == {}
    assert uncertain_metrics(run_of(load_with(300), HELD_UP, clock="virtual", time_scale=50.0)) == {}


def test_gaps_of_tokens_that_a_simulator_wrote_together_have_bounds_and_their_mean_counts():
    run, few = (
        run_of(requests, samples_of(400, lag_ms=0.1), clock="virtual") for requests in (TOGETHER, TOGETHER[:40])
    )
    bounds, metrics = uncertain_metrics(run), run_metrics(run)
    assert set(bounds) == {"p50_itl_ms", "p90_itl_ms", "p95_itl_ms", "p99_itl_ms"}
    assert (bounds["p50_itl_ms"], bounds["p99_itl_ms"]) == ((0, 20), (20, 80))
    assert (metrics["p50_itl_ms"], metrics["itl_ms"]) == (None, pytest.approx(720 / 39))
    _, tails = metrics_and_tails(few)
    assert ("p99_itl_ms" in tails, "p50_itl_ms" in tails) == (True, False)


TRUTHS = st.lists(
    st.tuples(
        st.lists(st.integers(1, 60), min_size=2, max_size=12), st.lists(st.booleans(), min_size=12, max_size=12)
    ),
    min_size=3,
    max_size=8,
)


def as_read(index, gaps_ms, joins):
    """A stream of writes so far apart, and the record of a client that read each with the next where told to."""
    true_ms = list(itertools.accumulate(gaps_ms))
    seen_ms = list(true_ms)
    for i in reversed(range(len(true_ms) - 1)):
        seen_ms[i] = seen_ms[i + 1] if joins[i] else true_ms[i]
    return stream(index, true_ms), stream(index, seen_ms, late_ms=1.5)


@given(streams=TRUTHS)
def test_the_truth_lies_within_the_bounds_or_close_to_what_is_said(streams):
    true, read = zip(*(as_read(i, gaps_ms, joins) for i, (gaps_ms, joins) in enumerate(streams)), strict=True)
    truth, seen = run_metrics(run_of(true)), run_of(read)
    metrics, bounds = run_metrics(seen), uncertain_metrics(seen)
    for latency in ("ttft", "itl", "tpot", "e2el"):
        for name in (f"{latency}_ms", f"p50_{latency}_ms"):
            said, error = metrics[name], max(0.01 * (metrics[name] or 0), 0.02)
            low, high = bounds[name] if name in bounds else (said - error, said + error)
            assert (said is None) == (name in bounds)
            assert low - 1e-9 <= truth[name] <= high + 1e-9


def test_a_run_says_which_of_its_metrics_are_left_out_and_counts_unless_most_arrivals_are_late():
    run = run_of(load_with(20), HELD_UP)
    assert client_suspect_warnings(run, closed(4)) == ()
    message = next(w.message for w in client_warnings(run, closed(4)) if w.code == "times-bounded")
    assert ("p99_ttft_ms in 17 to 57 ms" in message, "p50_ttft_ms" in message) == (True, False)
    rows = durations_table(load_figures(run_of(load_with(10), HELD_UP), closed(4))).texts()
    assert ["TTFT", UNKNOWN, "17.00", UNKNOWN, "57.00"] in [list(row) for row in rows]
    always = [stream(i, [60, 60, 60, 120, 120, 120, 180, 180, 180]) for i in range(60)]
    assert codes(client_suspect_warnings(run_of(always, HELD_UP), closed(4))) == ["arrival-times-unreliable"]


BLOCKS = tuple({"baseline": 1.0, "guided": factor} for factor in (1.0, 1.001, 0.999, 1.002, 1.0, 0.998, 1.0))


def read_late(request):
    """The request to a client that had not read the first token when the second came."""
    late = (3 * NS_PER_MS,) * len(request.choices[0].chunk_ns)
    choices = tuple(
        msgspec.structs.replace(c, chunk_ns=(c.chunk_ns[1], *c.chunk_ns[1:]), chunk_late_ns=late)
        for c in request.choices
    )
    return msgspec.structs.replace(request, choices=choices)


def test_a_metric_that_rests_on_bounds_is_unknown_in_that_run_alone_or_decides_nothing_if_in_all(tmp_path):
    results = write_results(tmp_path / "r", block_factors=BLOCKS)
    edit_requests(results, GUIDED, read_late)
    deciding = compare_arms(results, metrics=("ttft_ms", "step_ms", "e2el_ms")).cells[0].deciding
    blocks = {metric.metric.name: metric.estimate.num_blocks for metric in deciding}
    assert blocks == {"ttft_ms": 6, "step_ms": 7, "e2el_ms": 7}
    analysis = analyze_directory(results.path)
    (late,) = [run for run in analysis.runs if run.number("ttft_ms") is None]
    assert (late.record.run_id, late.counted("ttft_ms")) == (GUIDED, None)
    assert {row["run"]: row["ttft_ms"] for row in runs_table(analysis).rows}[GUIDED] == UNKNOWN
    document = vllm_result(late.run, analysis.experiment.metrics(late.run), analysis.results.manifest, closed(4))
    assert (document["mean_ttft_ms"], document["mean_e2el_ms"] > 0) == (None, True)
    for run_id in run_ids(results):
        edit_requests(results, run_id, read_late)
    comparison = compare_arms(results, metrics=("ttft_ms",))
    reason = "needs completed requests with arrival times, read in time"
    assert (comparison.exit_code, reason in metric_of(comparison, "ttft_ms").reason) == (3, True)
