"""Metrics that rest on arrivals known between bounds are named, marked, and decide nothing; the others count."""

import json
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.closed_loops import T0_NS, closed
from support.results.builders import edit_requests, write_results
from test_client_guard import codes, run_of, samples_of

from benchctl.analysis.analyzed import analyze_directory
from benchctl.analysis.compare.compare import CompareOptions, compare_sides
from benchctl.analysis.experiment.pairing import parse_side
from benchctl.analysis.metrics.bounds import MARK, TIMES_BOUNDED, run_bounds
from benchctl.analysis.metrics.load_figures import load_figures
from benchctl.analysis.metrics.run import run_metrics
from benchctl.analysis.validity.client import client_suspect_warnings, client_warnings
from benchctl.interop.writers.vllm import vllm_result
from benchctl.records.record import ChoiceRecord, RequestRecord
from benchctl.report.documents import document_of
from benchctl.report.tables.compare import footnotes_of, metrics_table
from benchctl.report.tables.experiment import runs_table
from benchctl.report.tables.load import bounds_note, durations_table
from benchctl.units import NS_PER_MS

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


def load_with(num_late, num=400, late=late_at_first):
    return [late(i) if i < num_late else on_time(i) for i in range(num)]


def bounds_of(requests, samples=HELD_UP):
    return run_bounds(run_of(requests, samples))


def test_a_tail_of_first_tokens_that_were_read_late_is_named_with_the_truth_inside():
    """What once was told as 57 ms was 17: one in eighty first tokens is more than one in a hundred."""
    requests = load_with(5)
    said = run_metrics(run_of(requests, HELD_UP))
    assert said["p99_ttft_ms"] == 57
    found = bounds_of(requests)
    assert found["p99_ttft_ms"].low <= 17
    assert found["p99_ttft_ms"].high == 57
    assert "p95_ttft_ms" not in found
    assert "p50_ttft_ms" not in found


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
    found = {name for name in bounds_of(load_with(num_late)) if name.endswith("ttft_ms")}
    assert found == bounded


def test_late_reads_in_mid_stream_leave_first_tokens_alone():
    found = bounds_of(load_with(40, late=late_later))
    assert found.keys() == {"p99_itl_ms"}  # three gaps in a hundred; and what one loses its neighbour gains


def test_a_late_first_token_makes_the_time_for_each_of_the_others_uncertain():
    found = bounds_of(load_with(40))
    low, high = found["p99_tpot_ms"].low, found["p99_tpot_ms"].high
    assert low <= 20 <= high


def test_what_ends_an_answer_is_never_between_bounds():
    found = bounds_of(load_with(300))
    assert not {name for name in found if "e2el" in name or name in {"wall_s", "output_throughput"}}


