"""The main job through the command line: real processes, real HTTP, real files."""

import json
import shlex
import shutil
import signal
import socket
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.cli import benchctl, document, only_result, printed, refusal, started
from support.waiting import wait_until

pytestmark = pytest.mark.slow
SMALL = ["--set", "workload.num_prompts=2", "--set", "workload.output_len=24", "--set", "gates=[]"]
EXACT = ["ci-smoke", "--engine", "sim-exact", "--quiet", *SMALL]
QUICK = [*EXACT, "--set", "engine.options.time_scale=20"]
SLOW = [*EXACT, "--set", "engine.options.time_scale=2"]
"""So slow that a signal surely finds the load under way."""
SECRET = "hf_" + "s3cr3t" * 5


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def states_of(results: Path) -> list[str]:
    return [read(path)["state"] for path in sorted(results.glob("runs/*/run.json"))]


def line_after(text: str, begin: str) -> str:
    (line,) = [line for line in text.splitlines() if line.startswith(begin)]
    return line.removeprefix(begin).strip()


@pytest.fixture(scope="module", name="screening")
def _screening(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """A small finished experiment of two blocks, what ``run --json`` printed, and its stderr."""
    cwd = tmp_path_factory.mktemp("measured")
    done = benchctl("run", *QUICK, "--json", cwd=cwd, HF_TOKEN=SECRET, OPENAI_API_KEY=SECRET)
    assert done.returncode == 0, done.stderr
    return only_result(cwd), json.loads(done.stdout), done.stderr


@pytest.fixture(name="measured")
def _measured(screening: tuple[Path, dict[str, Any], str]) -> Path:
    return screening[0]


@pytest.fixture(name="copy")
def _copy(measured: Path, tmp_path: Path) -> Path:
    path = tmp_path / "results" / "ci-smoke" / measured.name
    shutil.copytree(measured, path)
    (path.parent / "latest").symlink_to(path.name)
    return path


def test_a_run_leaves_the_whole_result_directory_without_a_secret(measured: Path) -> None:
    for name in ("manifest.json", "profile.yaml", "plan.json", "requests.jsonl", "summary.csv", "summary.json"):
        assert (measured / name).stat().st_size > 0
    runs = sorted((measured / "runs").iterdir())
    assert states_of(measured) == ["done"] * 4
    logs = {f"{name}.jsonl" for name in ("requests", "steps", "steps.raw", "host", "prometheus")}
    for run in runs:
        assert {*logs, "server.log", "result.json"} <= {path.name for path in run.iterdir()}
    manifest = read(measured / "manifest.json")
    assert (manifest["state"], manifest["dataset"]) == ("done", "generated")
    assert [warning["code"] for warning in manifest["warnings"]] == ["dataset-substituted"]
    assert list((measured / "plots").glob("*.png"))
    files = [path for path in measured.rglob("*") if path.is_file() and path.suffix != ".png"]
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []


def test_the_json_of_a_run_is_one_document_and_everything_else_is_on_stderr(
    screening: tuple[Path, dict[str, Any], str],
) -> None:
    path, printed_document, stderr = screening
    expected = {
        "directory": str(path.relative_to(path.parents[2])),
        "runs": {"done": 4, "suspect": 0, "failed": 0, "done_before": 0},
        "state": "done",
        "exit_code": 0,
        "verdict": "inconclusive",
    }
    assert {key: printed_document[key] for key in expected} == expected
    assert (path.parents[2] / printed_document["page"]).stat().st_size > 0
    assert "dataset-substituted" in {warning["code"] for warning in printed_document["warnings"]}
    for text in ("results in ", "runs: 4 done", "Verdicts against baseline", "page: "):
        assert text in stderr


def test_the_verdicts_of_a_run_are_those_of_compare_and_its_commands_work(
    screening: tuple[Path, dict[str, Any], str],
) -> None:
    path, printed_document, stderr = screening
    commands = printed_document["commands"]
    assert line_after(stderr, "compare:") == commands["compare"]
    _, *arguments = shlex.split(commands["compare"])
    whole = document(*arguments, cwd=path.parents[2], code=printed_document["verdict_exit_code"])
    (comparison,), (verdict,) = whole["comparisons"], printed_document["verdicts"]
    metrics = {metric["name"]: metric for metric in comparison["metrics"]}
    assert verdict["changes"]
    for change in verdict["changes"]:
        for key in ("ratio", "ci_low", "ci_high"):
            assert change[key] == metrics[change["metric"]][key]
    assert metrics["step_ms"]["ratio"] > 2
    assert metrics["step_ms"]["blocks"] == 2
    assert f"{verdict['arm']}  {verdict['sentence']}" in stderr
    assert "screening: 2 blocks give no verdict" in stderr
    last = line_after(stderr, "screening; a verdict takes at least 6 blocks")
    assert last.endswith(f": {commands['more_blocks']}")
    assert commands["more_blocks"] == f"benchctl run --resume {printed_document['directory']} --blocks 6"


def test_a_directory_alone_is_compared_as_its_two_sides_are(measured: Path) -> None:
    (alone,) = document("compare", measured, code=3)["comparisons"]
    one = document("compare", f"{measured}:guided", code=3)
    both = document("compare", f"{measured}:baseline", f"{measured}:guided", code=3)
    assert (alone.pop("is_control"), alone.pop("sides")) == (False, "guided against baseline")
    assert alone == one == both


def test_the_core_of_the_simulator_gives_the_requests_and_the_steps_of_a_seed_that_it_gives_over_http(
    measured: Path, tmp_path: Path
) -> None:
    for seed in (None, 99):
        printed(
            "simulate", "--profile", *QUICK, *(["--seed", seed] if seed else []), "-o", f"s{seed}", cwd=tmp_path
        )
    steps = sorted(path.relative_to(measured) for path in measured.glob("runs/*/steps.jsonl"))
    assert len(steps) == 4
    for path in (Path("requests.jsonl"), *steps):
        assert (measured / path).read_bytes() == (tmp_path / "sNone" / path).read_bytes(), path
    assert (measured / "requests.jsonl").read_bytes() != (tmp_path / "s99" / "requests.jsonl").read_bytes()
    assert "request" in refusal("compare", "sNone:guided", "s99:guided", cwd=tmp_path, code=4)


def test_two_arms_that_differ_in_an_option_compare_without_a_second_declaration(tmp_path: Path) -> None:
    small = "variants.small={server: {max_num_seqs: 2, max_num_batched_tokens: 64}}"
    done = benchctl("simulate", "--profile", *EXACT, "--blocks", "1", "--set", small, "-o", "r", cwd=tmp_path)
    assert (done.returncode, "allowed_differences" in done.stderr) == (0, False), done.stderr
    compared = printed("compare", "r:baseline", "r:small", cwd=tmp_path, code=3)
    assert "declared difference: server.max_num_seqs: 1024 against 2" in compared


def test_a_dry_run_prints_the_order_and_how_far_from_balanced_it_is_and_measures_nothing(tmp_path: Path) -> None:
    named = (["topk-sweep"], ["--profile", "topk-sweep"], ["topk-sweep", "-p", "topk-sweep"])
    (plan,) = {printed("run", *names, "--dry-run", cwd=tmp_path) for names in named}
    for text in (
        *("000-b0-", "36 runs", "estimated"),
        "order: balanced, each arm runs in each position and after each other arm equally often",
    ):
        assert text in plan
    assert (
        "order: not fully balanced; mean positions differ from the baseline's by up to 0.43, the counts of an arm "
        "in two positions by up to 1, the counts of one arm after another by up to 1; balanced with 6 or 12 blocks"
    ) in printed("run", "topk-sweep", "--dry-run", "--blocks", "7", cwd=tmp_path)
    assert not (tmp_path / "results").exists()


def test_no_verdict_is_printed_where_every_run_failed_and_output_names_the_directory_itself(tmp_path: Path) -> None:
    broken = ["--set", "engine.options.start_delay_s=30", "--set", "timeouts.ready_s=0.5", "--blocks", "1"]
    output = printed("run", *QUICK, *broken, "-o", "mine", cwd=tmp_path, code=5)
    assert "2 failed" in output
    assert "page: " in output
    assert not any(text in output for text in ("Verdicts", "compare: "))
    assert (tmp_path / "mine" / "manifest.json").is_file()
    assert not (tmp_path / "results").exists()
    assert "mine: is not empty" in refusal("run", *QUICK, "-o", "mine", cwd=tmp_path)


def test_a_port_that_is_taken_is_an_error_of_usage(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        assert str(port) in refusal("run", *EXACT, "--set", f"engine.options.port={port}", cwd=tmp_path)


def test_damaged_and_foreign_directories_are_refused_by_compare_and_shown_as_far_as_they_go(copy: Path) -> None:
    sides = [f"{copy}:baseline", f"{copy}:guided"]
    damaged = next((copy / "runs").glob("*-guided-*")) / "requests.jsonl"
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:-30])
    assert "requests.jsonl" in refusal("compare", *sides, code=4)
    shown = benchctl("show", copy)
    assert (shown.returncode, "baseline" in shown.stdout, "requests.jsonl:" in shown.stderr) == (4, True, True)
    damaged.write_bytes(whole)
    manifest = copy / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"schema_version": 3', '"schema_version": 77'))
    assert "77" in refusal("compare", *sides, code=4)


