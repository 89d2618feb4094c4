"""The calibration workloads as profiles: they measure what they claim."""

import pytest
from support.cli import benchctl

from benchctl.profile.load import load_profile
from benchctl.profile.planning import arms, plan_runs, variant_settings
from benchctl.records.files import read_jsonl
from benchctl.records.schema import StepRecord
from benchctl.workload.prepare import prepare_requests

NAMES = ("steptime-w1", "steptime-w2", "steptime-w3", "steptime-w4", "steptime-w5", "steptime-v1")


def steps_of(profile, cwd, *options):
    """Steps of each run."""
    sets = [word for option in options for word in ("--set", option)]
    result = benchctl("simulate", "--profile", profile, *sets, "--quiet", cwd=cwd)
    assert result.returncode == 0, result.stderr
    logs = sorted(cwd.glob(f"results/{profile}/2*/runs/*/steps.jsonl"))
    return [[step for step in read_jsonl(log, StepRecord) if not step.is_warmup] for log in logs]


@pytest.mark.parametrize("name", NAMES)
def test_no_prompt_begins_like_another_and_the_prefix_cache_is_off(name):
    profile = load_profile(name)
    requests = prepare_requests(profile).requests
    first_words = [request.prompt.split()[0] for request in requests if request.prompt]
    assert len(set(first_words)) == len(requests) == profile.workload.num_prompts
    assert all(request.ignore_eos for request in requests)
    assert variant_settings(profile, "baseline", {}).server.model_dump()["enable_prefix_caching"] is False
    assert not profile.workload.allow_prefix_cache_hits


@pytest.mark.parametrize("engine", ["sim", "vllm", "sglang", "llamacpp-cpu", "transformers-cpu"])
def test_every_engine_can_run_them(engine):
    spread = {"steptime-w5"} - ({"steptime-w5"} if engine in {"vllm", "sglang"} else set())  # over devices
    for name in set(NAMES) - spread:
        assert plan_runs(load_profile(name, engine=engine)).runs


def test_w1_has_steps_of_one_prompt_and_w2_steps_of_one_row(tmp_path):
    (prompts,) = steps_of("steptime-w1", tmp_path, "workload.num_prompts=6")
    assert [step.num_prefill_tokens for step in prompts] == [128, 512, 1024, 2048, 4096, 8192]
    assert {step.num_decode_tokens or 0 for step in prompts} == {0}
    (rows,) = steps_of("steptime-w2", tmp_path, "workload.num_prompts=2")
    decoding = [step for step in rows if step.phase == "decode"]
    assert {step.num_seqs for step in decoding} == {1}
    assert [step.context_tokens for step in decoding] == [*range(129, 640), *range(513, 1024)]


def test_w3_fills_the_batch_of_every_cell_and_w4_mixes_both_phases_in_one_step(tmp_path):
    batches = []
    for steps in steps_of("steptime-w3", tmp_path, "workload.output_len=32"):
        batches.append(max(step.num_seqs for step in steps))
        full = [step for step in steps if step.phase == "decode" and step.num_seqs == batches[-1]]
        assert len(full) > 0.5 * len(steps)
    assert sorted(batches) == [1, 8, 32, 64, 128]
    (steps,) = steps_of("steptime-w4", tmp_path, "workload.num_prompts=64")
    mixed = [step.num_prefill_tokens for step in steps if step.phase == "mixed"]
    assert (len(mixed) >= 10, max(mixed) >= 1024) == (True, True)


def test_w5_runs_on_the_simulator_with_a_model_of_several_devices():
    fitted = ["engine.options.cost_model=fitted", "engine.options.step_time_model=model.json"]
    profile = load_profile("steptime-w5", engine="sim", overrides=fitted)
    sizes = {variant_settings(profile, *arm).server.model_dump()["tensor_parallel_size"] for arm in arms(profile)}
    assert sizes == {1, 2, 4}