def test_a_client_in_time_has_no_bounds_and_neither_have_first_tokens_of_a_simulator():
    in_time = samples_of(400, lag_ms=0.1)
    together = [stream(i, [20 + 80 * (k // 4) for k in range(40)]) for i in range(400)]
    assert bounds_of(together, in_time) == {}
    late = run_of(load_with(300), HELD_UP, clock="virtual", time_scale=50.0)
    assert run_bounds(late) == {}


def test_gaps_of_tokens_that_a_simulator_wrote_together_have_bounds_and_their_mean_counts():
    together = [stream(i, [20 + 80 * (k // 4) for k in range(40)]) for i in range(400)]
    bounds = run_bounds(run_of(together, samples_of(400, lag_ms=0.1), clock="virtual"))
    assert set(bounds) == {"p50_itl_ms", "p90_itl_ms", "p95_itl_ms", "p99_itl_ms"}
    assert (bounds["p50_itl_ms"].low, bounds["p50_itl_ms"].high) == (0, 20)
    assert (bounds["p99_itl_ms"].low, bounds["p99_itl_ms"].high) == (20, 80)


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
    said, found = run_metrics(seen), run_bounds(seen)
    for latency in ("ttft", "itl", "tpot", "e2el"):
        for name in (f"{latency}_ms", f"p50_{latency}_ms"):
            if name in found:
                assert found[name].low - 1e-9 <= truth[name] <= found[name].high + 1e-9
            else:
                assert abs(truth[name] - said[name]) <= max(0.01 * said[name], 0.02) + 1e-9


def test_a_run_says_which_of_its_metrics_rest_on_bounds_and_counts():
    run = run_of(load_with(20), HELD_UP)
    assert codes(client_suspect_warnings(run, closed(4))) == []
    (warning,) = [w for w in client_warnings(run, closed(4)) if w.code == TIMES_BOUNDED]
    assert "p99_ttft_ms lies in 17 to 57 ms" in warning.message
    assert "p50_ttft_ms" not in warning.message


def test_a_client_that_reads_most_arrivals_late_makes_the_whole_run_suspect():
    always = [stream(i, [60, 60, 60, 120, 120, 120, 180, 180, 180]) for i in range(60)]
    assert codes(client_suspect_warnings(run_of(always, HELD_UP), closed(4))) == ["arrival-times-unreliable"]


def test_the_tables_of_a_load_mark_them_and_say_what_they_lie_between():
    run = run_of(load_with(10), HELD_UP)
    figures = load_figures(run, closed(4), {})
    rows = durations_table(figures).texts()
    (ttft,) = [row for row in rows if row[0] == "TTFT"]
    assert [field.endswith(MARK) for field in ttft] == [False, True, False, True, False]
    assert "p99_ttft_ms 17 to 57 ms" in bounds_note(figures)
    assert bounds_note(replace(figures, bounds={})) is None


BLOCKS = tuple({"baseline": 1.0, "guided": factor} for factor in (1.0, 1.001, 0.999, 1.002, 1.0, 0.998, 1.0))


@pytest.fixture(name="results")
def _results(tmp_path):
    """Seven blocks; the client of one guided run read the first two tokens of every answer together."""
    results = write_results(tmp_path / "r", block_factors=BLOCKS)
    name = next(run.path.name for run in results.runs() if run.read().variant == "guided")
    edit_requests(results, name, read_late)
    return results


def read_late(request):
    """The request to a client that had not read the first token when the second came."""
    choices = tuple(
        msgspec.structs.replace(
            choice,
            chunk_ns=(choice.chunk_ns[1], *choice.chunk_ns[1:]),
            chunk_late_ns=(3 * NS_PER_MS,) * len(choice.chunk_ns),
        )
        for choice in request.choices
    )
    return msgspec.structs.replace(request, choices=choices)


def compare(results, *metrics):
    sides = [parse_side(f"{results.path}:{variant}") for variant in ("baseline", "guided")]
    return compare_sides(*sides, CompareOptions(metrics=metrics))


def test_a_metric_that_rests_on_bounds_does_not_count_in_that_run_and_the_others_do(results):
    found = {m.metric.name: m for m in compare(results, "ttft_ms", "step_ms", "e2el_ms").cells[0].metrics}
    assert found["ttft_ms"].num_bounded == (0, 1)
    assert found["ttft_ms"].estimate.num_blocks == 6
    assert found["e2el_ms"].estimate.num_blocks == found["step_ms"].estimate.num_blocks == 7
    assert found["ttft_ms"].verdict == found["step_ms"].verdict == "regression"


def test_where_it_rests_on_bounds_in_every_run_it_decides_nothing(results):
    for run in results.runs():
        if run.read().variant == "guided":
            edit_requests(results, run.path.name, read_late)
    comparison = compare(results, "ttft_ms")
    assert (comparison.verdict, comparison.exit_code) == ("inconclusive", 3)
    (metric,) = [m for m in comparison.cells[0].metrics if m.metric.name == "ttft_ms"]
    assert metric.reason.startswith("7 of 14 runs know it between bounds only")


def test_every_table_marks_it_and_says_what_the_mark_means(results):
    comparison = compare(results, "ttft_ms", "step_ms")
    rows = {row[1]: row for row in metrics_table(comparison, show_all=False).texts()}
    assert rows["ttft_ms"][3].endswith(MARK)
    assert not any(MARK in field for field in rows["step_ms"])
    assert any(line.startswith(f"{MARK} in up to 1 runs the client read late") for line in footnotes_of(comparison))
    told = {metric["name"]: metric for metric in document_of(comparison)["metrics"]}
    assert told["ttft_ms"]["runs_with_bounds"] == {"a": 0, "b": 1}
    analysis = analyze_directory(results.path)
    cells = [row["ttft_ms"] for row in runs_table(analysis).rows]
    assert [MARK in cell for cell in cells] == ["ttft_ms" in run.bounds for run in analysis.runs]
    assert sum(MARK in cell for cell in cells) == 1
    (late,) = [run for run in analysis.runs if run.bounds]
    assert TIMES_BOUNDED in [warning.code for warning in late.warnings]
    assert late.number("ttft_ms") is not None
    assert late.counted("ttft_ms") is None
    document = json.loads(msgspec.json.encode(vllm_result(late.run, analysis.results.manifest, closed(4))))
    low, high = document["bounds"]["ttft_ms"]
    assert low < document["mean_ttft_ms"] == high
