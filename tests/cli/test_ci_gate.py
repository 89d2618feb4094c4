"""The gate for continuous integration: its workflow, its script and its recipe fit the command line."""

import os
import re
import shlex
from pathlib import Path

import pytest
import yaml
from test_scripts_gpu import STEADY, smoke

from benchctl.cli.app import load_command

ROOT = Path(__file__).parent.parent.parent
WORKFLOW = ROOT / ".github" / "workflows" / "gpu-smoke.yml"
SOURCES = [
    WORKFLOW,
    ROOT / "scripts" / "gpu_smoke.sh",
    ROOT / "docs" / "tasks" / "ci-gate.md",
    ROOT / "docs" / "interop.md",
]
COMMAND = re.compile(r"benchctl (?:run|compare|export|doctor|models) [^\n`|#]*")
OPTION = re.compile(r"(?<![\w-])(--[a-z][a-z-]+|-[a-z])(?![\w-])")


def workflow():
    found = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))
    return found, found["jobs"]["smoke"]


def commands():
    """Every command line of the recipe, with its continuation lines."""
    texts = (re.sub(r"\\\n\s*|\n\s+(?=--)", " ", path.read_text(encoding="utf-8")) for path in SOURCES)
    return sorted({found.strip() for text in texts for found in COMMAND.findall(text)})


@pytest.mark.parametrize("command", commands())
def test_every_command_of_the_recipe_has_options_that_exist(command):
    name, *words = command.split()[1:]
    found = load_command(name)
    while words and words[0] in (inner := getattr(found, "commands", {})):
        found, words = inner[words[0]], words[1:]
    known = {option for parameter in found.params for option in (*parameter.opts, *parameter.secondary_opts)}
    assert set(OPTION.findall(command)) <= known


def test_the_recipe_holds_the_commands_that_a_gate_needs():
    found = " ".join(commands())
    for part in ("benchctl run --profile ci-smoke", "benchctl compare", "--github-summary", "--noise-floor"):
        assert part in found


def test_one_job_measures_at_a_time_on_a_runner_with_a_gpu():
    found, job = workflow()
    assert found["concurrency"] == {"group": "gpu-smoke", "cancel-in-progress": False}
    assert {"self-hosted", "gpu"} <= set(job["runs-on"])
    assert "matrix" not in job.get("strategy", {})


def test_enough_blocks_for_a_verdict_are_measured_unless_somebody_says_otherwise():
    found, job = workflow()
    inputs = found[True]["workflow_dispatch"]["inputs"]  # YAML reads the word on as true
    assert inputs["blocks"]["default"] == "6"
    assert "|| '6'" in job["env"]["BLOCKS"]
    assert '--blocks "${BLOCKS:-6}"' in (ROOT / "scripts" / "gpu_smoke.sh").read_text()


def test_what_the_workflow_sets_is_what_the_script_reads_and_what_it_runs_is_there():
    _, job = workflow()
    script = (ROOT / "scripts" / "gpu_smoke.sh").read_text()
    for name in job["env"]:
        assert f"${{{name}:" in script, name
    runs = [step["run"] for step in job["steps"] if "run" in step]
    for run in runs:
        for word in shlex.split(run):
            if word.startswith("scripts/"):
                path = ROOT / word.replace("${ENGINE%%-*}", "vllm")
                assert os.access(path, os.X_OK), word


def test_results_are_kept_whatever_the_verdict():
    _, job = workflow()
    upload = job["steps"][-1]
    assert upload["if"] == "always()"
    assert upload["with"]["path"] == job["env"]["RESULTS"]


@pytest.mark.slow
def test_the_gate_stores_compares_and_refreshes_on_the_simulator(tmp_path):
    env = {"BLOCKS": "6", "THRESHOLD": "50%", "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md")}
    first = smoke(tmp_path, "--cpu", *STEADY, **env)
    assert first.returncode == 0, first.stderr
    baseline = tmp_path / "results" / "gpu-smoke-baseline" / "sim-exact"
    stored = (baseline / "manifest.json").read_text()
    second = smoke(tmp_path, "--cpu", *STEADY, **env, REFRESH="1")
    assert second.returncode == 0, second.stderr
    assert re.search(r"\| step\\_ms \|.* equivalent \|\n", second.stdout)
    assert (tmp_path / "summary.md").read_text() == first.stdout + second.stdout
    for form in ("md", "json", "csv", "png"):
        assert (tmp_path / "results" / f"comparison.{form}").stat().st_size > 500
    assert "stored as the new baseline" in second.stdout
    assert (baseline / "manifest.json").read_text() != stored


@pytest.mark.slow
@pytest.mark.nightly
def test_what_decides_nothing_passes_or_fails_as_the_gate_is_told(tmp_path):
    baseline = str(tmp_path / "baseline")
    assert smoke(tmp_path, "--cpu", *STEADY, BASELINE=baseline, BLOCKS="1").returncode == 0
    lenient = smoke(tmp_path, "--cpu", *STEADY, BASELINE=baseline, BLOCKS="1")
    strict = smoke(tmp_path, "--cpu", *STEADY, BASELINE=baseline, BLOCKS="1", ON_INCONCLUSIVE="fail")
    assert (lenient.returncode, strict.returncode) == (0, 3), lenient.stderr
    for gate in (lenient, strict):
        assert "none was ruled out" in gate.stdout


def test_a_policy_that_does_not_exist_is_refused_before_anything_is_measured(tmp_path):
    refused = smoke(tmp_path, "--cpu", ON_INCONCLUSIVE="shrug")
    assert refused.returncode == 2
    assert "write pass or fail" in refused.stderr
    assert list(tmp_path.iterdir()) == []
