"""Scripts and the workflow for GPU machines, as far as a machine without one can show: the simulator stands in."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support.cli import WITHOUT_SERVERS, preloaded_directory

from benchctl.cli.app import load_command
from benchctl.profile.load import load_profile
from benchctl.records.schema import GpuSample
from benchctl.units import MIB, NS_PER_MS
from benchmarks.measure.nvml_agreement import differences, paired, report

ROOT = Path(__file__).parents[2]
VIRTUAL = """#!/bin/bash
set -o pipefail
[ "$1" = run ] || exec {benchctl} "$@"
shift
{benchctl} simulate "$@" | sed 's/; nothing is measured.*//'
"""
"""A ``benchctl`` whose runs take place in virtual time."""


STEADY = ["--set", "workload.output_len=16"]


def smoke(cwd, *arguments, is_virtual=True, **env):
    """The script with this interpreter's benchctl on PATH: its summary is on stdout, all else on stderr."""
    program = preloaded_directory() / "virtual" / "benchctl"
    program.parent.mkdir(exist_ok=True)
    program.write_text(VIRTUAL.format(benchctl=preloaded_directory() / "benchctl"))
    program.chmod(0o755)
    first = program.parent if is_virtual else preloaded_directory()
    path = os.pathsep.join([str(first), str(Path(sys.executable).parent), os.environ["PATH"]])
    settings = {"PATH": path, "ENGINE": "sim-exact", "BLOCKS": "6", "CUDA_VISIBLE_DEVICES": "", **env}
    argv, env = [ROOT / "scripts" / "gpu_smoke.sh", *arguments], os.environ | settings
    return subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.slow
def test_the_first_run_becomes_the_baseline_and_the_next_ones_are_compared_with_it(tmp_path):
    studied = ["--cpu", *STEADY, "--set", "allowed_differences=[server.overlap_schedule]"]
    failed = smoke(tmp_path, "--cpu", "--set", "workload.num_promts=1")
    assert (failed.returncode, "The run ended with exit code 2" in failed.stdout) == (2, True)
    baseline = tmp_path / "results/gpu-smoke-baseline/sim-exact/manifest.json"
    assert not baseline.exists()
    first = smoke(tmp_path, *studied)
    assert (first.returncode, "kept as the baseline" in first.stdout) == (0, True), first.stderr
    same = smoke(tmp_path, *studied, GITHUB_STEP_SUMMARY=str(tmp_path / "summary.md"), THRESHOLD="50%")
    assert (same.returncode, "| step\\_ms |" in same.stdout) == (0, True), same.stderr
    assert (tmp_path / "summary.md").read_text() == same.stdout
    slower = smoke(tmp_path, *studied, "--set", "engine.options.overlap_schedule=false", THRESHOLD="1%")
    assert (slower.returncode, "\n**regression: " in slower.stdout) == (1, True), slower.stdout
    other = smoke(tmp_path, "--cpu", "--set", "workload.output_len=8", BLOCKS="1")
    words = [word in other.stdout for word in ("request_set_sha256", "store a new baseline")]
    assert (other.returncode, words) == (4, [True, True])


def test_a_gpu_and_known_options_are_demanded_before_anything_is_measured(tmp_path):
    for options, env, message in (
        ((), {}, "gpu device missing"),
        (("--cpu",), {"ON_INCONCLUSIVE": "shrug"}, "write pass or fail"),
    ):
        refused = smoke(tmp_path, *options, **env)
        assert (refused.returncode, message in refused.stderr) == (2, True)
    assert list(tmp_path.iterdir()) == []


def sample(t_ms: float, power_w: float | None = 300.0, **more) -> GpuSample:
    values = {"uuid": "GPU-a", "power_w": power_w, "memory_used_bytes": 900 * MIB, "source": "nvml", **more}
    return GpuSample(t_ns=round(t_ms * NS_PER_MS), index=0, **values)


def test_each_reading_is_held_against_the_nearest_one_of_the_same_device():
    nvml = [sample(0), sample(100, 310.0), sample(200), sample(100, 0.0, uuid="GPU-b")]
    pairs = list(paired(nvml, [sample(90, 305.0), sample(900)]))
    assert [(first.power_w, second.power_w) for first, second in pairs] == [(310.0, 305.0)]
    assert differences(pairs, "power_w") == [5.0]
    assert differences(pairs, "memory_used_bytes") == [0.0]
    assert differences(pairs, "temperature_c") == []


