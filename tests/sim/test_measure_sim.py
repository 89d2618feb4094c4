"""Runs on the simulator: the whole way from a profile to records that agree with each other."""

import pytest
from support.steps import records_of

from benchctl.measure.run import RunContext, measure_run
from benchctl.profile.load import parse_profile
from benchctl.records.directory import RunDirectory
from benchctl.records.loaded import load_run
from benchctl.records.record import Message, PlannedRun, PreparedRequest

PROFILE = """\
name: measured
seed: 5
engine: {kind: sim, options: {time_scale: 50.0, noise: none}}
model: qwen2.5-7b
hardware: h100-sxm
workload:
  dataset: generated
  num_prompts: 5
  arrival: {kind: closed-loop, max_concurrency: 3}
  num_warmups: 1
variants:
  baseline: {}
  guided:
    server: {value_model: qwen2.5-1.5b, overlap_schedule: false}
    sampling: {top_k: 5, min_p: 0.01}
    guidance: {mode: centered_exp, value_scale: 0.0}
"""


def measure(tmp_path, name, variant, *, output_tokens=12):
    requests = tuple(
        PreparedRequest(
            request_id=f"r{i}",
            index=i,
            arrival_ns=0,
            messages=(Message(role="user", content=f"What is {i} plus {i}? Explain each step."),),
            prompt_tokens=20,
            max_tokens=output_tokens + i,
            ignore_eos=True,
            n=2,
            seed=100 + i,
            source=f"generated:{i}",
        )
        for i in range(5)
    )
    planned = PlannedRun(index=0, run_id=name, block=0, position=0, variant=variant)
    directory = RunDirectory(tmp_path / name)
    context = RunContext(profile=parse_profile(PROFILE, "test"), requests=requests)
    measure_run(context, planned, directory)
    return load_run(directory)


@pytest.mark.parametrize("variant", ["baseline", "guided"])
def test_a_simulated_run_is_done_and_its_three_token_counts_agree(tmp_path, variant):
    loaded = measure(tmp_path, "run", variant)
    run = loaded.record
    assert run.state == "done", run
    assert (run.clock, run.time_scale) == ("virtual", 50.0)
    assert "gpu-sampler-missing" not in {warning.code for warning in run.warnings}
    measured = [record for record in loaded.requests if not record.is_warmup]
    steps = [step for step in records_of(loaded) if not step.is_warmup]
    num_expected = sum(2 * (12 + i) for i in range(5))
    assert sum(record.completion_tokens for record in measured) == num_expected
    assert sum(choice.output_tokens for record in measured for choice in record.choices) == num_expected
    assert sum(step.output_tokens for step in steps) == num_expected
    assert run.effective_config["server.value_model"] == ("qwen2.5-1.5b" if variant == "guided" else None)
    assert [record.error for record in loaded.requests] == [None] * 6


def test_the_warm_up_pays_for_the_value_model_that_a_guided_server_loads_lazily(tmp_path):
    loaded = measure(tmp_path, "run", "guided")
    loads = [step.is_warmup for step in records_of(loaded) if "value_model_load" in step.sections_ns]
    assert loads == [True]


def test_two_runs_of_the_same_plan_have_the_same_steps_to_the_byte(tmp_path):
    for name in ("one", "two"):
        measure(tmp_path, name, "guided")
    assert (tmp_path / "one" / "steps.jsonl").read_bytes() == (tmp_path / "two" / "steps.jsonl").read_bytes()
