"""Scripts for GPU machines, where the simulator stands in, and benches at sizes at which they measure nothing."""

import json
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml
from support.cli import WITHOUT_PICTURES, WITHOUT_SERVERS, preloaded_directory
from support.waiting import wait_until

from benchctl.cli.app import load_command
from benchctl.profile.load import load_profile
from benchmarks.common.harness import FailedError, compared
from benchmarks.common.measured_process import run_measured
from benchmarks.common.paced_server import Truth
from benchmarks.common.truth import Seen, arrivals_ns, errors, paced_server
from benchmarks.load.clients import ks_distance

ROOT = Path(__file__).parents[2]
VIRTUAL = """#!/bin/bash
set -o pipefail
[ "$1" = run ] || exec {benchctl} "$@"
shift
{benchctl} simulate "$@" | sed 's/; nothing is measured.*//'
"""
"""A ``benchctl`` whose runs take place in virtual time."""


STEADY = ["--set", "workload.output_len=16"]


def smoke(cwd, *arguments, **env):
    """The script with this interpreter's benchctl on PATH: its summary is on stdout, all else on stderr."""
    program = preloaded_directory() / "virtual" / "benchctl"
    program.parent.mkdir(exist_ok=True)
    program.write_text(VIRTUAL.format(benchctl=preloaded_directory() / "benchctl"))
    program.chmod(0o755)
    path = os.pathsep.join([str(program.parent), str(Path(sys.executable).parent), os.environ["PATH"]])
    settings = {"PATH": path, "ENGINE": "sim-exact", "BLOCKS": "6", "CUDA_VISIBLE_DEVICES": "", **env}
    argv, env = [ROOT / "scripts" / "gpu_smoke.sh", *arguments], os.environ | WITHOUT_PICTURES | settings
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


def run_script(name, *arguments, env=None):
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, **(env or {})},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def limit(url, *arguments):
    return json.loads(run_script("load.peers.limit_client", url, *arguments))


def test_what_the_server_wrote_down_encloses_what_a_client_on_the_same_clock_saw(tmp_path):
    with paced_server(tmp_path, ("--tick-ms", "2")) as server:
        counted = limit(server.url, "--streams", 3, "--output-len", 7, "--reads", tmp_path / "reads.json")
    true = {request.request_id: request for request in server.requests()}
    assert counted["complete"] == len(true) == 3
    for request in json.loads((tmp_path / "reads.json").read_text()):
        truth = true[request["request_id"]]
        assert (truth.is_complete, truth.event_tokens, truth.send_events) == (True, [1] * 7, [1] * 7)
        assert request["sent_ns"] - 20_000 <= truth.arrived_ns  # the clocks are related to some microseconds
        assert truth.arrived_ns - 20_000 <= truth.read_ns <= truth.sends_ns[0] <= request["stamps_ns"][0]
        assert truth.sends_ns[-1] <= request["stamps_ns"][-1]


def test_several_tokens_in_an_event_and_several_events_in_a_send_are_written_down(tmp_path):
    with paced_server(tmp_path, ("--tick-ms", "2", "--coalesce", "2", "--tokens-per-chunk", "3")) as server:
        limit(server.url, "--streams", 1, "--output-len", 10)
    (truth,) = server.requests()
    assert (truth.event_tokens, truth.send_events) == ([3, 3, 3, 1], [2, 2])
    assert (len(truth.sends_ns), len(arrivals_ns(truth))) == (2, 4)


def made_truth(**changed):
    sends = {"sends_ns": [2000, 3000, 5000], "send_events": [1, 2, 1], "event_tokens": [1, 1, 1, 1]}
    fields = {"request_id": "a", "prompt_digest": "d", "arrived_ns": 1000, "read_ns": 1100, "is_complete": True}
    return Truth(**fields | sends | changed)


def test_errors_are_what_was_said_less_what_was():
    seen = Seen(request_id="a", ttft_ns=1005, itl_ns=(1003, 0, 1990), tpot_ns=1010, output_tokens=4, num_bound=1)
    found = errors([seen], [made_truth()])
    assert (found.ttft_ns, found.itl_ns, found.tpot_ns) == ([5], [3, 0, -10], [10])
    assert found.bound_share == pytest.approx(1 / 4)
    assert (found.num_matched, found.num_unknown, found.num_wrong_tokens, found.num_itl_missing) == (1, 0, 0, 0)


