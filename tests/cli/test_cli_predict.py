"""``benchctl run --dry-run``: durations, batch and saturation predicted, and the origin of the step times."""

import re
from pathlib import Path

import pytest
from support.cli import benchctl

from benchctl.steptime.model import HeldOutError, Provenance, StepTimeModel, write_model
from benchctl.steptime.work import Coefficient

MODEL = StepTimeModel(
    structure="overlap",
    coefficients=(
        Coefficient(name="compute", value=1.5),
        Coefficient(name="memory", value=1.25),
        Coefficient(name="all_reduce", value=1.0),
        Coefficient(name="layers", value=30.0, unit="us"),
        Coefficient(name="requests", value=20.0, unit="us"),
        Coefficient(name="steps", value=5000.0, unit="us"),
    ),
    hardware="h100-sxm",
    tensor_parallel=(1,),
    provenance=Provenance(
        runs=("a", "b", "c"),
        num_steps=1234,
        held_out=(HeldOutError(by="run", num_groups=3, num_steps=1234, mape_frac=0.034, bias_frac=-0.012),),
    ),
)
PROFILE = """
engine: {engine}
model: qwen2.5-7b
{more}
blocks: 2
workload:
  dataset: synthetic
  input_len: 200
  output_len: 20
  num_prompts: 60
  arrival: {arrival}
variants: {{baseline: {{}}, other: {{sampling: {{temperature: 0}}}}}}
allowed_differences: [sampling.temperature]
"""
CLOSED = "{kind: closed-loop, max_concurrency: 4}"


@pytest.fixture(name="model")
def _model(tmp_path: Path) -> Path:
    write_model(tmp_path / "h100.json", MODEL)
    return tmp_path / "h100.json"


def planned(tmp_path: Path, *options: object, engine: str = "vllm", arrival: str = CLOSED, more: str = "") -> str:
    """What a dry run prints on a machine without engines and without earlier runs."""
    profile = tmp_path / "plan.yaml"
    profile.write_text(PROFILE.format(engine=engine, arrival=arrival, more=more))
    nowhere = {"BENCHCTL_ENGINES_DIR": str(tmp_path / "engines"), "BENCHCTL_DURATIONS_DIR": str(tmp_path / "none")}
    command = ("run", "--profile", profile, "--dry-run", *options)
    done = benchctl(*command, cwd=tmp_path, COLUMNS="200", **nowhere)
    assert done.returncode == 0, done.stderr
    assert ("not to be measured on this machine" in done.stderr) == (engine != "sim")
    return done.stdout


def estimated_s(said: str) -> float:
    (seconds,) = re.findall(r"estimated duration(?: of the loads)? (\d+) s", said)
    return float(seconds)


def test_a_fitted_model_that_is_named_predicts_and_says_how_far_it_has_been_off(tmp_path, model):
    said = planned(tmp_path, "--step-time-model", model)
    assert f"step times are those of {model}, fitted to 1,234 steps of 3 runs" in said
    assert "where whole parts were left out of the fit (run) it was 3.4% off, -1.2% on average" in said
    assert "4 server starts come on top, unmeasured here" in said
    assert "load: 4.000 rows in a batch on average, 4 at most; step 1" in said
    # 60 requests of 20 tokens, 4 at a time, make some 300 steps of 12 ms; four runs, and 3 s around them
    assert 4 * 300 * 0.011 + 3 < estimated_s(said) < 4 * 300 * 0.013 + 3


def test_the_profile_names_a_model_as_well(tmp_path, model):
    said = planned(tmp_path, more=f"step_time_model: {model}")
    assert f"step times are those of {model}" in said


def test_a_device_may_be_stated_by_its_driver_s_name(tmp_path, model):
    said = planned(tmp_path, "--step-time-model", model, more="hardware: NVIDIA H100 80GB HBM3")
    assert f"step times are those of {model}" in said


def test_without_a_model_the_roofline_of_the_stated_hardware_predicts_and_is_shorter(tmp_path, model):
    said = planned(tmp_path, more="hardware: h100-sxm")
    assert "step times are the roofline of h100-sxm, below which no step can be" in said
    assert estimated_s(said) < estimated_s(planned(tmp_path, "--step-time-model", model))


def test_a_machine_without_gpu_and_a_profile_without_hardware_have_no_step_times(tmp_path):
    said = planned(tmp_path)
    assert "duration unknown" in said
    assert "step times unknown: this machine has no GPU and the profile states no hardware" in said


def test_an_offered_rate_beyond_what_the_server_completes_is_saturation(tmp_path, model):
    few, many = (
        planned(tmp_path, "--step-time-model", model, arrival=f"{{kind: poisson, request_rate: {rate}}}")
        for rate in (2, 2000)
    )
    assert re.search(r"load: \d\.\d+ requests/s offered, \d\.\d+% of the \d+\.?\d* that the server completes", few)
    assert "in the server on average" in few
    assert "load: saturated: " in many
    assert "so the queue grows while the load lasts" in many


def test_sequences_beyond_the_rows_of_the_batch_wait(tmp_path, model):
    limited = "{kind: vllm, options: {max_num_seqs: 2}}"
    said = planned(tmp_path, "--step-time-model", model, engine=limited)
    assert "sequences in the server, so that some wait for a row" in said
    assert "2 at most" in said


def test_the_simulator_is_predicted_by_itself(tmp_path):
    said = planned(tmp_path, engine="sim")
    assert "step times are those of the simulator without its noise" in said
    assert "server start" not in said


@pytest.mark.parametrize(
    ("more", "engine"), [("hardware: a100-sxm", "vllm"), ("", "{kind: sim, options: {hardware: a100-sxm}}")]
)
def test_a_model_of_another_hardware_is_refused_with_the_remedy(tmp_path, model, more, engine):
    profile = tmp_path / "plan.yaml"
    profile.write_text(PROFILE.format(engine=engine, arrival=CLOSED, more=more))
    done = benchctl("run", "--profile", profile, "--dry-run", "--step-time-model", model, cwd=tmp_path)
    assert done.returncode == 2
    assert f"{model}: a step-time model of h100-sxm, and this experiment runs on a100-sxm" in done.stderr
    assert "benchctl steptime calibrate" in done.stderr


def test_a_model_predicts_a_plan_and_changes_nothing_that_is_measured(tmp_path, model):
    done = benchctl("run", "--profile", "ci-smoke", "--step-time-model", model, cwd=tmp_path)
    assert done.returncode == 2
    assert "add --dry-run" in done.stderr