def test_two_ways_agree_when_their_medians_do_and_without_readings_nothing_agrees():
    for off_w, agrees in ((3.0, True), (40.0, False)):
        assert report([(sample(t), sample(t, 300.0 + off_w)) for t in range(5)]) is agrees
    assert report([]) is False


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
    assert [os.access(path, os.X_OK) for path in programs] == [True] * len(programs) != []
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
    assert (lenient.returncode, "kept as the new baseline" in lenient.stdout) == (0, True), lenient.stderr
    assert summary.read_text() == first.stdout + lenient.stdout
    assert {path.suffix for path in (tmp_path / "results").glob("comparison.*")} == {".md", ".json", ".csv", ".png"}
    assert (baseline / "manifest.json").read_text() != stored
    strict = smoke(tmp_path, *options, **env, ON_INCONCLUSIVE="fail")
    assert strict.returncode == 3, strict.stderr


def git(cwd, *words):
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *identity, *words], cwd=cwd, check=True, capture_output=True)


def run_in(cwd, argv, env):
    return subprocess.run(argv, cwd=cwd, env=env, check=False).returncode


@pytest.mark.slow
def test_the_steps_of_the_action_measure_a_pull_request_against_its_merge_base(tmp_path):
    origin, clone = tmp_path / "origin", tmp_path / "clone"
    git(tmp_path, "init", "--quiet", "--initial-branch=main", str(origin))
    for branch, text in (("main", "old"), ("main", "base"), ("change", "head")):
        git(origin, "checkout", "--quiet", "-B", branch)
        (origin / "engine").write_text(text)
        git(origin, "add", "engine")
        git(origin, "commit", "--quiet", "-m", text)
    git(tmp_path, "clone", "--quiet", str(origin), str(clone))
    git(origin, "checkout", "--quiet", "main")
    git(origin, "commit", "--quiet", "--allow-empty", "-m", "later")

    action = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    inputs = {name: str(each.get("default")) for name, each in action["inputs"].items()}
    inputs |= {"blocks": "1", "prepare": "cp engine built"}
    settings = "description=$BENCHCTL_BASE against $BENCHCTL_HEAD\nworkload.num_prompts=4\n"
    inputs["set"] = f"{settings}engine.options.time_scale=100\n"
    env = os.environ | {
        name: str(tmp_path / name) for name in ("GITHUB_ENV", "GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")
    }
    env |= {"GITHUB_ACTION_PATH": str(ROOT), "RUNNER_TEMP": str(tmp_path), **WITHOUT_SERVERS}
    env["PATH"] = f"{preloaded_directory()}{os.pathsep}{env['PATH']}"
    for step in action["runs"]["steps"]:
        of_step = {"${{ github.base_ref }}": "main"} | {
            f"${{{{ inputs.{name} }}}}": inputs[name] for name in inputs
        }
        own = {name: of_step[text] for name, text in step["env"].items()}
        if (tmp_path / "GITHUB_ENV").exists():
            own |= dict(line.split("=", 1) for line in (tmp_path / "GITHUB_ENV").read_text().splitlines())
        assert run_in(clone, ["bash", "-c", step["run"]], env | own) == 0, step["name"]
    checkouts = [Path(own[f"BENCHCTL_{side}"]) for side in ("BASE", "HEAD")]
    assert [(path / "built").read_text() for path in checkouts] == ["base", "head"]
    directory = clone / (tmp_path / "GITHUB_OUTPUT").read_text().removeprefix("directory=").strip()
    profile = load_profile(str(directory / "profile.yaml"))
    assert profile.description == " against ".join(map(str, checkouts))
    assert (tmp_path / "GITHUB_STEP_SUMMARY").read_text().startswith("**inconclusive: new against baseline")
    failing = own | {"SETTINGS": inputs["set"], "PROFILE": "two-builds", "BLOCKS": "1", "ON_INCONCLUSIVE": "fail"}
    assert run_in(clone, [ROOT / "scripts/action.sh", "measure"], env | failing) == 3
