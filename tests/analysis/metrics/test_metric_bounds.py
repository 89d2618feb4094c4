"""Metrics that rest on arrivals known between bounds are unknown and named with their bounds; the others count."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.closed_loops import T0_NS, closed
from support.results.builders import GUIDED, edit_requests, run_ids, write_results
from support.results.comparing import compare_arms, metric_of
from test_client_guard import codes, run_of, samples_of

from benchctl.analysis.analyzed import analyze_directory
from benchctl.analysis.metrics.arrivals import uncertain_metrics
from benchctl.analysis.metrics.run import load_figures, run_metrics, tails_of_few
from benchctl.analysis.validity.client import client_suspect_warnings, client_warnings
from benchctl.interop.vllm_result import vllm_result
from benchctl.records.record import ChoiceRecord, RequestRecord
from benchctl.report.experiment_tables import runs_table
from benchctl.report.load_tables import durations_table
from benchctl.units import NS_PER_MS, UNKNOWN

TTFTS = {"ttft_ms", "p90_ttft_ms", "p95_ttft_ms", "p99_ttft_ms"}
HELD_UP = samples_of(400, lag_ms=45.0)


def stream(index, arrivals_ms, late_ms=0.1):
    """A request every 20 ms whose chunks have these stamps, in ms after its send."""
    sent_ns = T0_NS + 20 * index * NS_PER_MS
    stamps = tuple(sent_ns + round(ms * NS_PER_MS) for ms in arrivals_ms)
    late = tuple(round(late_ms * NS_PER_MS) for _ in stamps)
    return RequestRecord(
        request_id=f"r{index}",
        index=index,
        scheduled_ns=sent_ns,
        sent_ns=sent_ns,
        done_ns=stamps[-1] + late[-1],
        stamps="kernel",
        choices=(ChoiceRecord(index=0, chunk_ns=stamps, chunk_late_ns=late),),
        completion_tokens=len(stamps),
    )


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
    assert metrics["p99_ttft_ms"] is None
    assert metrics["p95_ttft_ms"] == metrics["p50_ttft_ms"] == 17
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
    run = run_of(TOGETHER, samples_of(400, lag_ms=0.1), clock="virtual")
    bounds, metrics = uncertain_metrics(run), run_metrics(run)
    assert set(bounds) == {"p50_itl_ms", "p90_itl_ms", "p95_itl_ms", "p99_itl_ms"}
    assert bounds["p50_itl_ms"] == (0, 20)
    assert bounds["p99_itl_ms"] == (20, 80)
    assert metrics["p50_itl_ms"] is None
    assert metrics["itl_ms"] == pytest.approx(720 / 39)
    few = run_of(TOGETHER[:40], samples_of(400, lag_ms=0.1), clock="virtual")
    assert tails_of_few(few).keys() >= {"p99_itl_ms"}
    assert "p50_itl_ms" not in tails_of_few(few)


TRUTHS = st.lists(
    st.tuples(
        st.lists(st.integers(1, 60), min_size=2, max_size=12), st.lists(st.booleans(), min_size=12, max_size=12)
    ),
    min_size=3,
    max_size=8,
)


def as_read(index, gaps_ms, joins):
    """A stream of writes so far apart, and the record of a client that read each with the next where told to."""
    true_ms = [sum(gaps_ms[: i + 1]) for i in range(len(gaps_ms))]
    seen_ms = list(true_ms)
    for i in reversed(range(len(true_ms) - 1)):
        if joins[i]:
            seen_ms[i] = seen_ms[i + 1]
    return stream(index, true_ms), stream(index, seen_ms, late_ms=1.5)


@given(streams=TRUTHS)
def test_the_truth_lies_within_the_bounds_or_close_to_what_is_said(streams):
    pairs = [as_read(i, gaps_ms, joins) for i, (gaps_ms, joins) in enumerate(streams)]
    truth = run_metrics(run_of([true for true, _ in pairs]))
    seen = run_of([read for _, read in pairs])
    metrics, found = run_metrics(seen), uncertain_metrics(seen)
    for latency in ("ttft", "itl", "tpot", "e2el"):
        for name in (f"{latency}_ms", f"p50_{latency}_ms"):
            if name in found:
                low, high = found[name]
                assert low - 1e-9 <= truth[name] <= high + 1e-9
                assert metrics[name] is None
            else:
                assert abs(truth[name] - metrics[name]) <= max(0.01 * metrics[name], 0.02) + 1e-9


def test_a_run_says_which_of_its_metrics_are_left_out_and_counts_unless_most_arrivals_are_late():
    run = run_of(load_with(20), HELD_UP)
    assert codes(client_suspect_warnings(run, closed(4))) == []
    (warning,) = [w for w in client_warnings(run, closed(4)) if w.code == "times-bounded"]
    assert "p99_ttft_ms in 17 to 57 ms" in warning.message
    assert "p50_ttft_ms" not in warning.message
    rows = durations_table(load_figures(run_of(load_with(10), HELD_UP), closed(4), {})).texts()
    assert ("TTFT", UNKNOWN, "17.00", UNKNOWN, "57.00") in [tuple(row) for row in rows]
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
    comparison = compare_arms(results, metrics=("ttft_ms", "step_ms", "e2el_ms"))
    ttft, step, e2el = (metric_of(comparison, name) for name in ("ttft_ms", "step_ms", "e2el_ms"))
    assert [metric.estimate.num_blocks for metric in (ttft, step, e2el)] == [6, 7, 7]
    assert ttft.verdict == step.verdict == "regression"
    analysis = analyze_directory(results.path)
    (late,) = [run for run in analysis.runs if run.number("ttft_ms") is None]
    assert (late.record.run_id, late.counted("ttft_ms")) == (GUIDED, None)
    assert {row["run"]: row["ttft_ms"] for row in runs_table(analysis).rows}[GUIDED] == UNKNOWN
    document = json.loads(msgspec.json.encode(vllm_result(late.run, analysis.results.manifest, closed(4))))
    assert document["mean_ttft_ms"] is None
    assert document["mean_e2el_ms"] > 0
    for run_id in run_ids(results):
        edit_requests(results, run_id, read_late)
    comparison = compare_arms(results, metrics=("ttft_ms",))
    assert (comparison.verdict, comparison.exit_code) == ("inconclusive", 3)
    reason = metric_of(comparison, "ttft_ms").reason
    assert reason.startswith("needs completed requests with arrival times, read in time")
