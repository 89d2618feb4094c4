"""The main job through the command line: real processes, real HTTP, real files."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from support.cli import benchctl, only_result, plain_environment

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.slow
SMALL = ["--set", "workload.num_prompts=2", "--set", "workload.output_len=24"]
EXACT = ["run", "--profile", "ci-smoke", "--engine", "sim-exact", "--quiet", *SMALL]


def state_of(run: Path) -> dict[str, object]:
    return json.loads((run / "run.json").read_text())  # type: ignore[no-any-return]


def steps_of(results: Path) -> dict[str, bytes]:
    return {path.parent.name: path.read_bytes() for path in sorted(results.glob("runs/*/steps.jsonl"))}


def assert_no_process_is_left(results: Path) -> None:
    """No process on this machine still writes into the result directory."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        users = [p.info["pid"] for p in psutil.process_iter(["pid", "cmdline"]) if mentions(p, str(results))]
        if not users:
            return
        time.sleep(0.05)
    raise AssertionError(f"processes {users} still use {results}")


def mentions(process: psutil.Process, text: str) -> bool:
    return text in " ".join(process.info["cmdline"] or [])


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One small finished experiment that several tests read."""
    cwd = tmp_path_factory.mktemp("measured")
    done = benchctl(*EXACT, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return only_result(cwd)


def test_a_run_leaves_the_whole_result_directory(measured: Path) -> None:
    for name in ["manifest.json", "profile.yaml", "plan.json", "requests.jsonl", "summary.csv", "summary.json"]:
        assert (measured / name).stat().st_size > 0
    runs = sorted((measured / "runs").iterdir())
    assert len(runs) == 4
    for run in runs:
        assert state_of(run)["state"] == "done"
        for name in ["requests", "steps", "steps.raw", "host", "prometheus"]:
            assert (run / f"{name}.jsonl").exists(), name
        for name in ["server.log", "result.json"]:
            assert (run / name).exists(), name
    manifest = json.loads((measured / "manifest.json").read_text())
    assert manifest["state"] == "done"
    assert manifest["dataset"] == "generated"
    assert [warning["code"] for warning in manifest["warnings"]] == ["dataset-substituted"]
    assert list((measured / "plots").glob("*.png"))


def test_the_same_profile_and_seed_give_the_same_requests_and_the_same_steps(
    measured: Path, tmp_path: Path
) -> None:
    again = benchctl(*EXACT, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    second = only_result(tmp_path)
    assert (measured / "requests.jsonl").read_bytes() == (second / "requests.jsonl").read_bytes()
    assert steps_of(measured) == steps_of(second)
    assert len(steps_of(second)) == 4


def test_no_secret_reaches_a_result_directory(tmp_path: Path) -> None:
    secret = "hf_" + "s3cr3t" * 5
    done = benchctl(*EXACT, "--blocks", "1", cwd=tmp_path, HF_TOKEN=secret, OPENAI_API_KEY=secret)
    assert done.returncode == 0, done.stderr
    files = [path for path in only_result(tmp_path).rglob("*") if path.is_file() and path.suffix != ".png"]
    assert files
    assert not [path for path in files if secret.encode() in path.read_bytes()]


def test_another_seed_is_another_request_set(measured: Path, tmp_path: Path) -> None:
    plan = benchctl(*EXACT, "--seed", "99", "--blocks", "1", cwd=tmp_path)
    assert plan.returncode == 0, plan.stderr
    assert (measured / "requests.jsonl").read_bytes() != (only_result(tmp_path) / "requests.jsonl").read_bytes()


def test_two_blocks_show_the_price_of_guidance_and_give_no_verdict(measured: Path) -> None:
    done = benchctl("compare", f"{measured}:baseline", f"{measured}:guided", "--json", cwd=measured)
    document = json.loads(done.stdout)
    assert done.returncode == document["exit_code"] == 3
    assert document["verdict"] == "inconclusive"
    by_name = {metric["name"]: metric for metric in document["metrics"]}
    assert by_name["step_ms"]["ratio"] > 2
    assert by_name["step_ms"]["blocks"] == 2


def test_two_arms_that_differ_in_an_option_compare_without_a_second_declaration(tmp_path: Path) -> None:
    small = "variants.small={server: {max_num_seqs: 2, max_num_batched_tokens: 64}}"
    done = benchctl(*EXACT, "--blocks", "1", "--set", small, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "allowed_differences" not in done.stderr
    path = only_result(tmp_path)
    compared = benchctl("compare", f"{path}:baseline", f"{path}:small", cwd=tmp_path)
    assert compared.returncode == 3, compared.stderr
    assert "declared difference: server.max_num_seqs: 1024 against 2" in compared.stdout


def test_a_dry_run_prints_the_order_and_measures_nothing(tmp_path: Path) -> None:
    done = benchctl("run", "--profile", "topk-sweep", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "000-b0-" in done.stdout
    assert "36 runs" in done.stdout
    assert "estimated" in done.stdout
    assert "order: balanced, each arm runs in each position and after each other arm equally often" in done.stdout
    assert not (tmp_path / "results").exists()


def test_a_dry_run_says_how_far_from_balanced_an_order_is_and_what_would_be_balanced(tmp_path: Path) -> None:
    done = benchctl("run", "--profile", "topk-sweep", "--dry-run", "--blocks", "7", cwd=tmp_path)
    (said,) = [line for line in done.stdout.splitlines() if line.startswith("order: ")]
    assert said == (
        "order: not fully balanced; mean positions differ from the baseline's by up to 0.43, the counts of an arm "
        "in two positions by up to 1, the counts of one arm after another by up to 1; balanced with 6 or 12 blocks"
    )


@contextlib.contextmanager
def running(cwd: Path, *args: str) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(
        [sys.executable, "-m", "benchctl", *args],
        cwd=cwd,
        env={**os.environ, **plain_environment(cwd)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def wait_until(what: str, happens: Callable[[], bool], timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if happens():
            return
        time.sleep(0.02)
    raise AssertionError(f"{what} did not happen within {timeout_s} s")


def load_goes_on(cwd: Path, run: int) -> bool:
    """Whether the run's log holds steps that are no warm-up."""
    logs = (cwd / "results").glob(f"*/*/runs/{run:03d}-*/steps.raw.jsonl")
    return any(b'"is_warmup"' not in line for log in logs for line in log.read_bytes().splitlines())


