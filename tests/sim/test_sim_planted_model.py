"""The simulator's own steps return the step-time model that priced them."""

import json
from pathlib import Path

import pytest
from support.cli import benchctl

from benchctl.steptime.model import StepTimeModel, read_model, write_model
from benchctl.steptime.work import Coefficient

PLANTED = {
    "compute": 1.45,
    "memory": 1.22,
    "all_reduce": 1.0,
    "layers": 38.0,
    "requests": 14.0,
    "steps": 150.0,
}


@pytest.mark.slow
def test_a_fit_to_simulated_steps_returns_the_planted_coefficients(tmp_path: Path) -> None:
    planted = tmp_path / "planted.json"
    write_model(
        planted,
        StepTimeModel(
            structure="overlap",
            coefficients=tuple(Coefficient(name=name, value=value) for name, value in PLANTED.items()),
            hardware="h100-sxm",
            tensor_parallel=(1,),
        ),
    )
    options = (
        "engine.options.cost_model=fitted",
        f"engine.options.step_time_model={planted}",
        "engine.options.noise=none",
    )
    settings = [word for option in options for word in ("--set", option)]
    for profile in ("steptime-w1", "steptime-w3"):
        simulated = benchctl(
            "simulate", "--profile", profile, "--engine", "sim", *settings, "--blocks", 1, "--quiet", cwd=tmp_path
        )
        assert simulated.returncode == 0, simulated.stderr
    sources = sorted((tmp_path / "results").glob("steptime-w*/latest"))
    fitted = benchctl("steptime", "fit", *sources, "-o", tmp_path / "m.json", "--json")
    assert fitted.returncode == 0, fitted.stderr
    assert json.loads(fitted.stdout)["held_out"][0]["whole"]["mape_frac"] < 1e-3
    for coefficient in read_model(tmp_path / "m.json").coefficients:
        if coefficient.is_identified:
            assert coefficient.value == pytest.approx(PLANTED[coefficient.name], rel=2e-3), coefficient.name