def load_goes_on(cwd: Path, run: int) -> bool:
    """Whether the run's log holds steps that are no warm-up."""
    logs = cwd.glob(f"results/*/*/runs/{run:03d}-*/steps.raw.jsonl")
    return any(b'"is_warmup"' not in line for log in logs for line in log.read_bytes().splitlines())


def is_used(results: Path) -> bool:
    """Whether a process on this machine still writes into the result directory."""
    processes = psutil.process_iter(["cmdline"])
    return any(str(results) in " ".join(process.info["cmdline"] or []) for process in processes)


def resumed(results: Path) -> str:
    """Messages of a resume after which every run is done."""
    done = benchctl("run", "--resume", results, "--quiet", cwd=results.parents[2])
    assert done.returncode == 0, done.stderr
    assert set(states_of(results)) == {"done"}
    return done.stderr


def test_a_killed_server_fails_its_run_and_the_sweep_goes_on_and_resume_completes_it(tmp_path: Path) -> None:
    with started("run", *SLOW, "--blocks", "1", cwd=tmp_path) as process:
        wait_until("the load of the first run", lambda: load_goes_on(tmp_path, 0), 120)
        children = psutil.Process(process.pid).children(recursive=True)
        (server,) = [child for child in children if child.cmdline()[1:3] == ["-m", "benchctl.sim"]]
        server.kill()
        _, stderr = process.communicate(timeout=120)
    assert process.returncode == 5, stderr
    results = only_result(tmp_path)
    assert states_of(results) == ["failed", "done"]
    first = min((results / "runs").iterdir())
    failed = read(first / "run.json")
    assert failed["failure"]["cause"] == "server-died"
    assert "SIGKILL" in failed["failure"]["message"]
    records = [json.loads(line) for line in (first / "requests.jsonl").read_text().splitlines()]
    assert len([record for record in records if not record.get("is_warmup")]) == failed["num_sent"] == 2
    assert (first / "steps.jsonl").stat().st_size > 0
    wait_until("the end of all that uses the results", lambda: not is_used(results), 120)
    assert f"[1/1] {first.name}: done in" in resumed(results)
    assert read(first / "run.json")["attempt"] == 2
    assert (first / "attempt-1" / "requests.jsonl").exists()
    assert read(results / "manifest.json")["state"] == "done"


