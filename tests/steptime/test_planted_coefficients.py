"""Steps of a simulator that planted coefficients drive give these coefficients back."""

import json
from pathlib import Path

import pytest
from support.cli import benchctl

from benchctl.steptime.diagnose import RunToAdd
from benchctl.steptime.fit import FitOptions, fit_model
from benchctl.steptime.model import read_model
from benchmarks.steptime.active_learning import PLANTED, Engine, active, learn, on_deployments

EXACT = FitOptions(ridge=1e-10, num_draws=5)


def test_a_fit_to_the_simulators_steps_returns_every_planted_coefficient(tmp_path: Path) -> None:
    engine = Engine(tmp_path, 0.0)
    # No prompt is divided over steps: a log does not say which of several prompts a part belongs to.
    sizes = [(8192, 1, 1), (512, 64, 1), (128, 64, 32), (1024, 64, 4), (128, 1, 32)]
    runs = [
        RunToAdd(prompt_tokens=prompt, output_tokens=output, concurrency=concurrency, reason="a test")
        for prompt, output, concurrency in sizes
    ]
    observed = [engine.measure(each, seed=0)[0] for run in runs for each in on_deployments(run)]
    assert fit_model(observed, EXACT).values == pytest.approx(PLANTED, rel=1e-4)


def test_the_loop_of_diagnosis_and_runs_comes_nearer_to_the_planted_coefficients(tmp_path: Path) -> None:
    rounds = learn(Engine(tmp_path, 0.01), 4, active(EXACT), 3, EXACT)
    assert rounds[-1].worst < 0.1
    assert rounds[-1].worst < 0.3 * rounds[0].worst
    assert rounds[-1].mape < 0.005
    assert [state.num_runs for state in rounds] == sorted({state.num_runs for state in rounds})


@pytest.mark.slow
def test_simulated_profiles_give_them_back_as_well(tmp_path: Path) -> None:
    """One model on one device: the time of layers and that of a step are only known as their sum."""
    planted = Engine(tmp_path, 0.0).truth
    document = json.loads((tmp_path / "planted.json").read_text())
    (tmp_path / "planted.json").write_text(json.dumps({**document, "tensor_parallel": [1]}))
    options = ["cost_model=fitted", "step_time_model=planted.json"]
    sets = [word for option in options for word in ("--set", f"engine.options.{option}")]
    for name, fewer in (("w1", 12), ("w2", 6), ("w3", 128)):
        fewer_prompts = ["--set", f"workload.num_prompts={fewer}"]
        result = benchctl(
            "simulate", "--profile", f"steptime-{name}", *sets, *fewer_prompts, "--quiet", cwd=tmp_path
        )
        assert result.returncode == 0, result.stderr
    sources = [f"results/steptime-{name}/latest" for name in ("w1", "w2", "w3")]
    fitted = benchctl("steptime", "fit", *sources, "-o", "model.json", cwd=tmp_path)
    assert fitted.returncode == 0, fitted.stderr
    values = read_model(tmp_path / "model.json").values
    truth = planted.values
    for name in ("compute", "memory", "requests"):
        assert values[name] == pytest.approx(truth[name], rel=0.01)
    per_step = 28 * values["layers"] + values["steps"]
    assert per_step == pytest.approx(28 * truth["layers"] + truth["steps"], rel=0.01)
