"""The file of a step-time model: everything returns, damage is named, and it can be read by a person."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.step_time import MODELS, planted_run

from benchctl.errors import UsageError
from benchctl.steptime.fit import FitOptions, fit_model
from benchctl.steptime.model import (
    FORMAT,
    HeldOutError,
    StepTimeModel,
    model_text,
    read_model,
    write_model,
)


@pytest.fixture(scope="module")
def model() -> StepTimeModel:
    planted = {"compute": 1.5, "memory": 1.2, "all_reduce": 1.0, "layers": 40.0, "requests": 8.0, "steps": 90.0}
    runs = [planted_run(*deployment, planted, noise=0.02, num_steps=60) for deployment in MODELS[:2]]
    fitted = fit_model(runs, FitOptions(num_draws=10), fitted_on="2026-11-22")
    return replace(
        fitted,
        provenance=replace(
            fitted.provenance,
            held_out=(HeldOutError(by="run", num_groups=2, num_steps=120, mape_frac=0.03, bias_frac=-0.01),),
        ),
    )


def test_a_model_returns_from_its_file_unchanged_and_byte_for_byte(model: StepTimeModel, tmp_path: Path) -> None:
    write_model(tmp_path / "model.json", model)
    assert read_model(tmp_path / "model.json") == model
    assert model_text(read_model(tmp_path / "model.json")) == (tmp_path / "model.json").read_text(encoding="utf-8")


def test_the_file_states_where_the_model_comes_from(model: StepTimeModel) -> None:
    document = json.loads(model_text(model))
    assert document["format"] == FORMAT
    assert document["provenance"]["fitted_on"] == "2026-11-22"
    assert document["provenance"]["models"] == ["qwen2.5-7b", "qwen2.5-72b"]
    assert document["provenance"]["num_steps"] == 120
    assert document["provenance"]["held_out"][0]["mape_frac"] == 0.03
    assert [c["name"] for c in document["coefficients"]][:2] == ["compute", "memory"]
    lines = model_text(model).splitlines()
    assert sum(line.startswith("  [") and line.rstrip(",").endswith("]") for line in lines) == 10


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "something"}, "not a step-time model; name a file of 'benchctl steptime fit -o'"),
        ({"version": 2}, "version 2 of the format is unknown to this benchctl, which reads 1; fit the model again"),
        ({"hardware": 3}, r"damaged \(Expected `str`, got `int`.*fit the model again"),
        ({"colour": "blue"}, "key 'colour' is unknown; remove it"),
        ({"draws": [[1.0]]}, "a row of draws has not 6 values"),
    ],
    ids=["format", "version", "type", "key", "draws"],
)
def test_a_file_that_is_none_is_refused_with_the_remedy(
    model: StepTimeModel, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    path = tmp_path / "model.json"
    path.write_text(json.dumps(json.loads(model_text(model)) | change), encoding="utf-8")
    with pytest.raises(UsageError, match=message):
        read_model(path)


def test_a_missing_file_and_one_that_is_not_json_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot be read.*steptime fit -o FILE"):
        read_model(tmp_path / "none.json")
    (tmp_path / "text.json").write_text("hello", encoding="utf-8")
    with pytest.raises(UsageError, match=r"text.json: cannot be read as JSON"):
        read_model(tmp_path / "text.json")


def test_a_draw_is_the_model_of_another_set_of_runs(model: StepTimeModel) -> None:
    drawn = model.with_draw(3)
    assert tuple(c.value for c in drawn.coefficients) == model.draws[3]
    assert model.with_draw(13) == drawn
    assert replace(model, draws=()).with_draw(3) == replace(model, draws=())
