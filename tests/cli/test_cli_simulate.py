"""``benchctl simulate``: real processes and files, no server."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from support.cli import benchctl, only_result, plain_environment

pytestmark = pytest.mark.slow
SMALL = ["--set", "workload.num_prompts=2", "--set", "workload.output_len=24"]
EXACT = ["--profile", "ci-smoke", "--engine", "sim-exact", "--quiet", *SMALL]


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One small simulated experiment that several tests read."""
    cwd = tmp_path_factory.mktemp("simulated")
    done = benchctl("simulate", *EXACT, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return only_result(cwd)


def steps_of(results: Path) -> dict[str, bytes]:
    return {path.parent.name: path.read_bytes() for path in sorted(results.glob("runs/*/steps.jsonl"))}


def test_a_simulated_experiment_has_the_requests_and_the_steps_of_one_over_http(
    simulated: Path, tmp_path: Path
) -> None:
    done = benchctl("run", *EXACT, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    measured = only_result(tmp_path)
    assert (measured / "requests.jsonl").read_bytes() == (simulated / "requests.jsonl").read_bytes()
    assert steps_of(measured) == steps_of(simulated)
    assert len(steps_of(simulated)) == 4


def test_its_manifest_says_that_nothing_was_measured(simulated: Path) -> None:
    manifest = json.loads((simulated / "manifest.json").read_text())
    assert manifest["state"] == "done"
    (note,) = (warning for warning in manifest["warnings"] if warning["code"] == "simulated")
    assert "cost model lenvm-h100 (qwen2.5-7b on h100-sxm)" in note["message"]


@pytest.mark.parametrize("command", ["show", "verify", "report"])
def test_other_commands_read_its_directory(simulated: Path, command: str) -> None:
    done = benchctl(command, simulated, cwd=simulated)
    assert done.returncode == 0, done.stdout + done.stderr
    if command == "show":
        assert "'benchctl simulate' ran the core of the simulator" in done.stdout
        assert "The client" not in done.stdout


def test_compare_pairs_its_blocks(simulated: Path) -> None:
    done = benchctl("compare", f"{simulated}:baseline", f"{simulated}:guided", "--json", cwd=simulated)
    document = json.loads(done.stdout)
    by_name = {metric["name"]: metric for metric in document["metrics"]}
    assert by_name["step_ms"]["ratio"] > 2
    assert by_name["step_ms"]["blocks"] == 2


def test_several_processes_give_the_same_records_as_one(simulated: Path, tmp_path: Path) -> None:
    done = benchctl("simulate", *EXACT, "--jobs", 2, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    again = only_result(tmp_path)
    assert steps_of(again) == steps_of(simulated)
    requests = sorted(path.relative_to(simulated) for path in simulated.glob("runs/*/requests.jsonl"))
    assert [(again / path).read_bytes() for path in requests] == [
        (simulated / path).read_bytes() for path in requests
    ]
    document = json.loads(done.stdout)
    assert (tmp_path / document["directory"]).resolve() == again.resolve()
    assert [run["state"] for run in document["runs"]] == ["done"] * 4


@pytest.mark.parametrize(
    ("args", "says"),
    [
        pytest.param([], "name a profile with --profile", id="no profile"),
        pytest.param(
            ["--profile", "ci-smoke", "--engine", "vllm"], "simulate it with --engine sim", id="real engine"
        ),
        pytest.param(["--profile", "ci-smoke", "--set", "model=no-such"], "no-such", id="unknown model"),
        pytest.param(
            ["--profile", "llm-mock-cache"],
            "the commands under 'The cache' in docs/tasks/llm-mock.md make it",
            id="file that a page makes",
        ),
        pytest.param(["--profile", "ci-smoke", "--jobs", "0"], "--jobs", id="no jobs"),
        pytest.param(["--profile", "ci-smoke", "sweep"], "options of sweep follow that word", id="options first"),
    ],
)
def test_bad_input_gets_one_clear_message_and_exit_code_2(tmp_path: Path, args: list[str], says: str) -> None:
    done = benchctl("simulate", *args, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_interrupt_ends_with_130_and_keeps_what_was_simulated(tmp_path: Path, jobs: int) -> None:
    long = ["--set", "workload.num_prompts=60", "--set", "workload.output_len=900", "--jobs", str(jobs)]
    command = [sys.executable, "-m", "benchctl", "simulate", "--profile", "topk-sweep", "--quiet", *long]
    env = {**os.environ, **plain_environment(tmp_path)}
    with subprocess.Popen(command, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while not list((tmp_path / "results").glob("*/*/runs/*/requests.jsonl")) and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    results = only_result(tmp_path)
    assert json.loads((results / "manifest.json").read_text())["state"] == "interrupted"
    states = {json.loads(path.read_text())["state"] for path in results.glob("runs/*/run.json")}
    assert states <= {"done", "failed"}
    assert benchctl("show", results, cwd=tmp_path).returncode == 0


def test_a_simulating_process_that_is_killed_is_named_and_leaves_no_run_in_progress(tmp_path: Path) -> None:
    long = ["--set", "workload.num_prompts=60", "--set", "workload.output_len=900", "--jobs", "2"]
    command = [sys.executable, "-m", "benchctl", "simulate", "--profile", "topk-sweep", "--quiet", *long]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        while not list(tmp_path.glob("results/topk-sweep/2*/runs/*/run.json")):
            time.sleep(0.01)
        workers = [
            child for child in psutil.Process(process.pid).children() if "spawn_main" in str(child.cmdline())
        ]
        workers[0].kill()
        _, stderr = process.communicate(timeout=120)
    assert process.returncode == 5, stderr
    assert "benchctl: a process that simulates was ended from outside" in stderr
    assert "Traceback" not in stderr
    (listed,) = json.loads(benchctl("list", tmp_path / "results" / "topk-sweep", "--json").stdout)["results"]
    assert listed["state"] == "failed"


LOADS = ["--profile", "ci-smoke", "--engine", "sim-exact", "--set", "workload.num_prompts=40", "--jobs", "1"]


def test_a_sweep_finds_the_largest_rate_under_a_limit_and_draws_the_curve(tmp_path: Path) -> None:
    limit = ["--slo", "p90_ttft_ms=60", "--largest", "rate", "--set", "workload.output_len=8,16"]
    done = benchctl("simulate", "sweep", *LOADS, "--rate", "1,4", *limit, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(done.stdout)
    assert document["objectives"] == ["p90_ttft_ms <= 60 ms"]
    arms = [each["arm"] for each in document["capacities"]]
    assert arms == [
        "baseline workload.output_len=8",
        "guided top_k=5 workload.output_len=8",
        "baseline workload.output_len=16",
        "guided top_k=5 workload.output_len=16",
    ]
    assert {point["size"] for point in document["points"]} >= {1.0, 4.0}
    assert all(set(point["metrics"]) >= {"p90_ttft_ms", "output_throughput"} for point in document["points"])
    written, picture = (tmp_path / name for name in document["files"])
    assert json.loads(written.read_text())["points"] == document["points"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_sweep_whose_every_load_breaks_a_limit_ends_with_1(tmp_path: Path) -> None:
    done = benchctl("simulate", "sweep", *LOADS, "--max-concurrency", "2", "--slo", "ttft_ms=0.1", cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "no load keeps the limits, not even 2 slots" in done.stdout
    assert "all times are simulated, with cost model lenvm-h100 (qwen2.5-7b on h100-sxm)" in done.stdout


@pytest.mark.parametrize(
    ("args", "says"),
    [
        pytest.param(["--rate", "1", "--max-concurrency", "2"], "give one of the two", id="two kinds of load"),
        pytest.param(["--rate", "1,x"], "expected numbers separated by commas", id="no number"),
        pytest.param(["--rate", "0"], "above 0", id="no load"),
        pytest.param(["--largest", "rate"], "give --slo", id="no limit"),
        pytest.param(["--rate", "1", "--slo", "ttft_p99_ms=1"], "did you mean 'p99_ttft_ms'?", id="metric"),
        pytest.param(["--rate", "1", "--slo", "p99_ttft_ms=1"], "raise workload.num_prompts", id="few requests"),
    ],
)
def test_a_sweep_that_cannot_be_made_is_an_error_of_usage(tmp_path: Path, args: list[str], says: str) -> None:
    done = benchctl("simulate", "sweep", *LOADS, *args, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert says in done.stderr
    assert not (tmp_path / "results").exists()


def test_a_trace_may_be_kept_as_a_summary_alone(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = "".join(f"2023-11-16 18:00:{i:02d}.0000000,{100 + i},{10 + i}\n" for i in range(20))
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    scale = [
        "--set",
        f"workload.path={trace}",
        "--set",
        "workload.num_prompts=500",
        "--set",
        "workload.repeat=true",
    ]
    command = ["simulate", "--profile", "azure-replay", "--keep", "summary", *scale]
    done = benchctl(*command, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(done.stdout)
    (run,) = document["runs"]
    assert run["metrics"]["num_completed"] == 500
    assert run["costs"] == "cost model roofline (llama-3.1-8b on h100-sxm)"
    directory = tmp_path / document["directory"]
    assert sorted(path.name for path in directory.iterdir()) == ["metrics.json", "profile.yaml"]
    assert json.loads((directory / "metrics.json").read_text())["runs"] == [run]
    other = benchctl("simulate", "--profile", "ci-smoke", "--keep", "summary", cwd=tmp_path)
    assert other.returncode == 2
    assert "keep the requests" in other.stderr


def test_natural_lengths_are_simulated_first_where_a_profile_replays_them(tmp_path: Path) -> None:
    replay = [
        "--set",
        "stop=replay-natural",
        "--set",
        "workload.samples_as=requests",
        "--set",
        "workload.output_len=null",
    ]
    done = benchctl("simulate", "--profile", "ci-smoke", "--blocks", 1, *replay, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [run["state"] for run in document["runs"]] == ["done"] * 2
    assert "natural lengths first" in done.stderr
    assert (
        len([path for path in (tmp_path / "results").glob("*/*/manifest.json") if "latest" not in path.parts]) == 2
    )
