"""A simulated server that verifies drafts by a model fitted without any: every command with it says so."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.cli import benchctl
from support.servers.simulator import sim_server

from benchctl.steptime.model import Provenance, StepTimeModel, write_model
from benchctl.steptime.work import Coefficient

CODE = "drafts-not-fitted"
MODEL = StepTimeModel(
    structure="overlap",
    coefficients=(
        Coefficient(name="compute", value=1.5),
        Coefficient(name="memory", value=1.2),
        Coefficient(name="steps", value=900.0, unit="us"),
    ),
    hardware="h100-sxm",
    tensor_parallel=(1,),
    provenance=Provenance(num_steps=50, most_query_tokens=1),
)
PROFILE = """
engine: {{kind: sim, options: {{cost_model: fitted, step_time_model: {file}, acceptance: 0.8, draft_cost: 0.05}}}}
model: qwen2.5-7b
blocks: 1
workload:
  dataset: synthetic
  input_len: 50
  output_len: 20
  num_prompts: 8
  arrival: {{kind: closed-loop, max_concurrency: 4}}
variants:
  baseline: {{}}
  drafts: {{server: {{num_speculative_tokens: 1}}}}
sweep:
  num_speculative_tokens: [1, 4]
allowed_differences: [server.num_speculative_tokens]
"""


def profile_with(directory: Path, most_query_tokens: int | None) -> Path:
    provenance = replace(MODEL.provenance, most_query_tokens=most_query_tokens)
    write_model(directory / "m.json", replace(MODEL, provenance=provenance))
    (directory / "p.yaml").write_text(PROFILE.format(file=directory / "m.json"), encoding="utf-8")
    return directory / "p.yaml"


def codes(warnings: list[dict]) -> list[str]:
    return [warning["code"] for warning in warnings if warning["code"] == CODE]


def test_a_dry_run_says_once_what_the_longest_drafts_ask_for(tmp_path: Path) -> None:
    planned = benchctl("run", "--profile", profile_with(tmp_path, 1), "--dry-run", cwd=tmp_path)
    assert planned.returncode == 0, planned.stderr
    assert planned.stderr.count("fitted to steps of at most 1 query token for each decoding sequence") == 1
    assert "a verification of 4 draft tokens has 5" in planned.stderr


@pytest.mark.parametrize(("most", "expected"), [(1, [CODE]), (None, [CODE]), (5, [])])
def test_simulated_results_carry_the_warning(tmp_path: Path, most: int | None, expected: list[str]) -> None:
    done = benchctl("simulate", "--profile", profile_with(tmp_path, most), "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert codes(shown["warnings"]) == expected
    manifest = json.loads((Path(tmp_path, shown["directory"]) / "manifest.json").read_text(encoding="utf-8"))
    assert codes(manifest["warnings"]) == expected


def test_a_sweep_of_loads_carries_the_warning(tmp_path: Path) -> None:
    command = ("simulate", "sweep", "--profile", profile_with(tmp_path, 1), "--max-concurrency", "1,2", "--json")
    swept = benchctl(*command, cwd=tmp_path)
    assert swept.returncode == 0, swept.stderr
    assert codes(json.loads(swept.stdout)["warnings"]) == [CODE]


def test_a_server_of_its_own_says_it_in_its_log(tmp_path: Path) -> None:
    profile_with(tmp_path, 1)
    fitted = {"cost_model": "fitted", "step_time_model": str(tmp_path / "m.json")}
    with sim_server(tmp_path, **fitted, num_speculative_tokens=2, acceptance=0.8, draft_cost=0.1) as server:
        assert "a verification of 2 draft tokens has 3" in server.log.read_text(encoding="utf-8")
