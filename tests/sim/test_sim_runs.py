"""Runs without a server: in virtual time, equal to the same run over HTTP, and predictions for real engines."""

from functools import partial

import msgspec
import pytest
from support.steps import records_of

from benchctl.errors import UsageError
from benchctl.measure.run import RunContext, measure_run
from benchctl.measure.virtual import simulate_run
from benchctl.profile.load import parse_profile, profile_from_plain
from benchctl.profile.planning import variant_settings
from benchctl.records.directory import RequestSets, RunDirectory
from benchctl.records.loaded import load_run
from benchctl.records.record import PlannedRun
from benchctl.sim.predict import StepTimes, emulated_config, predict_plan, predict_run
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
FAULTY = ", first_use_pause_s: 0.2, drift: 0.5, slow_first_steps: 6"
DRAFTING = ", num_speculative_tokens: 3, acceptance: [0.9, 0.7, 0.5], draft_cost: 0.1, backfill: prefill"
"""Neither of these two goes with a value model."""


def profile_of(arrival: str = CLOSED, options: str = ""):
    text = PROFILE.format(arrival=arrival, options=options)
    return parse_profile(text if MOCK in options or DRAFTING in options else text + GUIDED, "test")


def run(path, profile, variant="baseline", *, by=simulate_run):
    requests = prepare_requests(profile).requests
    planned = PlannedRun(index=0, run_id="run", block=0, position=0, variant=variant)
    directory = RunDirectory(path)
    by(RunContext(profile=profile, requests=RequestSets.single(requests)), planned, directory)
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


nightly = pytest.mark.nightly