def test_an_interrupt_ends_with_130_and_leaves_a_directory_that_resumes(tmp_path: Path) -> None:
    with started("run", *SLOW, "--blocks", "1", cwd=tmp_path) as process:
        wait_until("the load of the second run", lambda: load_goes_on(tmp_path, 1), 120)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    results = only_result(tmp_path)
    wait_until("the end of all that uses the results", lambda: not is_used(results), 120)
    assert read(results / "manifest.json")["state"] == "interrupted"
    assert " interrupted " in printed("list", cwd=tmp_path)
    printed("show", results)
    assert resumed(results).count("done in") == 1


def test_a_terminal_that_closes_ends_an_experiment_that_nobody_else_may_resume(tmp_path: Path) -> None:
    with started("run", *EXACT, "--set", "engine.options.start_delay_s=60", cwd=tmp_path) as process:
        wait_until("a log of a server", lambda: list(tmp_path.glob("results/*/2*/runs/*/server.raw.log")), 120)
        wait_until("its processes", lambda: len(psutil.Process(process.pid).children(recursive=True)) > 1, 120)
        family = psutil.Process(process.pid).children(recursive=True)  # the supervisor and the server
        second = refusal("run", "--resume", "results/ci-smoke/latest", cwd=tmp_path)
        process.send_signal(signal.SIGHUP)
        _, stderr = process.communicate(timeout=120)
    assert "another benchctl is measuring into this directory" in second
    assert process.returncode == 130
    assert "Continue with: benchctl run --resume" in stderr
    assert not any(member.is_running() for member in family)


