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
SCRIPT = ROOT / "scripts" / "gpu_smoke.sh"
SOURCES = [WORKFLOW, SCRIPT, ROOT / "docs" / "tasks" / "ci-gate.md", ROOT / "docs" / "interop.md"]
COMMAND = re.compile(r"benchctl (?:run|compare|export|doctor|models) [^\n`|#]*")
OPTION = re.compile(r"(?<![\w-])(--[a-z][a-z-]+|-[a-z])(?![\w-])")


def test_the_recipe_holds_the_commands_that_a_gate_needs_with_options_that_exist():
    texts = (re.sub(r"\\\n\s*|\n\s+(?=--)", " ", path.read_text(encoding="utf-8")) for path in SOURCES)
    commands = sorted({line.strip() for text in texts for line in COMMAND.findall(text)})
    for part in ("benchctl run --profile ci-smoke", "benchctl compare", "--github-summary", "--noise-floor"):
        assert part in " ".join(commands)
    for line in commands:
        _, name, *words = line.split()
        command = load_command(name)
        while words and words[0] in (inner := getattr(command, "commands", {})):
            command, words = inner[words[0]], words[1:]
        options = {word for parameter in command.params for word in (*parameter.opts, *parameter.secondary_opts)}
        assert set(OPTION.findall(line)) <= options, line


def test_the_workflow_measures_one_job_at_a_time_on_a_gpu_with_enough_blocks_and_keeps_its_results():
    workflow = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))
    job, script = workflow["jobs"]["smoke"], SCRIPT.read_text()
    assert workflow["concurrency"] == {"group": "gpu-smoke", "cancel-in-progress": False}
    assert {"self-hosted", "gpu"} <= set(job["runs-on"])
    assert "matrix" not in job.get("strategy", {})
    inputs = workflow[True]["workflow_dispatch"]["inputs"]  # YAML reads the word on as true
    assert inputs["blocks"]["default"] == "6"
    assert "|| '6'" in job["env"]["BLOCKS"]
    assert '--blocks "${BLOCKS:-6}"' in script
    assert [name for name in job["env"] if f"${{{name}:" not in script] == []
    words = [word for step in job["steps"] for word in shlex.split(step.get("run", ""))]
    programs = [ROOT / word.replace("${ENGINE%%-*}", "vllm") for word in words if word.startswith("scripts/")]
    assert programs
    assert all(os.access(path, os.X_OK) for path in programs)
    upload = job["steps"][-1]
    assert (upload["if"], upload["with"]["path"]) == ("always()", job["env"]["RESULTS"])


@pytest.mark.slow
def test_the_gate_refreshes_its_baseline_and_passes_or_fails_what_decides_nothing_as_it_is_told(tmp_path):
    summary, baseline = tmp_path / "summary.md", tmp_path / "results" / "gpu-smoke-baseline" / "sim-exact"
    options = ["--cpu", *STEADY, "--set", "engine.options.time_scale=50"]
    env = {"BLOCKS": "1", "GITHUB_STEP_SUMMARY": str(summary)}
    first = smoke(tmp_path, *options, **env)
    assert first.returncode == 0, first.stderr
    stored = (baseline / "manifest.json").read_text()
    lenient = smoke(tmp_path, *options, **env, REFRESH="1")
    assert lenient.returncode == 0, lenient.stderr
    assert summary.read_text() == first.stdout + lenient.stdout
    for form in ("md", "json", "csv", "png"):
        assert (tmp_path / "results" / f"comparison.{form}").stat().st_size > 500
    assert "stored as the new baseline" in lenient.stdout
    assert (baseline / "manifest.json").read_text() != stored
    strict = smoke(tmp_path, *options, **env, ON_INCONCLUSIVE="fail")
    assert strict.returncode == 3, strict.stderr
    for gate in (lenient, strict):
        assert "none was ruled out" in gate.stdout


def test_a_policy_that_does_not_exist_is_refused_before_anything_is_measured(tmp_path):
    refused = smoke(tmp_path, "--cpu", ON_INCONCLUSIVE="shrug")
    assert (refused.returncode, list(tmp_path.iterdir())) == (2, [])
    assert "write pass or fail" in refused.stderr
