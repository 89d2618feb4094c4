"""Files of step times: models that return unchanged, tables of steps, and every way in which one cannot be used."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
from support.datasets import DATA, needs_data
from support.peaks import gpu_peaks
from support.step_time import MODELS, names_of, planted_run, write_table

from benchctl.analysis.experiment.observed import read_sources
from benchctl.errors import UsageError
from benchctl.interop.tables import TableDefaults, read_step_table
from benchctl.records.peaks import hardware_of
from benchctl.steptime.evaluate import judge
from benchctl.steptime.fit import FitOptions, fit_model
from benchctl.steptime.model import FORMAT, HeldOutError, model_text, read_model, write_model


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


NO_DEFAULTS = TableDefaults()


def test_a_table_with_our_columns_returns_the_steps(tmp_path):
    run = planted_run("qwen2.5-7b", 1, PLANTED)
    (observed,) = read_step_table(write_table(tmp_path / "steps.csv", run), NO_DEFAULTS)
    assert (observed.run, observed.model, observed.deployment) == (run.run, run.model, run.deployment)
    assert len(observed.origin.sha256) == 64
    np.testing.assert_allclose(observed.duration_us, run.duration_us)
    for name, values in asdict(run.work).items():
        np.testing.assert_allclose(getattr(observed.work, name), values, err_msg=name)


def test_json_lines_in_nanoseconds_are_the_same_steps(tmp_path):
    run = planted_run("qwen2.5-7b", 1, PLANTED, num_steps=20)
    rows = [
        {
            "dur_ns": round(run.duration_us[i] * 1000),
            "num_seqs": int(run.work.num_seqs[i]),
            "num_prefill_tokens": int(run.work.prefill_tokens[i]),
            "num_decode_tokens": int(run.work.decode_tokens[i]),
            "context_tokens": int(run.work.context[i] + run.work.tokens[i]),
        }
        for i in range(20)
    ]
    path = tmp_path / "steps.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (observed,) = read_step_table(path, TableDefaults(model="qwen2.5-7b", hardware="h100-sxm"))
    np.testing.assert_allclose(observed.duration_us, run.duration_us, rtol=1e-6)
    np.testing.assert_allclose(observed.work.num_decodes, run.work.num_decodes)
    np.testing.assert_allclose(observed.work.num_prefills, run.work.num_prefills)


@pytest.mark.parametrize(
    ("renamed", "message"),
    [
        (
            {"num_prefill_tokens": "x", "context_tokens": "y"},
            "columns are missing: num_prefill_tokens or prefill_tokens or batch.prefill_tokens; context_tokens",
        ),
        ({"duration_us": "time"}, "columns are missing: dur_ns or duration_us or cycle_us"),
        ({"duration_us": "step.duration_us"}, "step.duration_us is the time of the scheduler and not of the step"),
        ({"num_decodes": "x"}, "columns are missing: num_decodes or batch.num_decode_reqs or num_seqs"),
        ({"hardware": "x"}, "no column hardware; add it, or name the hardware with --hardware"),
        ({"model": "x"}, "no column model; add it, or name the model with --model"),
    ],
    ids=["two", "time", "scheduler", "rows", "hardware", "model"],
)
def test_a_missing_column_is_named_with_the_remedy(tmp_path, renamed, message):
    path = write_table(tmp_path / "steps.csv", planted_run("qwen2.5-7b", 1, PLANTED), **renamed)
    with pytest.raises(UsageError) as refusal:
        read_step_table(path, NO_DEFAULTS)
    assert f"{path}: {message}" in str(refusal.value)


def test_values_that_are_no_numbers_and_models_without_a_shape_are_named(tmp_path):
    path = write_table(tmp_path / "steps.csv", planted_run("qwen2.5-7b", 1, PLANTED, num_steps=5))
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join([*lines[:3], lines[3].rpartition(",")[0] + ",many"]), encoding="utf-8")
    with pytest.raises(UsageError, match="context_tokens is 'many' in row 3 of its run; every step needs a number"):
        read_step_table(path, NO_DEFAULTS)
    path.write_text("\n".join(lines).replace("qwen2.5-7b", "gpt-5-preview"), encoding="utf-8")
    with pytest.raises(UsageError, match=r"gpt-5-preview.*--shape gpt-5-preview=DIR names the directory"):
        read_step_table(path, NO_DEFAULTS)
    shapes = TableDefaults(shapes={"gpt-5-preview": "qwen2.5-7b"})
    assert read_step_table(path, shapes)[0].deployment.shape.name == "qwen2.5-7b"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.csv", b"model,hardware,duration_us\n", "has no rows; it needs one row a step"),
        ("broken.jsonl", b"{", r"broken.jsonl:1: no row of a table: .*; correct the row"),
        ("long.csv", b"model,duration_us\na,1\nb,2,3\n", r"long.csv:3: 3 values under 2 names; correct the row"),
        (
            "latin.csv",
            b"model\nmod\xe8le\n",
            r"latin.csv:2: cannot be read: it is not UTF-8 text .*; correct the row",
        ),
        ("steps.parquet", b"PAR1", "from a Parquet file, write a CSV file first"),
        ("none", None, "neither a result directory nor a table of steps"),
        ("", None, "neither a result directory nor a table of steps"),
    ],
)
def test_files_and_directories_that_hold_no_steps_are_refused(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message):
        read_sources([tmp_path / name])


def test_saturated_steps_are_marked_with_the_first_reason(tmp_path):
    run = planted_run("qwen2.5-7b", 1, PLANTED, num_steps=6)
    path = write_table(tmp_path / "steps.csv", run, duration_us="cycle_us")
    header = "preempted,kv_used_frac,prev.prefill,next.batch.prefill_tokens"
    extra = [header, "1,0.99,0,0", ",0.96,,", *[",0.2,,"] * 3, ",0.2,900,"]
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join(f"{line},{more}" for line, more in zip(lines, extra, strict=False)), encoding="utf-8")
    (observed,) = read_step_table(path, NO_DEFAULTS)
    assert observed.left_out["preemption"] == observed.left_out["key-value memory above 95%"] == 1
    assert observed.is_saturated[[0, 1, 5]].all()


@needs_data
def test_the_published_steps_are_two_runs_without_those_next_to_long_prompts():
    runs = read_step_table(DATA / "steps/vllm-h100-steps.csv", TableDefaults(hardware="h100-sxm"))
    deployments = [(run.deployment.shape.name, run.deployment.tensor_parallel) for run in runs]
    assert deployments == [("llama-2-70b", 4), ("codellama-34b", 2)]
    assert [len(run.duration_us) for run in runs] == [658, 716]
    reason = "long prompt next to a time from start to start"
    assert [run.left_out for run in runs] == [{reason: 1}, {reason: 2}]
