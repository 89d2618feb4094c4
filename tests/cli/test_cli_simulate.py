"""``benchctl simulate``: real processes and files, no server."""

import json
import signal
from pathlib import Path

import psutil
import pytest
from support.cli import document, only_result, printed, started
from support.waiting import wait_until

pytestmark = pytest.mark.slow
SMALL = ["--set", "workload.num_prompts=2", "--set", "workload.output_len=24"]
EXACT = ["--profile", "ci-smoke", "--engine", "sim-exact", "--quiet", *SMALL]
LONG = ["--profile", "topk-sweep", "--quiet"]
LONG += ["--set", "workload.num_prompts=60", "--set", "workload.output_len=900"]


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One small simulated experiment that several tests read."""
    cwd = tmp_path_factory.mktemp("simulated")
    printed("simulate", *EXACT, "--jobs", 1, cwd=cwd)
    return only_result(cwd)


def test_a_simulated_experiment_says_so_and_other_commands_read_it(simulated: Path) -> None:
    assert [path.name for path in simulated.parent.glob("latest*")] == ["latest-simulated"]
    (row,) = printed("list", cwd=simulated.parents[2]).splitlines()[1:]
    assert f"ci-smoke/{simulated.name}  " in row
    assert row.split()[-4:] == ["done", "inconclusive", "4/4", "simulated"]
    manifest = json.loads((simulated / "manifest.json").read_text())
    (note,) = (warning for warning in manifest["warnings"] if warning["code"] == "simulated")
    assert "cost model lenvm-h100 (qwen2.5-7b on h100-sxm)" in note["message"]
    shown = printed("show", simulated)
    assert "'benchctl simulate' ran the core of the simulator" in shown
    for command in ("verify", "report"):
        printed(command, simulated)
    compared = document("compare", f"{simulated}:baseline", f"{simulated}:guided", code=3)
    (step,) = [metric for metric in compared["metrics"] if metric["name"] == "step_ms"]
    assert (step["ratio"] > 2, step["blocks"]) == (True, 2)


def test_several_processes_give_the_same_records_as_one(simulated: Path, tmp_path: Path) -> None:
    ended = document("simulate", *EXACT, "--jobs", 2, cwd=tmp_path)
    again = only_result(tmp_path)
    logs = sorted(path.relative_to(simulated) for path in simulated.glob("runs/*/*s.jsonl"))
    assert len(logs) >= 8
    assert [path for path in logs if (again / path).read_bytes() != (simulated / path).read_bytes()] == []
    assert (tmp_path / ended["directory"]).resolve() == again.resolve()
    assert [run["state"] for run in ended["runs"]] == ["done"] * 4


@pytest.mark.parametrize(("jobs", "number"), [(1, signal.SIGINT), (2, signal.SIGTERM)])
def test_an_interrupt_ends_with_130_and_keeps_what_was_simulated(tmp_path: Path, jobs: int, number: int) -> None:
    with started("simulate", *LONG, "--jobs", jobs, cwd=tmp_path) as process:
        wait_until("the records of a run", lambda: list(tmp_path.glob("results/*/*/runs/*/requests.jsonl")), 120)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=60)
    assert (process.returncode, "Traceback" in stderr) == (130, False), stderr
    results = only_result(tmp_path)
    assert json.loads((results / "manifest.json").read_text())["state"] == "interrupted"
    assert {json.loads(path.read_text())["state"] for path in results.glob("runs/*/run.json")} <= {"done", "failed"}
    printed("show", results)


def test_a_simulating_process_that_is_killed_is_named_and_leaves_no_run_in_progress(tmp_path: Path) -> None:
    with started("simulate", *LONG, "--jobs", 2, cwd=tmp_path) as process:
        wait_until("a run", lambda: list(tmp_path.glob("results/topk-sweep/2*/runs/*/run.json")), 120)
        children = psutil.Process(process.pid).children()
        next(child for child in children if "spawn_main" in str(child.cmdline())).kill()
        _, stderr = process.communicate(timeout=120)
    assert process.returncode == 5, stderr
    assert "benchctl: a process that simulates was ended from outside" in stderr
    (listed,) = document("list", tmp_path / "results" / "topk-sweep")["results"]
    assert listed["state"] == "failed"


LOADS = ["--profile", "ci-smoke", "--engine", "sim-exact", "--set", "workload.num_prompts=40", "--jobs", "1"]


def test_a_sweep_finds_the_largest_rate_under_a_limit_and_draws_the_curve(tmp_path: Path) -> None:
    limit = ["--slo", "p90_ttft_ms=60", "--largest", "rate", "--set", "workload.output_len=8,16"]
    swept = document("simulate", "sweep", *LOADS, "--rate", "1,4", *limit, cwd=tmp_path)
    assert swept["objectives"] == ["p90_ttft_ms <= 60 ms"]
    assert [each["arm"] for each in swept["capacities"]] == [
        f"{arm} workload.output_len={length}" for length in (8, 16) for arm in ("baseline", "guided top_k=5")
    ]
    assert {point["size"] for point in swept["points"]} >= {1.0, 4.0}
    written, picture = (tmp_path / name for name in swept["files"])
    assert json.loads(written.read_text())["points"] == swept["points"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_sweep_whose_every_load_breaks_a_limit_ends_with_1(tmp_path: Path) -> None:
    limit = ["--max-concurrency", "2", "--slo", "ttft_ms=0.1"]
    output = printed("simulate", "sweep", *LOADS, *limit, cwd=tmp_path, code=1)
    assert "no load keeps the limits, not even 2 slots" in output
    assert "all times are simulated, with cost model lenvm-h100 (qwen2.5-7b on h100-sxm)" in output


def test_a_trace_may_be_kept_as_a_summary_alone(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = "".join(f"2023-11-16 18:00:{i:02d}.0000000,{100 + i},{10 + i}\n" for i in range(20))
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    scale = [f"workload.path={trace}", "workload.num_prompts=500", "workload.repeat=true"]
    settings = [word for setting in scale for word in ("--set", setting)]
    kept = document("simulate", "--profile", "azure-replay", "--keep", "summary", *settings, cwd=tmp_path)
    (run,) = kept["runs"]
    assert run["metrics"]["num_completed"] == 500
    directory = tmp_path / kept["directory"]
    assert sorted(path.name for path in directory.iterdir()) == ["metrics.json", "profile.yaml"]
    assert json.loads((directory / "metrics.json").read_text())["runs"] == [run]


def test_natural_lengths_are_simulated_first_where_a_profile_replays_them(tmp_path: Path) -> None:
    settings = ("stop=replay-natural", "workload.samples_as=requests", "workload.output_len=null")
    replay = [word for setting in settings for word in ("--set", setting)]
    ended = document("simulate", "--profile", "ci-smoke", "--blocks", 1, *replay, cwd=tmp_path)
    assert [run["state"] for run in ended["runs"]] == ["done"] * 2
    assert len(list((tmp_path / "results").glob("*/2*/manifest.json"))) == 2
