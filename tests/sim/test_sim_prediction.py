"""Runs of real engines predicted by simulating their loads."""

import msgspec
import pytest

from benchctl.errors import UsageError
from benchctl.profile.load import profile_from_plain
from benchctl.profile.planning import variant_settings
from benchctl.sim.predict import StepTimes, emulated_config, predict_plan, predict_run
from benchctl.workload.prepare import prepare_requests

H100 = StepTimes(hardware="h100-sxm")


def profile_of(arrival, engine=None, **workload):
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


def predicted(arrival, times=H100, engine=None, **workload):
    profile = profile_of(arrival, engine, **workload)
    requests = prepare_requests(profile).requests
    return predict_run(variant_settings(profile, "baseline", {}), requests, profile.workload.arrival, times)


def test_little_s_law_holds_for_the_predicted_load():
    run = predicted({"kind": "closed-loop", "max_concurrency": 16})
    assert run.in_server == pytest.approx(run.batch, rel=0.02)
    assert run.in_server * run.load_s == pytest.approx(200 * run.e2el_s, rel=1e-6)


def test_a_closed_loop_offers_no_rate_and_more_of_it_takes_longer_steps():
    few, many = (predicted({"kind": "closed-loop", "max_concurrency": limit}) for limit in (4, 64))
    assert few.offered is None
    assert few.step_s < many.step_s
    assert few.load_s > many.load_s
    assert (few.largest_batch, many.largest_batch) == (4, 64)


def test_the_steady_state_of_an_offered_rate_agrees_with_its_simulation():
    run = predicted({"kind": "poisson", "request_rate": 40}, num_prompts=2000)
    assert run.offered_rate == pytest.approx(40, rel=0.1)
    assert not run.offered.is_saturated
    assert run.offered.concurrency == pytest.approx(run.in_server, rel=0.15)


def test_a_rate_beyond_the_largest_is_saturated_and_the_load_outlasts_its_arrivals():
    arrival = {"kind": "constant", "request_rate": 20_000}
    run = predicted(arrival, engine={"kind": "vllm", "options": {"max_num_seqs": 8}}, num_prompts=2000)
    assert run.offered.is_saturated
    assert run.load_s > 2 * 2000 / 20_000
    assert 2000 / run.load_s == pytest.approx(run.offered.max_requests_per_s, rel=0.15)


def test_limits_of_the_engine_are_those_of_the_prediction_and_memory_is_that_of_the_device():
    options = {"max_num_seqs": 32, "max_num_batched_tokens": 4096, "tensor_parallel_size": 2}
    profile = profile_of({"kind": "burst"}, engine={"kind": "vllm", "options": options})
    config = emulated_config(variant_settings(profile, "baseline", {}), H100)
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (32, 4096)
    assert config.hardware == "2 x h100-sxm:1978.8:6700"
    # 0.9 of 160 GB less 15.2 GB of weights, at 57,344 bytes a token
    assert config.num_kv_blocks * config.block_size == pytest.approx((0.9 * 160e9 - 15.2e9) / 57_344, rel=0.02)


DRAFTS = {"num_speculative_tokens": 3, "draft_model": "llama-68m"}


def blocks_with(options, model="llama-160m", hardware="rtx4090:82.6:1008:1"):
    """Blocks of 16 tokens that a device of 1 GB holds for a server with these options."""
    profile = profile_of({"kind": "burst"}, {"kind": "vllm", "options": options})
    settings = variant_settings(profile, "baseline", {}).model_copy(update={"model": model})
    return emulated_config(settings, StepTimes(hardware=hardware)).num_kv_blocks


def test_a_draft_model_leaves_fewer_blocks_by_its_weights_and_its_own_keys_and_values():
    # 0.9 GB less 162,417,408 parameters of two bytes, at 2 * 12 layers * 12 heads * 64 * 2 bytes a token
    assert blocks_with({}) == int((900_000_000 - 324_834_816) / 36_864) // 16 == 975
    # less 68,030,208 parameters too, and 2 layers more for each token
    assert blocks_with(DRAFTS) == int((900_000_000 - 324_834_816 - 136_060_416) / 43_008) // 16 == 638
    # Drafts without a model of known shape take no memory.
    of_text = {"num_speculative_tokens": 3, "speculative_method": "ngram"}
    for options in (of_text, {**DRAFTS, "num_speculative_tokens": 0}, {**DRAFTS, "draft_model": "nobody/knows"}):
        assert blocks_with(options) == 975


def counted(requests, length):
    return [msgspec.structs.replace(request, prompt_tokens=length) for request in requests]


def test_prompts_are_predicted_with_the_tokens_that_were_counted_beforehand():
    profile = profile_of({"kind": "closed-loop", "max_concurrency": 1}, num_prompts=4)
    requests, settings = prepare_requests(profile).requests, variant_settings(profile, "baseline", {})
    short, long = (
        predict_run(settings, counted(requests, length), profile.workload.arrival, H100) for length in (100, 4000)
    )
    assert short.ttft_s < long.ttft_s


def test_a_model_without_a_known_shape_is_refused():
    profile = profile_of({"kind": "burst"}, num_prompts=2)
    settings = variant_settings(profile, "baseline", {}).model_copy(update={"model": "nobody/knows"})
    with pytest.raises(UsageError, match="nobody/knows"):
        predict_run(settings, prepare_requests(profile).requests, profile.workload.arrival, H100)


def test_a_simulated_server_that_speculates_is_predicted_with_its_drafts_and_without_a_steady_state():
    arrival = {"kind": "poisson", "request_rate": 5}
    drafting = {"num_speculative_tokens": 3, "acceptance": 0.8, "draft_cost": 0.05}
    plain, drafted = (
        predicted(arrival, None, {"kind": "sim", "options": options}, num_prompts=40) for options in ({}, drafting)
    )
    assert drafted.num_steps < plain.num_steps
    assert drafted.e2el_s < plain.e2el_s
    assert plain.offered is not None
    assert drafted.offered is None


def test_a_prediction_says_that_the_drafts_of_a_real_engine_are_not_in_it():
    options = {"num_speculative_tokens": 2, "speculative_method": "ngram"}
    for drafting, is_said in ((options, True), ({}, False)):
        profile = profile_of({"kind": "burst"}, {"kind": "vllm", "options": drafting}, num_prompts=4)
        plan = predict_plan(profile, prepare_requests(profile).requests, ["NVIDIA H100 80GB HBM3"])
        assert ("arms that speculate are predicted without their drafts" in plan.basis) == is_said