def test_requests_are_matched_by_id_or_prompt_and_never_by_guess():
    seen = [Seen(request_id=name, output_tokens=3) for name in ("a", "d", "neither", "broken")]
    truths = [made_truth(), made_truth(request_id="broken", prompt_digest="e", is_complete=False)]
    found = errors(seen, truths)
    assert (found.num_matched, found.num_unknown, found.num_wrong_tokens, found.num_itl_missing) == (2, 2, 2, 2)
    assert found.bound_share is None


def test_gaps_that_are_exponential_have_a_small_distance_and_even_ones_a_large():
    shares = [(index + 0.5) / 400 for index in range(400)]
    assert ks_distance([-math.log(1 - share) / 200 for share in shares], 200) < 0.002
    assert ks_distance([1 / 200] * 400, 200) == pytest.approx(1 - math.exp(-1))


def test_the_cost_of_a_command_is_that_of_its_whole_family_and_nothing_of_it_stays(tmp_path):
    program = (
        "import subprocess, sys; spin = 'import time\\nwhile time.process_time() < 0.3: pass'; "
        "subprocess.run([sys.executable, '-c', spin]); "
        f"left = subprocess.Popen(['sleep', '600']); open({str(tmp_path / 'pid')!r}, 'w').write(str(left.pid))"
    )
    cost = run_measured([sys.executable, "-c", program], tmp_path / "log", timeout_s=60, environment={})
    assert cost.failure is None
    assert (cost.cpu_s >= 0.3, cost.most_processes >= 2, cost.peak_bytes > 5_000_000) == (True, True, True)
    left = int((tmp_path / "pid").read_text())

    def is_gone():
        return not psutil.pid_exists(left) or psutil.Process(left).status() == psutil.STATUS_ZOMBIE

    wait_until("the end of a process left behind", is_gone)


def test_ways_take_turns_and_the_table_has_their_ratios_and_why_one_is_missing(capsys):
    order = []

    def way(name, seconds):
        order.append(name)
        if seconds is None:
            raise FailedError("not installed")
        return {"wall s": seconds * len(order), "said": name}

    ways = {"limit": lambda: way("limit", 1.0), "ours": lambda: way("ours", 2.0), "peer": lambda: way("peer", None)}
    rows = compared("a title", ways, rounds=2, ratios=["wall s"])
    assert order == ["limit", "ours", "peer", "peer", "ours", "limit"]
    assert [row.get("wall s") for row in rows] == [3.5, 7.0, None]
    assert [row.get("x wall s") for row in rows] == [1.0, 2.0, None]
    assert "peer: not installed" in capsys.readouterr().out


def measured(tmp_path, bench, *options, env=None):
    """What a bench prints, and its tables."""
    said = run_script(bench, *options, "--json", tmp_path / "tables.json", env=env)
    return said, json.loads((tmp_path / "tables.json").read_text())


@pytest.mark.nightly
@pytest.mark.parametrize("accuracy", [pytest.param([], id="speed"), pytest.param(["accuracy"], id="all")])
def test_the_client_bench_measures_each_tool_and_names_what_is_missing_or_failed(tmp_path, accuracy):
    program = tmp_path / "peers" / "guidellm" / "bin" / "guidellm"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\necho out of luck >&2\nexit 3\n")
    program.chmod(0o755)
    env = {"BENCHCTL_PEERS": str(tmp_path / "peers"), "BENCHCTL_ENGINES_DIR": "/nonexistent"}
    small = ["--scale", 0.04, "--sections", "smallest", *accuracy, "coalescing"]
    tools = ["--tools", "limit", "benchctl", "guidellm", "aiperf"]
    said, tables = measured(tmp_path, "load.clients", *small, *tools, env=env)
    assert "aiperf: not installed" in said
    assert "guidellm: ended with 3: out of luck" in said
    assert [title.partition(":")[0] for title in tables] == ["smallest", *accuracy * 5, "coalescing"]
    for title, rows in tables.items():
        bound, ours = (row for row in rows if "failed" not in row)
        assert (bound["way"], ours["way"]) == ("limit", "benchctl")
        if title.startswith("accuracy"):
            count = 10 if "256" in title else 3
            assert bound["matched"] == ours["matched"] == f"{count}/{count}"
            assert (ours["wrong tokens"], ours["ttft max"] > 0) == (0, True)
    assert (0 < bound["open"] <= 3, 0 < ours["open"] <= 3) == (True, True), "the last table is of coalescing"
    assert ours["by itself"].split()[0] in {"done", "suspect"}


