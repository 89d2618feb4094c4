"""``benchctl run`` and its resume through the command line: real processes, real HTTP, real files."""

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.cli import (
    WITH_PICTURES,
    WITHOUT_SERVERS,
    benchctl,
    document,
    only_result,
    plain_environment,
    preloaded_directory,
    printed,
    refusal,
    started,
)
from support.strangers import SECRET, files_with, replace_entry, surround, tree_of
from support.waiting import wait_until

from benchctl.records.directory import ResultDirectory

pytestmark = pytest.mark.slow
SMALL = ["--set", "workload.num_prompts=2", "--set", "workload.output_len=24", "--set", "gates=[]"]
EXACT = ["ci-smoke", "--engine", "sim-exact", "--quiet", *SMALL]
QUICK = [*EXACT, "--set", "engine.options.time_scale=20"]
SLOW = [*EXACT, "--set", "engine.options.time_scale=2"]
"""So slow that a signal surely finds the load under way."""
KEY = "hf_" + "s3cr3t" * 5


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
    done = benchctl("run", *QUICK, "--json", cwd=cwd, HF_TOKEN=KEY, OPENAI_API_KEY=KEY, **WITH_PICTURES)
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
    assert states_of(measured) == ["done"] * 4
    logs = {f"{name}.jsonl" for name in ("requests", "steps", "steps.raw", "host", "prometheus")}
    for run in (measured / "runs").iterdir():
        assert {*logs, "server.log", "result.json"} <= {path.name for path in run.iterdir()}
    manifest = read(measured / "manifest.json")
    assert (manifest["state"], manifest["dataset"]) == ("done", "generated")
    assert [warning["code"] for warning in manifest["warnings"]] == ["dataset-substituted"]
    assert list((measured / "plots").glob("*.png"))
    files = [path for path in measured.rglob("*") if path.is_file() and path.suffix != ".png"]
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []


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
        names = ("ratio", "ci_low", "ci_high")
        assert [change[name] for name in names] == [metrics[change["metric"]][name] for name in names]
    assert (metrics["step_ms"]["ratio"] > 2, metrics["step_ms"]["blocks"]) == (True, 2)
    assert f"{verdict['arm']}  {verdict['sentence']}" in stderr
    assert line_after(stderr, "more blocks:") == commands["more_blocks"]
    assert "a verdict takes at least 6 blocks" in stderr
    assert "\ninconclusive: guided against baseline (simulated): " in stderr
    assert commands["more_blocks"] == f"benchctl run --resume {printed_document['directory']} --blocks 6"


def test_the_core_of_the_simulator_gives_the_requests_and_the_steps_of_a_seed_that_it_gives_over_http(
    measured: Path, tmp_path: Path
) -> None:
    for name, options in (("s", []), ("other", ["--seed", 99])):
        printed("simulate", "--profile", *QUICK, *options, "-o", name, cwd=tmp_path)
    steps = sorted(path.relative_to(measured) for path in measured.glob("runs/*/steps.jsonl"))
    assert len(steps) == 4
    for path in (Path("requests.jsonl"), *steps):
        assert (measured / path).read_bytes() == (tmp_path / "s" / path).read_bytes(), path
    assert (measured / "requests.jsonl").read_bytes() != (tmp_path / "other" / "requests.jsonl").read_bytes()
    assert "request" in refusal("compare", "s:guided", "other:guided", cwd=tmp_path, code=4)


def test_two_arms_that_differ_in_an_option_compare_without_a_second_declaration(tmp_path: Path) -> None:
    small = "variants.small={server: {max_num_seqs: 2, max_num_batched_tokens: 64}}"
    done = benchctl("simulate", "--profile", *EXACT, "--blocks", "1", "--set", small, "-o", "r", cwd=tmp_path)
    assert (done.returncode, "allowed_differences" in done.stderr) == (0, False), done.stderr
    compared = printed("compare", "r:baseline", "r:small", cwd=tmp_path, code=3)
    assert "max_num_seqs 2 against 1024" in compared


def test_the_plan_stands_before_the_runs_also_in_a_pipe_and_no_line_of_it_is_long(tmp_path: Path) -> None:
    command = [str(preloaded_directory() / "benchctl"), "run", "flag", "--quiet"]
    env = {**os.environ, **plain_environment(tmp_path), **WITHOUT_SERVERS}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    told, first, _ = subprocess.run(command, cwd=tmp_path, env=env, check=True, **streams).stdout.partition(
        "[1/12]"
    )
    assert (first, "6 blocks detect a change of" in told) == ("[1/12]", True)
    assert max(map(len, told.splitlines())) <= 120


