"""``benchctl compare`` explains the change of the mean step by a step-time model."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.cli import benchctl

from benchctl.analysis.compare.compare import CompareOptions, compare_sides
from benchctl.analysis.experiment.pairing import Side
from benchctl.report.page.plots import cell_waterfalls
from benchctl.steptime.model import HeldOutError, Provenance, StepTimeModel, write_model
from benchctl.steptime.work import Coefficient

MODEL = StepTimeModel(
    structure="roofline",
    coefficients=(Coefficient(name="roofline", value=1.0),),
    hardware="h100-sxm",
    tensor_parallel=(1,),
    provenance=Provenance(
        runs=("a",),
        num_steps=100,
        held_out=(HeldOutError(by="run", num_groups=3, num_steps=100, mape_frac=0.034, bias_frac=-0.012),),
    ),
)
PROFILE = """
engine: {{kind: sim, options: {{cost_model: roofline}}}}
model: qwen2.5-7b
{more}
blocks: 2
workload:
  dataset: synthetic
  input_len: {{mean: 200, cv: 0.5, min: 16}}
  output_len: {{mean: 30, cv: 0.5}}
  num_prompts: 40
  arrival: {{kind: closed-loop, max_concurrency: 16}}
allowed_differences: [server.max_num_seqs]
variants: {{baseline: {{}}, small: {{server: {{max_num_seqs: 4}}}}}}
"""


def simulated(directory: Path, more: str = "") -> Path:
    """Two variants that differ in the largest batch, simulated at the roofline."""
    (directory / "batches.yaml").write_text(PROFILE.format(more=more))
    done = benchctl("simulate", "--profile", "batches.yaml", "-q", cwd=directory)
    assert done.returncode == 0, done.stdout + done.stderr
    return directory / "results" / "batches" / "latest"


@pytest.fixture(name="results", scope="module")
def _results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulated(tmp_path_factory.mktemp("explain"))


def compared(results: Path, *options: object) -> dict:
    """The decomposition of the only cell, as JSON."""
    done = benchctl("compare", f"{results}:baseline", f"{results}:small", "--json", *options)
    assert done.returncode in {0, 1, 3}, done.stderr
    return json.loads(done.stdout)["cells"][0]["decomposition"]


@pytest.fixture(name="planted", scope="module")
def _planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "planted.json"
    write_model(path, MODEL)
    return path


def test_without_a_model_none_is_fitted(results):
    decomposition = compared(results)
    assert decomposition["model"] is None
    assert decomposition["model_missing"].startswith("no step-time model is named")


def test_the_model_by_which_the_steps_were_made_explains_all_of_their_change(results, planted):
    decomposition = compared(results, "--step-time-model", planted)
    model = decomposition["model"]
    assert (model["source"], model["held_out_mape_frac"]) == (str(planted), 0.034)
    # The simulator also prices sampling, which is no work of the model.
    assert abs(model["parts"][-1]["added_s"]) < 0.05 * abs(model["whole"]["added_s"])


def test_all_rows_and_the_sentence_name_what_the_work_explains(results, planted):
    sides = f"{results}:baseline", f"{results}:small"
    done = benchctl("compare", *sides, "--all", "--step-time-model", planted)
    rows = [line for line in done.stdout.splitlines() if "of the step (step-time model)" in line]
    assert any("prompts" in row for row in rows)
    assert any("not explained by the work" in row for row in rows)
    assert "a step-time model explains" in done.stdout


def test_the_page_has_a_waterfall_of_the_step_by_its_work_that_adds_up(results, planted):
    options = CompareOptions(step_time_model=planted)
    comparison = compare_sides(Side(results, "baseline"), Side(results, "small"), options)
    *_, fall = cell_waterfalls(comparison.cells[0])
    assert fall.title.endswith("by its work")
    assert "3.4% off on steps left out of its fit" in fall.sentence
    assert fall.start + sum(part.added for part in fall.falls) == pytest.approx(fall.end, rel=1e-6)
    assert {"batch", "prompts"} & {part.label for part in fall.falls}


def test_a_model_of_another_hardware_is_refused_with_the_remedy(results, tmp_path):
    path = tmp_path / "a100.json"
    write_model(path, replace(MODEL, hardware="a100-sxm"))
    done = benchctl("compare", f"{results}:baseline", f"{results}:small", "--step-time-model", path)
    assert done.returncode == 2
    assert f"{path}: a step-time model of a100-sxm" in done.stderr
    assert "benchctl steptime calibrate" in done.stderr


def test_a_model_of_the_profile_that_is_gone_is_named_and_stops_nothing(tmp_path):
    results = simulated(tmp_path, more="step_time_model: gone.json")
    decomposition = compared(results)
    assert decomposition["model"] is None
    assert "the step-time model of the profile cannot be used: gone.json" in decomposition["model_missing"]