SLOW_ENGINE = ["--set", "engine.options.time_scale=2"]
"""So slow that a signal surely finds the load under way."""


def test_a_killed_server_fails_its_run_and_the_sweep_goes_on_and_resume_completes_it(tmp_path: Path) -> None:
    with running(tmp_path, *EXACT, *SLOW_ENGINE) as process:
        wait_until("the first load", lambda: load_goes_on(tmp_path, 0))
        children = psutil.Process(process.pid).children(recursive=True)
        (server,) = [child for child in children if child.cmdline()[1:3] == ["-m", "benchctl.sim"]]
        server.kill()
        _, stderr = process.communicate(timeout=120)
    assert process.returncode == 5, stderr
    results = only_result(tmp_path)
    first, *others = sorted((results / "runs").iterdir())
    failed = state_of(first)
    assert failed["state"] == "failed"
    failure = failed["failure"]
    assert isinstance(failure, dict)
    assert failure["cause"] == "server-died"
    assert "SIGKILL" in failure["message"]
    records = [json.loads(line) for line in (first / "requests.jsonl").read_text().splitlines()]
    measured_records = [record for record in records if not record.get("is_warmup")]
    assert len(measured_records) == failed["num_sent"] == 2
    assert (first / "steps.jsonl").stat().st_size > 0
    assert [state_of(run)["state"] for run in others] == ["done"] * 3
    assert_no_process_is_left(results)

    resumed = benchctl("run", "--resume", str(results), "--quiet", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert state_of(first)["state"] == "done"
    assert state_of(first)["attempt"] == 2
    assert (first / "attempt-1" / "requests.jsonl").exists()
    assert f"[1/1] {first.name}: done in" in resumed.stderr
    assert json.loads((results / "manifest.json").read_text())["state"] == "done"


@pytest.mark.parametrize(
    ("moment", "signum"),
    [
        ("start-up", signal.SIGINT),
        ("load", signal.SIGTERM),
        ("second run", signal.SIGINT),
        pytest.param("start-up", signal.SIGTERM, marks=pytest.mark.nightly),
        pytest.param("load", signal.SIGINT, marks=pytest.mark.nightly),
        pytest.param("second run", signal.SIGTERM, marks=pytest.mark.nightly),
    ],
)
def test_an_interrupt_at_any_moment_ends_with_130_and_leaves_a_directory_that_resumes(
    tmp_path: Path, signum: signal.Signals, moment: str
) -> None:
    slow = [*SLOW_ENGINE, "--set", "engine.options.start_delay_s=1"] if moment == "start-up" else SLOW_ENGINE
    moments = {
        "start-up": lambda: bool(list((tmp_path / "results").glob("*/*/runs/*/server.raw.log"))),
        "load": lambda: load_goes_on(tmp_path, 0),
        "second run": lambda: load_goes_on(tmp_path, 1),
    }
    with running(tmp_path, *EXACT, *slow, "--blocks", "1") as process:
        wait_until(moment, moments[moment])
        os.kill(process.pid, signum)
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    results = only_result(tmp_path)
    assert_no_process_is_left(results)
    assert json.loads((results / "manifest.json").read_text())["state"] == "interrupted"
    assert " interrupted " in benchctl("list", cwd=tmp_path).stdout
    shown = benchctl("show", str(results), cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    resumed = benchctl("run", "--resume", str(results), "--quiet", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert {state_of(run)["state"] for run in (results / "runs").iterdir()} == {"done"}


def test_killing_benchctl_itself_leaves_no_server_and_a_directory_that_resumes(tmp_path: Path) -> None:
    with running(tmp_path, *EXACT, *SLOW_ENGINE, "--blocks", "1") as process:
        wait_until("the first load", lambda: load_goes_on(tmp_path, 0))
        process.kill()
        process.communicate(timeout=30)
    results = only_result(tmp_path)
    assert_no_process_is_left(results)
    assert json.loads((results / "manifest.json").read_text())["state"] == "running"
    resumed = benchctl("run", "--resume", str(results), "--quiet", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert {state_of(run)["state"] for run in (results / "runs").iterdir()} == {"done"}


def test_resuming_refuses_another_profile(measured: Path) -> None:
    done = benchctl("run", "--profile", "aa", "--resume", str(measured), cwd=measured)
    assert done.returncode == 4
    assert "another profile" in done.stderr


def test_resuming_refuses_an_edited_request_set(tmp_path: Path) -> None:
    assert benchctl(*EXACT, "--blocks", "1", cwd=tmp_path).returncode == 0
    path = only_result(tmp_path) / "requests.jsonl"
    path.write_bytes(path.read_bytes().replace(b"user", b"User"))
    done = benchctl("run", "--resume", str(path.parent), cwd=tmp_path)
    assert done.returncode == 4
    assert "requests.jsonl was changed" in done.stderr


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-30])


def bad_inputs() -> Sequence[tuple[str, list[str], int, str]]:
    run = ["run", "--quiet", "--profile"]
    return [
        ("unknown key", [*run, "ci-smoke", "--set", "workload.num_promts=3"], 2, "num_prompts"),
        ("wrong type", [*run, "ci-smoke", "--set", "blocks=many"], 2, "blocks"),
        ("unknown profile", [*run, "topk-swep"], 2, "topk-sweep"),
        (
            "missing dataset",
            [*run, "ci-smoke", "--set", "workload.on_missing_dataset=fail"],
            2,
            "benchctl data fetch gsm8k",
        ),
        ("engine not installed", [*run, "ci-smoke", "--engine", "sglang-lenvm"], 2, "sglang-lenvm"),
        ("unknown engine", [*run, "ci-smoke", "--engine", "simm"], 2, "sim"),
        ("quick and blocks", [*run, "ci-smoke", "--quick", "--blocks", "3"], 2, "--quick"),
        ("no profile", ["run"], 2, "name a profile"),
        ("settings without profile", ["run", "--set", "a=1"], 2, "name it"),
        ("output is a file", [*run, "ci-smoke", "-o", "a-file"], 2, "a-file"),
        ("no result directory", ["compare", "here", "there"], 2, "here"),
        ("resume of nothing", ["run", "--resume", "nowhere"], 2, "nowhere"),
        ("two profiles", ["run", "aa", "--profile", "ci-smoke"], 2, "two profiles are named"),
        ("JSON of a plan", ["run", "ci-smoke", "--dry-run", "--json"], 2, "--dry-run"),
        ("unknown option", ["run", "--frobnicate"], 2, "frobnicate"),
    ]


@pytest.mark.parametrize(("name", "args", "code", "says"), bad_inputs(), ids=[case[0] for case in bad_inputs()])
def test_bad_input_gets_one_clear_message(tmp_path: Path, name: str, args: list[str], code: int, says: str) -> None:
    (tmp_path / "a-file").write_text("")
    done = benchctl(*args, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "results").exists()


def test_two_errors_at_once_are_reported_together(tmp_path: Path) -> None:
    profile = tmp_path / "mine.yaml"
    profile.write_text("extends: ci-smoke\nblocks: 0\nworkload:\n  num_promts: 3\n")
    done = benchctl("run", "--profile", "mine.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert "mine.yaml:2" in done.stderr
    assert "mine.yaml:4" in done.stderr


def test_a_port_that_is_taken_is_an_error_of_usage(tmp_path: Path) -> None:
    import socket

    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        done = benchctl(*EXACT, "--set", f"engine.options.port={port}", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert str(port) in done.stderr
    assert "Traceback" not in done.stderr


def test_damaged_and_foreign_directories_are_refused_by_compare_and_shown_as_far_as_they_go(tmp_path: Path) -> None:
    assert benchctl(*EXACT, cwd=tmp_path).returncode == 0
    results = only_result(tmp_path)
    sides = [f"{results}:baseline", f"{results}:guided"]
    damaged = next((results / "runs").glob("*-guided-*")) / "requests.jsonl"
    whole = damaged.read_bytes()
    truncate(damaged)
    compared = benchctl("compare", *sides, cwd=tmp_path)
    assert compared.returncode == 4
    assert "requests.jsonl:" in compared.stdout + compared.stderr
    shown = benchctl("show", str(results), cwd=tmp_path)
    assert shown.returncode == 4
    assert "baseline" in shown.stdout
    assert "requests.jsonl:" in shown.stderr
    damaged.write_bytes(whole)
    manifest = results / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"schema_version": 3', '"schema_version": 77'))
    newer = benchctl("compare", *sides, cwd=tmp_path)
    assert newer.returncode == 4
    assert "77" in newer.stdout + newer.stderr
    assert "Traceback" not in newer.stderr


def test_different_request_sets_are_not_compared(measured: Path, tmp_path: Path) -> None:
    assert benchctl(*EXACT, "--set", "workload.num_prompts=3", "--blocks", "1", cwd=tmp_path).returncode == 0
    done = benchctl("compare", f"{measured}:guided", f"{only_result(tmp_path)}:guided", cwd=tmp_path)
    assert done.returncode == 4
    assert "request" in done.stdout + done.stderr


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys, benchctl.cli.app; "
        "heavy = {'numpy', 'scipy', 'vl_convert', 'httpx', 'aiohttp', 'pydantic', 'psutil'} & set(sys.modules); "
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_version_is_printed() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchctl", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("benchctl 0.")