def test_a_resume_first_records_what_became_of_a_run_whose_process_was_killed(tmp_path: Path) -> None:
    with started("run", *SLOW, "--blocks", "1", cwd=tmp_path) as process:
        wait_until("the load of the first run", lambda: load_goes_on(tmp_path, 0), 120)
        process.kill()
        process.communicate(timeout=30)
    results = only_result(tmp_path)
    wait_until("the end of all that uses the results", lambda: not is_used(results), 120)
    (record,) = results.glob("runs/*/run.json")
    assert (read(results / "manifest.json")["state"], read(record)["state"]) == ("running", "running")
    assert '"interrupted"' in printed("show", results, "--json")
    resumed(results)
    earlier = read(record.parent / "attempt-1" / "run.json")
    assert (earlier["state"], earlier["failure"]["cause"]) == ("failed", "interrupted")


def test_files_that_cannot_grow_any_more_are_told_with_the_remedy_and_a_way_to_go_on(tmp_path: Path) -> None:
    def has_launched() -> bool:  # from then until the server is ready nothing is written
        records = tmp_path.glob("results/*/2*/runs/*/run.json")
        return any("launch_ns" in read(path).get("times", {}) for path in records)

    with started(
        "run", *QUICK, "--blocks", "1", "--set", "engine.options.start_delay_s=3", cwd=tmp_path
    ) as process:
        wait_until("a launch", has_launched, 120)
        psutil.Process(process.pid).rlimit(psutil.RLIMIT_FSIZE, (0, 0))
        _, stderr = process.communicate(timeout=120)
    results = only_result(tmp_path)
    assert process.returncode == 5
    assert f"results/ci-smoke/{results.name}/runs/000-b0-" in stderr
    assert "/run.json: File too large" in stderr
    assert "ulimit -f unlimited, then continue with --resume; what was measured is kept" in stderr
    (listed,) = document("list", results.parent)["results"]
    assert (read(results / "manifest.json")["state"], listed["state"]) == ("running", "interrupted")
    assert "interrupted · 0 of 2 runs done" in printed("show", results)


def test_a_resume_of_latest_repeats_what_cannot_be_read_and_stays_when_a_newer_experiment_begins(
    copy: Path,
) -> None:
    first, second, *_ = sorted(copy.glob("runs/*/run.json"))
    first.write_text('{"state": "do')
    second.unlink()
    with started("run", "--quiet", "--resume", "results/ci-smoke/latest", cwd=copy.parents[2]) as process:
        wait_until("a second attempt", lambda: list(copy.glob("runs/*/attempt-1")), 120)
        (copy.parent / "latest").unlink()
        _, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert stderr.count("done in") == 2
    assert (first.parent / "attempt-1" / "run.json").read_text() == '{"state": "do'
    assert [path.name for path in copy.parent.iterdir()] == [copy.name]


def test_resuming_refuses_another_profile_and_an_edited_request_set(copy: Path) -> None:
    assert "another profile" in refusal("run", "--profile", "aa", "--resume", copy, code=4)
    path = copy / "requests.jsonl"
    path.write_bytes(path.read_bytes().replace(b"user", b"User"))
    assert "requests.jsonl was changed" in refusal("run", "--resume", copy, code=4)