def test_a_dry_run_prints_the_order_and_how_far_from_balanced_it_is_and_measures_nothing(tmp_path: Path) -> None:
    named = (["topk-sweep"], ["--profile", "topk-sweep"], ["topk-sweep", "-p", "topk-sweep"])
    (plan,) = {printed("run", *names, "--dry-run", cwd=tmp_path) for names in named}
    for text in ("000-b0-", "36 runs", "estimated", "order: balanced, each arm runs in each position"):
        assert text in plan
    assert (
        "order: not fully balanced; mean positions differ from the baseline's by up to 0.43, the counts of an arm "
        "in two positions by up to 1, the counts of one arm after another by up to 1; balanced with 6 or 12 blocks"
    ) in printed("run", "topk-sweep", "--dry-run", "--blocks", "7", cwd=tmp_path)
    assert not (tmp_path / "results").exists()


def test_no_verdict_is_printed_where_every_run_failed_and_output_names_the_directory_itself(tmp_path: Path) -> None:
    broken = ["--set", "engine.options.start_delay_s=30", "--set", "timeouts.ready_s=0.5", "--blocks", "1"]
    output = printed("run", *QUICK, *broken, "-o", "mine", cwd=tmp_path, code=5)
    texts = ("2 failed", "page: ", "Verdicts", "compare: ")
    assert [text in output for text in texts] == [True, True, False, False]
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert "mine: is not empty" in refusal("run", *QUICK, "-o", "mine", cwd=tmp_path)


