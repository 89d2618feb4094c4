"""Prediction intervals of simulated runs, from the bootstrap draws of a fitted step-time model."""

import json
from dataclasses import replace

import pytest
from support.cli import WITHOUT_PICTURES, benchctl, only_result

from benchctl.errors import UsageError
from benchctl.measure.capacity import predict_intervals
from benchctl.profile.load import parse_profile
from benchctl.steptime.model import StepTimeModel, write_model
from benchctl.steptime.work import Coefficient
from benchctl.workload.prepare import prepare_requests

FITTED = (1.5, 1.25, 1.0, 30.0, 20.0, 150.0)
NAMES = ("compute", "memory", "all_reduce", "layers", "requests", "steps")
MODEL = StepTimeModel(
    structure="overlap",
    coefficients=tuple(Coefficient(name=name, value=value) for name, value in zip(NAMES, FITTED, strict=True)),
    hardware="h100-sxm",
    tensor_parallel=(1,),
    draws=tuple(tuple((0.9 + 0.01 * i) * value for value in FITTED) for i in range(21)),
)
PROFILE = """\
name: predicted
seed: 3
blocks: 1
engine: {{kind: sim, options: {{noise: none, cost_model: {costs}}}}}
model: qwen2.5-7b
workload:
  dataset: generated
  num_prompts: 6
  output_len: 20
  arrival: {{kind: closed-loop, max_concurrency: 3}}
variants:
  baseline: {{}}
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "model.json"
    write_model(path, MODEL)
    return path


def profile_of(costs):
    return parse_profile(PROFILE.format(costs=costs), "test")


def predicted(file, num_draws):
    profile = profile_of(f"fitted, step_time_model: {file}")
    (arm,) = predict_intervals(profile, prepare_requests(profile).requests, num_draws)
    return arm


def test_an_interval_holds_the_metrics_of_the_draws_and_the_fit_lies_inside(file):
    arm = predicted(file, 100)
    assert (arm.num_draws, arm.level) == (21, 0.9)
    step = arm.metrics["step_ms"]
    assert step.low == pytest.approx(0.91 * step.value, rel=1e-4)
    assert step.high == pytest.approx(1.09 * step.value, rel=1e-4)
    assert arm.metrics["output_throughput"].low < arm.metrics["output_throughput"].value
    tokens = arm.metrics["output_tokens"]
    assert tokens.low == tokens.value == tokens.high


def test_fewer_draws_than_the_model_has_may_be_taken(file):
    assert predicted(file, 4).num_draws == 4


def test_a_cost_model_without_uncertainty_is_an_error_of_usage(file):
    profile = profile_of("roofline")
    with pytest.raises(UsageError, match="has no uncertainty to draw from"):
        predict_intervals(profile, prepare_requests(profile).requests, 5)
    write_model(file, replace(MODEL, draws=()))
    with pytest.raises(UsageError, match="has no bootstrap draws"):
        predicted(file, 5)


def test_simulate_prints_the_intervals_and_keeps_them_in_the_directory(file, tmp_path):
    path = tmp_path / "predicted.yaml"
    path.write_text(PROFILE.format(costs=f"fitted, step_time_model: {file}"))
    done = benchctl("simulate", "--profile", path, "--draws", 5, "--quiet", cwd=tmp_path, **WITHOUT_PICTURES)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Predicted, with the interval of 90% of 5 draws of the fit" in done.stdout
    (arm,) = json.loads((only_result(tmp_path) / "predictions.json").read_text())["predictions"]
    assert arm["arm"] == "baseline"
    assert arm["metrics"]["wall_s"]["low"] < arm["metrics"]["wall_s"]["high"]
    assert benchctl("verify", only_result(tmp_path), cwd=tmp_path).returncode == 0
