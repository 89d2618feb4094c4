"""Windows of loads of which the truth is known, and what is said about servers that are not warm or steady."""

import json
import shutil
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, strategies as st
from support.cli import benchctl, document, printed

from benchctl.analysis.metrics.chunks import chunks_of
from benchctl.analysis.metrics.latency import measured
from benchctl.analysis.metrics.run import run_metrics
from benchctl.analysis.metrics.steady import MIN_REQUESTS, steady_window
from benchctl.analysis.metrics.table import STEADY
from benchctl.analysis.validity.steadiness import backlog_growth, steadiness_warnings
from benchctl.profile.objective import Slo
from benchctl.records.columns import columns_from
from benchctl.units import NS_PER_S
from benchmarks.verdict.steady_truth import CONDITIONS, OPEN, Condition, events, measure

BY_NAME = {condition.name: condition for condition in CONDITIONS}
CLOSED = CONDITIONS[0]


def said_of(condition, seed=1, *, has_steps=True):
    """The warnings of one load, by code."""
    profile, run = measure(condition, seed)
    if not has_steps:
        run = replace(run, columns=columns_from(()), warmup_columns=columns_from(()))
    return {each.code: each.message for each in steadiness_warnings(run, profile.workload.arrival)}


@pytest.fixture(scope="module")
def closed():
    return measure(CLOSED, 3)[1]


def test_the_window_leaves_out_the_burst_and_all_that_was_open_when_the_last_request_was_sent(closed):
    chunks = chunks_of(measured(closed.requests))
    window = steady_window(chunks)
    sent = sorted(request.sent_ns for request in chunks.requests)
    inside = [chunks.requests[i] for i in window.requests.tolist()]
    assert window.first >= 16
    assert [request.sent_ns for request in inside] == sent[window.first : window.end]
    assert max(request.done_ns for request in inside) <= sent[-1]
    assert window.first % 30 == window.end % 30 == 0
    assert window.end >= len(sent) - 4 * 16
    steps = closed.columns.num_seqs[window.steps(closed)]
    assert set(steps.tolist()) == {16}


def test_metrics_of_the_window_are_those_of_its_requests_and_steps_alone(closed):
    metrics, chunks = run_metrics(closed), chunks_of(measured(closed.requests))
    window = steady_window(chunks)
    inside = chunks_of([chunks.requests[i] for i in window.requests.tolist()])
    latencies = inside.latencies_ns(inside.t_ns)
    for name in ("ttft", "tpot", "e2el"):
        assert metrics[f"steady_{name}_ms"] == pytest.approx(np.mean(latencies[name]) / 1e6)
    dur_ns = closed.columns.dur_ns[window.steps(closed)]
    assert metrics["steady_step_ms"] == pytest.approx(dur_ns.mean() / 1e6)
    tokens = sum(window.begin_ns <= t_ns < window.end_ns for t_ns in chunks.t_ns.tolist())
    seconds = (window.end_ns - window.begin_ns) / NS_PER_S
    assert metrics["steady_output_throughput"] == pytest.approx(tokens / seconds)


def test_a_window_of_a_drained_start_has_the_first_token_times_of_a_running_one(closed):
    drained, running = run_metrics(closed), run_metrics(measure(replace(CLOSED, begin="running"), 3)[1])
    assert drained["ttft_ms"] > 1.05 * running["ttft_ms"]
    assert drained["steady_ttft_ms"] == pytest.approx(running["steady_ttft_ms"], rel=0.03)


@pytest.mark.parametrize("num_requests", [50, MIN_REQUESTS, MIN_REQUESTS + 8])
def test_a_short_load_has_no_window_and_no_metrics_of_one(closed, num_requests):
    short = replace(closed, requests=measured(closed.requests)[:num_requests])
    metrics = run_metrics(short, slo=Slo(ttft_ms=100))
    assert [metrics[name] for name in STEADY.values()] == [None] * len(STEADY)
    assert steady_window(chunks_of(())) is None