def test_a_port_that_is_taken_is_an_error_of_usage(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        assert str(port) in refusal("run", *EXACT, "--set", f"engine.options.port={port}", cwd=tmp_path)


def test_a_damaged_directory_is_refused_by_compare_and_shown_as_far_as_it_goes(copy: Path) -> None:
    damaged = next((copy / "runs").glob("*-guided-*")) / "requests.jsonl"
    damaged.write_bytes(damaged.read_bytes()[:-30])
    assert "requests.jsonl" in refusal("compare", f"{copy}:baseline", f"{copy}:guided", code=4)
    shown = benchctl("show", copy)
    assert (shown.returncode, "baseline" in shown.stdout, "requests.jsonl:" in shown.stderr) == (4, True, True)


def load_goes_on(cwd: Path, run: int) -> bool:
    """Whether the run's log holds steps that are no warm-up."""
    logs = cwd.glob(f"results/*/*/runs/{run:03d}-*/steps.raw.jsonl")
    return any(b'"is_warmup"' not in line for log in logs for line in log.read_bytes().splitlines())


def is_used(results: Path) -> bool:
    """Whether a process on this machine still writes into the result directory."""
    processes = psutil.process_iter(["cmdline"])
    return any(str(results) in " ".join(process.info["cmdline"] or []) for process in processes)


def ended(process: "subprocess.Popen[str]", code: int, cwd: Path) -> tuple[Path, str]:
    """The results and the messages of a command that ends with ``code``, once nothing uses the results any more."""
    _, stderr = process.communicate(timeout=120)
    assert (process.returncode, "Traceback" in stderr) == (code, False), stderr
    results = only_result(cwd)
    wait_until("the end of all that uses the results", lambda: not is_used(results), 120)
    return results, stderr


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
        results, _ = ended(process, 5, tmp_path)
    assert states_of(results) == ["failed", "done"]
    first = min((results / "runs").iterdir())
    failed = read(first / "run.json")
    assert (failed["failure"]["cause"], "SIGKILL" in failed["failure"]["message"]) == ("server-died", True)
    records = [json.loads(line) for line in (first / "requests.jsonl").read_text().splitlines()]
    assert len([record for record in records if not record.get("is_warmup")]) == failed["num_sent"] == 2
    assert (first / "steps.jsonl").stat().st_size > 0
    assert f"[1/1] {first.name}: done in" in resumed(results)
    assert read(first / "run.json")["attempt"] == 2
    assert (first / "attempt-1" / "requests.jsonl").exists()
    assert read(results / "manifest.json")["state"] == "done"


def test_an_interrupt_ends_with_130_and_leaves_a_directory_that_resumes(tmp_path: Path) -> None:
    with started("run", *SLOW, "--blocks", "1", cwd=tmp_path) as process:
        wait_until("the load of the second run", lambda: load_goes_on(tmp_path, 1), 120)
        process.send_signal(signal.SIGINT)
        results, _ = ended(process, 130, tmp_path)
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
        _, stderr = ended(process, 130, tmp_path)
    assert "another benchctl is measuring into this directory" in second
    assert "Continue with: benchctl run --resume" in stderr
    assert not any(member.is_running() for member in family)


def test_a_resume_first_records_what_became_of_a_run_whose_process_was_killed(tmp_path: Path) -> None:
    with started("run", *SLOW, "--blocks", "1", cwd=tmp_path) as process:
        wait_until("the load of the first run", lambda: load_goes_on(tmp_path, 0), 120)
        process.kill()
        results, _ = ended(process, -signal.SIGKILL, tmp_path)
    (record,) = results.glob("runs/*/run.json")
    assert (read(results / "manifest.json")["state"], read(record)["state"]) == ("running", "running")
    assert {"ready_ns", "warmup_start_ns"} <= read(record)["times"].keys(), "noted until its load"
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
        results, stderr = ended(process, 5, tmp_path)
    assert "/run.json: File too large" in stderr
    assert "ulimit -f unlimited, then continue with --resume; what was measured is kept" in stderr
    assert read(results / "manifest.json")["state"] == "running"
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


SETTINGS = (
    "workload.num_prompts=2", "workload.samples_per_prompt=2", "workload.samples_as=requests",
    "workload.max_tokens=2000", "engine.options.time_scale=50",
)  # fmt: skip
NATURAL = ["--profile", "ci-smoke", "--engine", "sim-exact", "--quiet", "--blocks", "1"]
NATURAL += [word for setting in SETTINGS for word in ("--set", setting)]


@pytest.fixture(scope="module", name="replayed")
def _replayed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One finished experiment whose answers were forced to natural lengths that it measured itself."""
    cwd = tmp_path_factory.mktemp("lengths")
    output = printed("run", *NATURAL, "--set", "stop=replay-natural", cwd=cwd)
    assert "natural lengths first: baseline once, results in results/ci-smoke-lengths/" in output
    return cwd / "results"


def test_the_lengths_that_the_baseline_measured_are_those_of_every_run_and_a_resume_measures_none(
    replayed: Path,
) -> None:
    pilot_path, path = ((replayed / name / "latest").resolve() for name in ("ci-smoke-lengths", "ci-smoke"))
    pilot, results = ResultDirectory(pilot_path), ResultDirectory(path)
    assert (pilot.manifest().stop, results.manifest().stop) == ("natural", "replay-natural")
    assert results.manifest().lengths_from == f"results/ci-smoke-lengths/{pilot_path.name}"
    natural = {request.request_id: request.max_tokens for request in results.prepared_requests()}
    assert len(set(natural.values())) > 1
    for run in (*pilot.runs(), *results.runs()):
        assert natural == {r.request_id: r.completion_tokens for r in run.requests() if not r.is_warmup}
    assert {run["past_eos_frac"] for run in read(path / "summary.json")["runs"]} == {0.0}
    next(path.glob("runs/*-guided-*/run.json")).unlink()
    printed("run", "--quiet", "--resume", path, cwd=replayed.parent)
    assert set(states_of(path)) == {"done"}
    assert len([*pilot_path.parent.iterdir()]) == 2  # it, and the link to it


def test_a_dry_run_says_that_lengths_would_be_measured_first_and_those_of_other_prompts_are_refused(
    replayed: Path, tmp_path: Path
) -> None:
    output = printed("run", *NATURAL, "--set", "stop=replay-natural", "--dry-run", cwd=tmp_path)
    assert "first the natural lengths of 4 answers, in a result directory of 'ci-smoke-lengths':" in output
    pilot = f"workload.lengths_from={replayed / 'ci-smoke-lengths' / 'latest'}"
    other = ("--set", "stop=replay-natural", "--set", pilot, "--seed", "99")
    assert " has another prompt as" in refusal("run", *NATURAL, *other, cwd=tmp_path)
    assert not (tmp_path / "results").exists()


def test_a_run_is_measured_again_beside_the_links_that_stood_for_its_files(copy: Path) -> None:
    surround(copy)
    run = next(path.name for path in sorted((copy / "runs").iterdir()))
    for name, kind in {
        "run.json": "a link to a file like it",
        "server.log": "a link to another file",
        "steps.jsonl": "a link to a device",
        "steps.raw.jsonl": "a link to another file",
        "requests.jsonl": "a FIFO",
        "host.jsonl": "a link to nothing",
    }.items():
        replace_entry(copy, f"runs/{run}/{name}", kind)
    for name in (".manifest.json.partial", ".digests.json.partial", f"runs/{run}/.run.json.partial", "report.html"):
        replace_entry(copy, name, "a link to another file")
    before = tree_of(copy.parent, copy)
    resumed(copy)
    assert tree_of(copy.parent, copy) == before
    assert files_with(copy, SECRET) == []
    assert (copy / "runs" / run / "attempt-1" / "server.log").is_symlink()
    printed("show", copy)


def test_no_folder_of_a_resumed_experiment_is_a_link(copy: Path) -> None:
    surround(copy)
    for entry in ("plots", "runs"):
        replace_entry(copy, entry, "a link to a file like it")
        before = tree_of(copy.parent, copy)
        assert f"{copy / entry} is a link, not a directory" in refusal(
            "run", "--resume", copy, "--quiet", code=4, **WITH_PICTURES
        )
        assert tree_of(copy.parent, copy) == before