@pytest.mark.nightly
def test_the_analysis_bench_reads_large_directories_beside_the_least_that_it_would_take(tmp_path):
    small = ["--blocks", 6, "--requests", 4, "--tokens", 8, "--steps", 3200, "--batch", 1, "--runs", 16]
    small += ["--run-steps", 50, "--sweep-blocks", 1, "--prompts", 2]
    said, tables = measured(tmp_path, "analysis.speed", *small, "--rounds", 1)
    assert "show: 12 runs and 768 tokens" in said
    for title, ways in (
        ("show", ["first reading", "benchctl show"]),
        ("sweep", ["limit: decoding alone", "benchctl show", "first report", "benchctl report"]),
        ("compare", 2 * ["limit: decoding alone", "reading the bytes alone", "benchctl compare"]),
    ):
        assert [row["way"] for row in tables[title]] == ways
        assert all(row["wall s"] > 0 for row in tables[title])
        assert all(row["peak MiB"] > 10 for row in tables[title] if row["way"].startswith(("benchctl", "first")))
    built, *opened = tables["report"]
    assert (built["runs"], 500_000 < built["bytes"] < 2_000_000) == (16, True)
    for row in opened:
        assert 0 < row["verdict s"] <= row["first charts s"] <= row["all charts s"]


def test_the_verdict_bench_demands_something_of_every_section():
    sections = ["equivalence", "unpaired", "stopping"]
    said = run_script("verdict.verdict_truth", "--experiments", 4, "--sections", *sections)
    told = dict(part.strip().split(": ", 1) for part in said.split("\n\n")[1:-1])
    outcomes = {title: " ok" in text and "FAIL" not in text for title, text in told.items()}
    assert outcomes == dict.fromkeys(sections, True)
    assert said.endswith("no demand is refuted\n")


TABLE = "arm       step ms  p50_ttft_ms\nbaseline    11.55       -3.2%\n"
DOCUMENT = {"arms": [{"name": "baseline", "step_ms": 11.55, "is_done": True}]}


def outputs_compared(tmp_path, table=TABLE, document=DOCUMENT):
    for name, text, values in (("old", TABLE, DOCUMENT), ("new", table, document)):
        folder = tmp_path / name / "outputs/flag"
        folder.mkdir(parents=True)
        (folder / "show.txt").write_text(text, encoding="utf-8")
        (folder / "show.json").write_text(json.dumps(values, indent=3 if name == "new" else None))
    argv = [sys.executable, "-m", "benchmarks.outputs.differences", str(tmp_path / "old"), str(tmp_path / "new")]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_a_number_that_changed_or_left_is_told_and_a_layout_or_a_further_number_is_not(tmp_path):
    for number, (table, line) in enumerate(
        (
            (TABLE, None),
            ("p50_ttft_ms | -3.2%\nstep ms | 11.550\n3 blocks\n", None),
            (TABLE.replace("11.55", "11.56"), "- 11.55 (1 times)"),
            (TABLE.replace("-3.2%", "+3.2%"), "- -3.2 (1 times)"),
            ("arm | step ms\nbaseline | 11.55\n", "- -3.2 (1 times)"),
        )
    ):
        code, text = outputs_compared(tmp_path / f"text-{number}", table)
        assert (code, (line or "") in text) == (line is not None, True), table
    for changes, expected, line in (
        ({"step_ms": 12}, 1, "~ arms.0.step_ms: 11.55 -> 12"),
        ({"wall_s": 1.5}, 0, "+ arms.0.wall_s: None -> 1.5"),
    ):
        document = {"arms": [DOCUMENT["arms"][0] | changes]}
        code, text = outputs_compared(tmp_path / f"values-{expected}", document=document)
        assert (code, line in text) == (expected, True)
