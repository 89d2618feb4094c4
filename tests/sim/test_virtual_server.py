"""A run in virtual time beside the same run over HTTP: equal steps, tokens and texts."""

from functools import partial

import pytest
from support.steps import records_of

from benchctl.measure.run import RunContext, measure_run
from benchctl.measure.virtual import simulate_run
from benchctl.profile.load import parse_profile
from benchctl.records.directory import RunDirectory
from benchctl.records.loaded import load_run
from benchctl.records.record import PlannedRun
from benchctl.workload.prepare import prepare_requests

PROFILE = """\
name: both-ways
seed: 5
engine: {{kind: sim, options: {{time_scale: 100.0, noise: published{options}}}}}
model: qwen2.5-7b
workload:
  dataset: generated
  num_prompts: 8
  samples_per_prompt: 2
  output_len: {{mean: 12, cv: 0.5, max: 30}}
  arrival: {arrival}
  num_warmups: 2
  allow_prefix_cache_hits: true
variants:
  baseline: {{}}
"""
GUIDED = """\
  guided:
    server: {value_model: qwen2.5-1.5b, overlap_schedule: false}
    sampling: {top_k: 5, min_p: 0.01}
    guidance: {mode: centered_exp, value_scale: 0.0}
"""
CLOSED = "{kind: closed-loop, max_concurrency: 3}"
CAPPED = "{kind: poisson, request_rate: 40, max_concurrency: 3}"
PREEMPTING = ", num_kv_blocks: 20, enable_prefix_caching: true"
CHUNKED = ", tokens_per_chunk: 5, max_num_seqs: 16, max_num_batched_tokens: 32"
MOCK = ", cost_model: llm-mock"
DRAFTING = ", num_speculative_tokens: 3, acceptance: [0.9, 0.7, 0.5], draft_cost: 0.1, backfill: prefill"
"""Neither of these two goes with a value model."""


def profile_of(arrival: str = CLOSED, options: str = ""):
    text = PROFILE.format(arrival=arrival, options=options)
    return parse_profile(text if MOCK in options or DRAFTING in options else text + GUIDED, "test")


def run(path, profile, variant="baseline", *, by=simulate_run):
    requests = prepare_requests(profile).requests
    planned = PlannedRun(index=0, run_id="run", block=0, position=0, variant=variant)
    directory = RunDirectory(path)
    by(RunContext(profile=profile, requests=requests), planned, directory)
    return load_run(directory), directory


def what_was_said(requests):
    """All of a request's record that has no time in it."""
    return {
        request.request_id: (
            [
                (c.index, c.chunk_tokens, c.chunk_chars, c.output_tokens, c.finish_reason, c.text)
                for c in sorted(request.choices, key=lambda choice: choice.index)
            ],
            (request.prompt_tokens, request.completion_tokens, request.cached_tokens, request.status),
            request.error,
        )
        for request in requests
    }


@pytest.mark.parametrize(
    ("arrival", "options", "variant"),
    [
        pytest.param(CLOSED, "", "baseline", id="closed loop", marks=pytest.mark.nightly),
        pytest.param(CLOSED, "", "guided", id="guided"),
        pytest.param(CAPPED, "", "baseline", id="open loop with a cap"),
        pytest.param(
            "{kind: burst, launch_rate_limit: 30}", "", "baseline", id="launches limited", marks=pytest.mark.nightly
        ),
        pytest.param(
            "{kind: closed-loop, max_concurrency: 3, launch_rate_limit: 30}", "", "baseline", id="slots and limit"
        ),
        pytest.param(
            "{kind: poisson, request_rate: 90, launch_rate_limit: 30}",
            "",
            "baseline",
            id="held back",
            marks=pytest.mark.nightly,
        ),
        pytest.param("{kind: burst}", PREEMPTING, "baseline", id="preemption and prefix cache"),
        pytest.param(CLOSED, CHUNKED, "baseline", id="several tokens in a chunk"),
        pytest.param(CLOSED, MOCK, "baseline", id="closing step", marks=pytest.mark.nightly),
        pytest.param(CAPPED, DRAFTING, "baseline", id="speculation"),
        pytest.param(
            "{kind: burst}",
            DRAFTING + PREEMPTING,
            "baseline",
            id="speculation that preempts",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            CLOSED,
            DRAFTING + ", tokens_per_chunk: 5",
            "baseline",
            id="speculation in larger chunks",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_simulated_run_has_the_steps_and_the_tokens_of_the_same_run_over_http(
    tmp_path, arrival, options, variant
):
    profile = profile_of(arrival, options)
    over_http, http_directory = run(tmp_path / "http", profile, variant, by=measure_run)
    simulated, directory = run(tmp_path / "virtual", profile, variant)
    assert directory.step_log.read_bytes() == http_directory.step_log.read_bytes()
    assert what_was_said(simulated.requests) == what_was_said(over_http.requests)
    assert simulated.record.state == "done", simulated.record
    assert simulated.record.effective_config == over_http.record.effective_config


def test_all_times_of_a_simulated_run_are_on_one_clock_and_a_send_follows_the_slot_that_it_waited_for(tmp_path):
    simulated, _ = run(tmp_path / "closed", profile_of())
    load = sorted((r for r in simulated.requests if not r.is_warmup), key=lambda request: request.index)
    steps = [step for step in records_of(simulated) if not step.is_warmup]
    record = simulated.record
    assert (record.clock, record.time_scale, record.argv) == ("virtual", 1.0, ())
    assert record.times.first_send_ns == steps[0].start_ns == min(request.sent_ns for request in load)
    assert record.times.last_token_ns == steps[-1].start_ns + steps[-1].dur_ns
    ends = {step.start_ns + step.dur_ns for step in steps}
    assert {arrival for request in load for choice in request.choices for arrival in choice.chunk_ns} <= ends
    done = sorted(request.done_ns for request in load)
    assert [request.slot_free_ns for request in load] == [None] * 3 + done[:5]
    assert all(request.sent_ns == request.scheduled_ns for request in load)
    capped, _ = run(tmp_path / "capped", profile_of(CAPPED))
    waited = [r for r in capped.requests if not r.is_warmup and r.slot_free_ns is not None]
    assert waited
    assert all(request.sent_ns == request.slot_free_ns > request.scheduled_ns for request in waited)


def test_a_run_may_leave_its_steps_out_and_says_so(tmp_path):
    simulated, directory = run(tmp_path, profile_of(), by=partial(simulate_run, keep="requests"))
    assert not directory.step_log.exists()
    assert simulated.record.state == "done"
    assert [warning.code for warning in simulated.record.warnings] == ["steps-unknown"]


def test_a_request_that_no_server_could_serve_fails_as_over_http_and_holds_nothing_up(tmp_path):
    profile = profile_of(options=", num_kv_blocks: 6")
    over_http, _ = run(tmp_path / "http", profile, by=measure_run)
    simulated, _ = run(tmp_path / "virtual", profile)
    failed = [request for request in simulated.requests if request.error is not None]
    assert 0 < len(failed) < len(simulated.requests)
    assert what_was_said(simulated.requests) == what_was_said(over_http.requests)
    assert simulated.record.state == over_http.record.state == "suspect"