@pytest.mark.parametrize(
    ("arrival", "options", "variant"),
    [
        pytest.param(CLOSED, "", "baseline", id="closed loop", marks=nightly),
        pytest.param(CLOSED, "", "guided", id="guided"),
        pytest.param(CAPPED, "", "baseline", id="open loop with a cap"),
        pytest.param("{kind: burst, launch_rate_limit: 30}", "", "baseline", id="launches limited", marks=nightly),
        pytest.param(
            "{kind: closed-loop, max_concurrency: 3, launch_rate_limit: 30}", "", "baseline", id="slots and limit"
        ),
        pytest.param(
            "{kind: poisson, request_rate: 90, launch_rate_limit: 30}",
            "",
            "baseline",
            id="held back",
            marks=nightly,
        ),
        pytest.param("{kind: burst}", PREEMPTING, "baseline", id="preemption and prefix cache"),
        pytest.param(CLOSED, CHUNKED, "baseline", id="several tokens in a chunk"),
        pytest.param(CLOSED, MOCK, "baseline", id="closing step", marks=nightly),
        pytest.param(CAPPED, FAULTY, "guided", id="planted faults"),
        pytest.param(CAPPED, DRAFTING, "baseline", id="speculation"),
        pytest.param(
            "{kind: burst}",
            DRAFTING + PREEMPTING,
            "baseline",
            id="speculation that preempts",
            marks=nightly,
        ),
        pytest.param(
            CLOSED,
            DRAFTING + ", tokens_per_chunk: 5",
            "baseline",
            id="speculation in larger chunks",
            marks=nightly,
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


def test_a_run_may_leave_its_steps_out(tmp_path):
    simulated, directory = run(tmp_path, profile_of(), by=partial(simulate_run, keep="requests"))
    assert not directory.step_log.exists()
    assert (simulated.record.state, simulated.record.warnings) == ("done", ())


def test_a_request_that_no_server_could_serve_fails_as_over_http_and_holds_nothing_up(tmp_path):
    profile = profile_of(options=", num_kv_blocks: 6")
    over_http, _ = run(tmp_path / "http", profile, by=measure_run)
    simulated, _ = run(tmp_path / "virtual", profile)
    failed = [request for request in simulated.requests if request.error is not None]
    assert 0 < len(failed) < len(simulated.requests)
    assert what_was_said(simulated.requests) == what_was_said(over_http.requests)
    assert simulated.record.state == over_http.record.state == "suspect"


def real_profile(arrival, engine=None, **workload):
    return profile_from_plain(
        {
            "name": "predicted",
            "engine": engine or {"kind": "vllm"},
            "model": "qwen2.5-7b",
            "workload": {
                "dataset": "synthetic", "input_len": 200, "output_len": 30, "num_prompts": 200, "arrival": arrival,
                **workload,
            },
            "variants": {"baseline": {}},
        },
        source="a test",
    )  # fmt: skip


def predicted(arrival, engine=None, *, model=None, prompt_tokens=None, **workload):
    """The prediction for an H100, or for the simulator's own times; perhaps of another model or other prompts."""
    profile = real_profile(arrival, engine, **workload)
    settings = variant_settings(profile, "baseline", {})
    requests = prepare_requests(profile).requests
    if prompt_tokens is not None:
        requests = [msgspec.structs.replace(request, prompt_tokens=prompt_tokens) for request in requests]
    settings = settings.model_copy(update={"model": model or settings.model})
    times = None if profile.engine.kind == "sim" else StepTimes(hardware="h100-sxm")
    return predict_run(settings, requests, profile.workload.arrival, times)


def test_little_s_law_holds_for_a_predicted_closed_loop_and_more_of_it_takes_longer_steps():
    few, many = (predicted({"kind": "closed-loop", "max_concurrency": limit}) for limit in (4, 64))
    assert few.in_server == pytest.approx(few.batch, rel=0.02)
    assert few.in_server * few.load_s == pytest.approx(200 * few.e2el_s, rel=1e-6)
    assert few.offered is None
    assert few.step_s < many.step_s
    assert few.load_s > many.load_s
    assert (few.largest_batch, many.largest_batch) == (4, 64)


def test_the_steady_state_of_an_offered_rate_agrees_with_its_simulation_also_where_it_is_beyond_the_largest():
    run = predicted({"kind": "poisson", "request_rate": 40}, num_prompts=2000)
    assert run.offered_rate == pytest.approx(40, rel=0.1)
    assert not run.offered.is_saturated
    assert run.offered.concurrency == pytest.approx(run.in_server, rel=0.15)
    engine = {"kind": "vllm", "options": {"max_num_seqs": 8}}
    run = predicted({"kind": "constant", "request_rate": 20_000}, engine, num_prompts=2000)
    assert run.offered.is_saturated
    assert run.load_s > 2 * 2000 / 20_000, "the load outlasts its arrivals"
    assert 2000 / run.load_s == pytest.approx(run.offered.max_requests_per_s, rel=0.15)


def config_with(options, model="llama-160m", hardware="rtx4090:82.6:1008:1"):
    """What is simulated in place of a server with these options, by default on a device of 1 GB."""
    profile = real_profile({"kind": "burst"}, {"kind": "vllm", "options": options})
    settings = variant_settings(profile, "baseline", {}).model_copy(update={"model": model})
    return emulated_config(settings, StepTimes(hardware=hardware))


def test_limits_of_the_engine_are_those_of_the_prediction_and_memory_is_that_of_the_device_less_a_draft_model():
    options = {"max_num_seqs": 32, "max_num_batched_tokens": 4096, "tensor_parallel_size": 2}
    config = config_with(options, "qwen2.5-7b", "h100-sxm")
    limits = (config.max_num_seqs, config.max_num_batched_tokens, config.hardware)
    assert limits == (32, 4096, "2 x h100-sxm:1978.8:6700")
    # 0.9 of 160 GB less 15.2 GB of weights, at 57,344 bytes a token
    assert config.num_kv_blocks * config.block_size == pytest.approx((0.9 * 160e9 - 15.2e9) / 57_344, rel=0.02)
    drafts = {"num_speculative_tokens": 3, "draft_model": "llama-68m"}
    for options, num_blocks in (
        # 0.9 GB less 162,417,408 parameters of two bytes, at 2 * 12 layers * 12 heads * 64 * 2 bytes a token
        ({}, int((900_000_000 - 324_834_816) / 36_864) // 16),
        # less 68,030,208 parameters too, and 2 layers more for each token
        (drafts, int((900_000_000 - 324_834_816 - 136_060_416) / 43_008) // 16),
        # Drafts without a model of known shape take no memory.
        ({"num_speculative_tokens": 3, "speculative_method": "ngram"}, 975),
        ({**drafts, "num_speculative_tokens": 0}, 975),
        ({**drafts, "draft_model": "nobody/knows"}, 975),
    ):
        assert config_with(options).num_kv_blocks == num_blocks, options


def test_prompts_are_predicted_with_the_tokens_that_were_counted_beforehand_and_a_model_needs_a_known_shape():
    arrival = {"kind": "closed-loop", "max_concurrency": 1}
    short, long = (predicted(arrival, prompt_tokens=length, num_prompts=4) for length in (100, 4000))
    assert short.ttft_s < long.ttft_s
    with pytest.raises(UsageError, match="nobody/knows"):
        predicted(arrival, model="nobody/knows")


def test_a_simulated_server_that_speculates_is_predicted_with_its_drafts_and_without_a_steady_state():
    arrival = {"kind": "poisson", "request_rate": 5}
    drafting = {"num_speculative_tokens": 3, "acceptance": 0.8, "draft_cost": 0.05}
    plain, drafted = (
        predicted(arrival, {"kind": "sim", "options": options}, num_prompts=40) for options in ({}, drafting)
    )
    assert drafted.num_steps < plain.num_steps
    assert drafted.e2el_s < plain.e2el_s
    assert (plain.offered is not None, drafted.offered) == (True, None)


def test_a_prediction_says_that_the_drafts_of_a_real_engine_are_not_in_it():
    options = {"num_speculative_tokens": 2, "speculative_method": "ngram"}
    for drafting, is_said in ((options, True), ({}, False)):
        profile = real_profile({"kind": "burst"}, {"kind": "vllm", "options": drafting}, num_prompts=4)
        plan = predict_plan(profile, prepare_requests(profile).sets, ["NVIDIA H100 80GB HBM3"])
        assert ("arms that speculate are predicted without their drafts" in plan.basis) == is_said