def test_a_burst_has_no_window():
    assert (
        steady_window(chunks_of(measured(measure(replace(CLOSED, arrival="{kind: burst}"), 1)[1].requests))) is None
    )


def test_a_request_that_never_ended_ends_the_window(closed):
    requests = list(measured(closed.requests))
    at = sorted(range(len(requests)), key=lambda i: requests[i].sent_ns)[450]
    requests[at] = msgspec.structs.replace(requests[at], choices=(), done_ns=None)
    window = steady_window(chunks_of(requests))
    assert window.end == 450
    assert at not in window.requests


NIGHTLY = {
    "stationary, open loop, Poisson 20/s",
    "pause of 1 s at each new batch size, open loop, 32 sequences at most",
    "drift of 3 % over the load, open loop",
}


@pytest.mark.parametrize(
    "condition",
    [pytest.param(each, marks=[pytest.mark.nightly] * (each.name in NIGHTLY), id=each.name) for each in CONDITIONS],
)
def test_faults_are_named_and_stationary_servers_are_not(condition):
    assert events(condition, 11) in ({"named": True}, {"nothing said": True})


def test_a_drift_is_named_with_its_size_and_where_it_was():
    text = said_of(Condition(name="drift", options="drift: 0.08"))["not-steady"]
    assert text.startswith("decode_step_ms rises by ")
    share = float(text.split("rises by ")[1].split("%")[0])
    assert 2.5 < share < 8
    assert "of 600 (" in text
    assert "s into the load)" in text


def test_a_server_that_gets_faster_is_not_steady_either():
    assert "decode_step_ms falls by" in said_of(Condition(name="cooling", options="drift: -0.06"))["not-steady"]


@pytest.mark.parametrize("arrival", [CLOSED.arrival, OPEN], ids=["closed loop", "open loop"])
def test_without_a_step_log_the_times_per_token_tell_of_a_drift(arrival):
    drifting = Condition(name="drift", arrival=arrival, options="drift: 0.06")
    assert "tpot_ms rises by" in said_of(drifting, has_steps=False)["not-steady"]
    assert said_of(replace(drifting, options=""), has_steps=False) == {}


@pytest.mark.parametrize(("rate", "is_overload"), [(10, False), (20, False), (36, True), (90, True)])
def test_a_backlog_that_grows_is_overload_and_a_long_queue_is_not(rate, is_overload):
    """The server answers 23.5 requests of this law per second; at 90 three of four were open at the last send."""
    options = "max_num_seqs: 16"
    said = said_of(Condition(name="rate", arrival=f"{{kind: poisson, request_rate: {rate}}}", options=options))
    assert list(said) == (["backlog-grows"] if is_overload else [])
    if is_overload:
        assert "the server answers fewer requests than arrive: " in said["backlog-grows"]


def test_a_backlog_is_that_of_the_requests_as_planned_whatever_a_cap_lets_pass():
    capped = "{kind: poisson, request_rate: 60, max_concurrency: 8}"
    assert "backlog-grows" in said_of(Condition(name="cap", arrival=capped))


@given(st.integers(200, 2_000), st.integers(1, 100))
def test_no_backlog_grows_once_the_first_requests_have_ended_if_all_take_the_same_time(num_requests, lasts):
    sent_ns = np.arange(num_requests)
    assert backlog_growth(sent_ns, sent_ns + lasts, None) is None
    assert backlog_growth(sent_ns, sent_ns + lasts, lasts) is None


@pytest.mark.parametrize("begin_ns", [None, 500])
def test_a_backlog_grows_by_what_is_left_of_each_request(begin_ns):
    sent_ns = np.arange(1_000)
    assert backlog_growth(sent_ns, sent_ns * 2, begin_ns) == pytest.approx(0.5 * 500, rel=0.05)
    assert backlog_growth(sent_ns, sent_ns * 1.01, begin_ns) is None
    assert backlog_growth(sent_ns[:120], sent_ns * 2, None) is None


