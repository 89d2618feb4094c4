"""The file of a step-time model: everything returns, measured peaks too, and damage is named."""

import json
import platform
from dataclasses import replace

import pytest
from support.peaks import cpu_peaks, gpu_peaks
from support.step_time import MODELS, names_of, planted_run, write_table
from typer.testing import CliRunner

from benchctl.cli.app import app
from benchctl.errors import UsageError
from benchctl.records.peaks import PEAKS, hardware_of
from benchctl.steptime.evaluate import judge
from benchctl.steptime.fit import FitOptions, fit_model
from benchctl.steptime.model import (
    FORMAT,
    HeldOutError,
    model_text,
    read_model,
    write_model,
)


@pytest.fixture(scope="module")
def model():
    planted = {"compute": 1.5, "memory": 1.2, "all_reduce": 1.0, "layers": 40.0, "requests": 8.0, "steps": 90.0}
    runs = [planted_run(*deployment, planted, noise=0.02, num_steps=60) for deployment in MODELS[:2]]
    fitted = fit_model(runs, FitOptions(num_draws=10), fitted_on="2026-11-22")
    held_out = HeldOutError(by="run", num_groups=2, num_steps=120, mape_frac=0.03, bias_frac=-0.01)
    return replace(fitted, provenance=replace(fitted.provenance, held_out=(held_out,)))


def test_a_model_returns_from_its_file_unchanged_and_byte_for_byte(model, tmp_path):
    write_model(tmp_path / "model.json", model)
    assert read_model(tmp_path / "model.json") == model
    assert (tmp_path / "model.json").read_text(encoding="utf-8") == model_text(model)


def test_the_file_states_where_the_model_comes_from(model):
    document = json.loads(model_text(model))
    provenance = document["provenance"]
    assert (document["format"], provenance["fitted_on"], provenance["num_steps"]) == (FORMAT, "2026-11-22", 120)
    assert provenance["models"] == ["qwen2.5-7b", "qwen2.5-72b"]
    assert provenance["held_out"][0]["mape_frac"] == 0.03
    assert [coefficient["name"] for coefficient in document["coefficients"]][:2] == ["compute", "memory"]
    rows = [line for line in model_text(model).splitlines() if line.startswith("  [") and len(line) > 3]
    assert len(rows) == 10  # of draws


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
def test_a_file_that_is_none_is_refused_with_the_remedy(model, tmp_path, change, message):
    with pytest.raises(UsageError, match=r"cannot be read.*steptime fit -o FILE"):
        read_model(tmp_path / "model.json")
    (tmp_path / "model.json").write_text(json.dumps(json.loads(model_text(model)) | change))
    with pytest.raises(UsageError, match=message):
        read_model(tmp_path / "model.json")


def test_a_draw_is_the_model_of_another_set_of_runs(model):
    drawn = model.with_draw(3)
    assert tuple(coefficient.value for coefficient in drawn.coefficients) == model.draws[3]
    assert model.with_draw(13) == drawn
    assert replace(model, draws=()).with_draw(3) == replace(model, draws=())


MEASURED = hardware_of(gpu_peaks())
PLANTED = dict.fromkeys(names_of("overlap"), 1.3)


def test_a_model_keeps_its_measured_peaks_in_its_file_and_for_later_steps_of_the_device(tmp_path):
    run = planted_run("qwen2.5-7b", 1, PLANTED, hardware=MEASURED.name)
    write_model(tmp_path / "m.json", fit_model([run]))
    model = read_model(tmp_path / "m.json")
    assert model.hardware == MEASURED.name
    assert model.predict_us(run.work, run.deployment) == pytest.approx(run.duration_us, rel=1e-3)
    later = hardware_of(gpu_peaks(bfloat16=700e12, measured_at="2027-01-01T00:00:00Z"))
    again = replace(run, deployment=replace(run.deployment, hardware=later))
    assert judge(model, [again]).whole.mape_frac < 1e-3
    with pytest.raises(UsageError, match="the deployment of a100-sxm"):
        judge(model, [planted_run("qwen2.5-7b", 1, PLANTED, hardware="a100-sxm")])


def test_runs_with_several_peaks_of_one_device_are_not_fitted_together():
    runs = [planted_run("qwen2.5-7b", 1, PLANTED, hardware=name) for name in ("h100-sxm", MEASURED.name)]
    with pytest.raises(UsageError, match=r"several peaks of one device.*name one with --hardware"):
        fit_model(runs)


def test_commands_take_measured_peaks_by_their_word(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(PEAKS.variable, str(tmp_path / "peaks"))
    PEAKS.add(cpu_peaks(host=platform.node()))
    cpu = hardware_of(cpu_peaks())
    run = planted_run("qwen2.5-0.5b", 1, PLANTED, hardware=cpu.name)
    table = write_table(tmp_path / "steps.csv", run, hardware="device")
    fitted = tmp_path / "m.json"
    call = CliRunner().invoke(app, ["steptime", "fit", str(table), "--hardware", "measured", "-o", str(fitted)])
    assert call.exit_code == 0, call.output
    assert read_model(fitted).hardware == cpu.name
    words = ["steptime", "predict", str(fitted), "--model", "qwen2.5-0.5b", "--hardware", "measured"]
    assert f"on {cpu.title}" in CliRunner().invoke(app, words).output
