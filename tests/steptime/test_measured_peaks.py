"""Step-time models and measured peaks: a model keeps the peaks that it was fitted with."""

import platform
from dataclasses import replace

import pytest
from support.peaks import cpu_peaks, gpu_peaks
from support.step_time import names_of, planted_run, write_table
from typer.testing import CliRunner

from benchctl.cli.app import app
from benchctl.errors import UsageError
from benchctl.records.peaks import PEAKS, hardware_of
from benchctl.steptime.evaluate import judge
from benchctl.steptime.fit import fit_model
from benchctl.steptime.model import read_model, write_model

MEASURED = hardware_of(gpu_peaks())
PLANTED = dict.fromkeys(names_of("overlap"), 1.3)


def test_a_model_fitted_with_measured_peaks_is_read_from_its_file_with_them(tmp_path) -> None:
    run = planted_run("qwen2.5-7b", 1, PLANTED, hardware=MEASURED.name)
    write_model(tmp_path / "m.json", fit_model([run]))
    model = read_model(tmp_path / "m.json")
    assert model.hardware == MEASURED.name
    assert model.predict_us(run.work, run.deployment) == pytest.approx(run.duration_us, rel=1e-3)


def test_steps_of_the_same_device_are_judged_with_the_peaks_of_the_model() -> None:
    run = planted_run("qwen2.5-7b", 1, PLANTED, hardware=MEASURED.name)
    later = hardware_of(gpu_peaks(bfloat16=700e12, measured_at="2027-01-01T00:00:00Z"))
    again = planted_run("qwen2.5-7b", 1, PLANTED, hardware=later.name)
    model = fit_model([run])
    same = replace(run, deployment=again.deployment)
    assert judge(model, [same]).whole.mape_frac < 1e-3
    with pytest.raises(UsageError, match="the deployment of a100-sxm"):
        judge(model, [planted_run("qwen2.5-7b", 1, PLANTED, hardware="a100-sxm")])


def test_runs_with_several_peaks_of_one_device_are_not_fitted_together() -> None:
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