def test_a_drift_of_half_a_per_cent_is_not_worth_a_word():
    assert said_of(Condition(name="little", options="drift: 0.005")) == {}


def test_a_shape_that_the_warm_up_had_is_no_first_one():
    arrival, pause = "{kind: closed-loop, max_concurrency: 1}", "first_use_pause_s: 1.0"
    one_slot = Condition(name="one slot", arrival=arrival, options=pause, num_prompts=60, warmups=1)
    assert said_of(one_slot) == {}
    assert list(said_of(replace(one_slot, warmups=0))) == ["shape-met-first"]


def test_of_several_loads_each_has_its_window_and_shapes_of_an_earlier_one_are_known():
    _, run = measure(BY_NAME["pause of 1 s at each new batch size, closed loop"], 2)
    again = replace(run, load=2, warmup_columns=columns_from(()))
    both = replace(run, several=(replace(run, load=1), again))
    (warning,) = steadiness_warnings(both, None)
    assert warning.message.startswith("load 1: ")


PROFILE = """\
engine: {kind: sim, options: {noise: published, cost_model: llm-mock}}
workload:
  dataset: generated
  num_prompts: 260
  output_len: {mean: 12, cv: 0.5, max: 30}
  arrival: {kind: closed-loop, max_concurrency: 8}
variants: {baseline: {}, slow: {server: {drift: 0.5}}}
blocks: 2
"""


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    path = tmp_path_factory.mktemp("steady")
    (path / "windows.yaml").write_text(PROFILE)
    printed("simulate", "--profile", "windows.yaml", "--quiet", "-o", "r", cwd=path)
    return path / "r"


def compared(experiment, *options):
    return json.loads(
        benchctl("compare", f"{experiment}:baseline", f"{experiment}:slow", "--json", *options).stdout
    )


def deciding(experiment, *options):
    return [each["name"] for each in compared(experiment, *options)["metrics"] if each["role"] == "deciding"]


def with_window(experiment, tmp_path, word):
    """The same results, of a profile that says which part of a load decides."""
    shutil.copytree(experiment, tmp_path / word)
    profile = tmp_path / word / "profile.yaml"
    profile.write_text(profile.read_text().replace("window: auto", f"window: {word}"))
    return tmp_path / word


def test_a_drift_is_told_by_every_command_in_the_same_words(experiment):
    of_compare = next(each for each in compared(experiment)["warnings"] if each["code"] == "not-steady")
    shown = document("show", experiment)["warnings"]
    assert of_compare["message"] in [each["message"] for each in shown if each["code"] == "not-steady"]
    assert {each["where"] for each in shown if each["code"] == "not-steady"} == {"001-b0-slow", "002-b1-slow"}
    words = of_compare["message"].partition(" by ")[0]
    printed("report", experiment, cwd=experiment.parent)
    (page,) = experiment.glob("*.html")
    for text in (printed("show", experiment, "--all"), page.read_text()):
        assert words in text


def test_the_profile_says_whether_windows_decide(experiment, tmp_path):
    assert deciding(experiment) == ["steady_step_ms", "steady_tpot_ms", "wall_s"]
    assert deciding(experiment, "--metrics", "step_ms") == ["step_ms"]
    altered = with_window(experiment, tmp_path, "whole")
    assert deciding(altered, "--allow-altered") == ["step_ms", "tpot_ms", "wall_s"]


def test_a_window_on_one_side_is_no_comparison(experiment, tmp_path):
    always = with_window(experiment, tmp_path, "steady")
    for log in always.glob("runs/*slow/requests.jsonl"):
        log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:150]))
    one_sided = [each for each in compared(always, "--allow-altered")["metrics"] if each["role"] == "deciding"]
    assert [each["name"] for each in one_sided] == ["steady_step_ms", "steady_tpot_ms", "wall_s"]
    assert {each["verdict"] for each in one_sided[:2]} == {"unknown"}
    assert "0 of 2 runs of baseline and 2 of 2 of slow have no steady window" in one_sided[0]["reason"]
