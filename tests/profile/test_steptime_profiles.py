"""The calibration workloads as profiles: they measure what they claim."""

from pathlib import Path

import pytest
from support.cli import benchctl

from benchctl.profile.load import load_profile
from benchctl.profile.planning import arms, plan_runs, variant_settings
from benchctl.records.files import read_jsonl
from benchctl.records.schema import StepRecord
from benchctl.workload.prepare import prepare_requests

NAMES = ("steptime-w1", "steptime-w2", "steptime-w3", "steptime-w4", "steptime-w5", "steptime-v1")


def steps_of(profile: str, cwd: Path, *options: str) -> dict[str, list[StepRecord]]:
    """Steps of each run's load by its identifier."""
    cwd.mkdir(exist_ok=True)
    result = benchctl("run", "--profile", profile, *options, cwd=cwd)
    # 4: on a busy machine times of the client are suspect, while the steps that are read here are exact
    assert result.returncode in {0, 4}, result.stderr
    logs = sorted(cwd.glob("results/*/*/runs/*/steps.jsonl"))
    return {log.parent.name: [step for step in read_jsonl(log, StepRecord) if not step.is_warmup] for log in logs}


@pytest.mark.parametrize("name", NAMES)
def test_no_prompt_begins_like_another_and_the_prefix_cache_is_off(name: str) -> None:
    profile = load_profile(name)
    requests = prepare_requests(profile).requests
    first_words = [request.prompt.split()[0] for request in requests if request.prompt]
    assert len(set(first_words)) == len(requests) == profile.workload.num_prompts
    assert all(request.ignore_eos for request in requests)
    assert variant_settings(profile, "baseline", {}).server.model_dump()["enable_prefix_caching"] is False
    assert not profile.workload.allow_prefix_cache_hits


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("engine", ["sim", "vllm", "sglang", "llamacpp-cpu", "transformers-cpu"])
def test_every_engine_can_run_them(name: str, engine: str) -> None:
    if name == "steptime-w5" and engine not in {"vllm", "sglang"}:
        pytest.skip("spreads a model over devices")
    profile = load_profile(name, engine=engine)
    assert plan_runs(profile).runs


def test_w1_has_steps_of_one_prompt_and_w2_steps_of_one_row(tmp_path: Path) -> None:
    (prompts,) = steps_of("steptime-w1", tmp_path / "w1", "--set", "workload.num_prompts=6").values()
    assert [step.num_prefill_tokens for step in prompts] == [128, 512, 1024, 2048, 4096, 8192]
    assert {step.num_decode_tokens or 0 for step in prompts} == {0}
    (rows,) = steps_of("steptime-w2", tmp_path / "w2", "--set", "workload.num_prompts=2").values()
    decoding = [step for step in rows if step.phase == "decode"]
    assert {step.num_seqs for step in decoding} == {1}
    assert [step.context_tokens for step in decoding] == [*range(129, 640), *range(513, 1024)]


@pytest.mark.slow
def test_w3_fills_the_batch_of_every_cell(tmp_path: Path) -> None:
    steps_by_run = steps_of("steptime-w3", tmp_path, "--set", "workload.output_len=32")
    batches = sorted(max(step.num_seqs for step in steps) for steps in steps_by_run.values())
    assert batches == [1, 8, 32, 64, 128]
    for steps in steps_by_run.values():
        largest = max(step.num_seqs for step in steps)
        full = [step for step in steps if step.phase == "decode" and step.num_seqs == largest]
        assert len(full) > 0.5 * len(steps)


def test_w4_mixes_both_phases_in_one_step(tmp_path: Path) -> None:
    (steps,) = steps_of("steptime-w4", tmp_path, "--set", "workload.num_prompts=64").values()
    mixed = [step for step in steps if step.phase == "mixed"]
    assert len(mixed) >= 10
    assert max(step.num_prefill_tokens or 0 for step in mixed) >= 1024


def test_w5_runs_on_the_simulator_with_a_model_of_several_devices() -> None:
    fitted = ["engine.options.cost_model=fitted", "engine.options.step_time_model=model.json"]
    profile = load_profile("steptime-w5", engine="sim", overrides=fitted)
    sizes = {variant_settings(profile, *arm).server.model_dump()["tensor_parallel_size"] for arm in arms(profile)}
    assert sizes == {1, 2, 4}
