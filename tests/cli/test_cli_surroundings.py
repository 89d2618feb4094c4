"""What a shell, a terminal or another process does to benchctl changes neither its verdict nor its results."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parent.parent.parent
COMMAND = [sys.executable, "-m", "benchctl"]
SHORT = ["run", "--profile", "ci-smoke", "--engine", "sim-exact", "--blocks", "1", "--quiet"]
TINY = [*SHORT, "--set", "workload.num_prompts=1", "--set", "workload.output_len=8"]


def in_shell(line: str, cwd: Path, **env: str) -> "subprocess.CompletedProcess[str]":
    """Run a line of bash in which ``$benchctl`` is the command."""
    return subprocess.run(
        ["bash", "-c", line],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "benchctl": " ".join(COMMAND), **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("reader", ["true", "head -1"])
@pytest.mark.parametrize(("command", "code"), [("profiles list", 0), ("profiles validate aa no-such-name", 2)])
def test_a_reader_that_leaves_changes_no_exit_code_and_leaves_no_traceback(
    tmp_path: Path, command: str, code: int, reader: str
) -> None:
    done = in_shell(f"$benchctl {command} | {reader}; exit ${{PIPESTATUS[0]}}", tmp_path)
    assert done.returncode == code
    assert "Error" not in done.stderr
    assert "Broken pipe" not in done.stderr


def test_a_terminal_without_our_signs_gets_escapes(tmp_path: Path) -> None:
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "own.yaml").write_text("extends: aa\ndescription: 1 ± 2\n", encoding="utf-8")
    done = in_shell("$benchctl profiles list", tmp_path, PYTHONIOENCODING="ascii", LC_ALL="C")
    assert done.returncode == 0, done.stderr
    assert r"1 \xb1 2" in done.stdout


def test_a_full_device_behind_the_output_is_one_message(tmp_path: Path) -> None:
    done = in_shell("$benchctl profiles list > /dev/full", tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "the output: No space left on device; free space there, or name another directory" in done.stderr
    assert "kept" not in done.stderr


def test_a_short_output_that_cannot_be_written_is_no_success(tmp_path: Path) -> None:
    assert in_shell("$benchctl --version > /dev/full", tmp_path).returncode == 2


def test_a_current_directory_that_is_gone_is_named(tmp_path: Path) -> None:
    done = in_shell("mkdir gone; cd gone; rmdir ../gone; $benchctl profiles list", tmp_path)
    assert done.returncode == 2
    assert done.stderr.endswith("\nbenchctl: the current directory was deleted; cd to another one\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    "closed", [*(pytest.param(each, marks=pytest.mark.nightly) for each in ("<&-", ">&-", "2>&-")), "<&- >&- 2>&-"]
)
def test_an_experiment_runs_with_closed_streams(tmp_path: Path, closed: str) -> None:
    done = in_shell(f"$benchctl {' '.join(TINY)} {closed}", tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "results").glob("ci-smoke/2*/runs/*/result.json"))) == 2


def started(cwd: Path, *args: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*COMMAND, *args],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for(happens: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
def test_a_terminal_that_closes_ends_the_experiment_in_good_order(tmp_path: Path) -> None:
    with started(tmp_path, *SHORT, "--set", "engine.options.start_delay_s=20") as process:
        wait_for(lambda: bool(list(tmp_path.glob("results/*/*/runs/*/server.raw.log"))))
        wait_for(lambda: len(psutil.Process(process.pid).children(recursive=True)) > 1)
        family = psutil.Process(process.pid).children(recursive=True)  # the supervisor and the server
        process.send_signal(signal.SIGHUP)
        _, stderr = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Continue with: benchctl run --resume" in stderr
    assert not any(member.is_running() for member in family)


@pytest.mark.slow
def test_an_interrupt_while_modules_are_being_loaded_ends_with_130(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import signal, sys, threading, os, time\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'benchctl.profile.load':\n"
        "            exec('os.kill(os.getpid(), signal.SIGINT); time.sleep(1)')\n"
        "sys.meta_path.insert(0, Interrupting())\n"
    )
    done = in_shell("exec $benchctl profiles validate aa", tmp_path, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("option", ["--label x", "--output-dir elsewhere", "-o x", "--aa"])
def test_resuming_refuses_options_that_it_could_not_honour(tmp_path: Path, option: str) -> None:
    done = in_shell(f"$benchctl run --resume results/x {option}", tmp_path)
    assert done.returncode == 2
    assert "--resume continues results/x as it was begun: leave out --aa, --label" in done.stderr


@pytest.mark.slow
def test_resuming_refuses_a_directory_that_is_being_measured_into(tmp_path: Path) -> None:
    with started(tmp_path, *SHORT, "--set", "engine.options.start_delay_s=30") as process:
        wait_for(lambda: bool(list(tmp_path.glob("results/*/2*/runs/*/server.raw.log"))))
        second = in_shell("$benchctl run --resume results/ci-smoke/latest", tmp_path)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=120)
    assert second.returncode == 2
    assert "another benchctl is measuring into this directory" in second.stderr
    assert process.returncode == 130


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("primary_metrics=[step_mz]", "primary_metrics: no metric is called 'step_mz'; did you mean 'step_ms'?"),
        ("hardware=h1000", "hardware: unknown hardware 'h1000': name one of h100-sxm"),
        ("blocks=99999999999", "blocks: is 99999999999; it must be at most 10000"),
        ("workload.num_prompts=5000000", "workload.num_prompts: is 5000000; it must be at most 1000000"),
        ("workload.samples_per_prompt=129", "asks for 129 samples in one request, which takes at most 128; set"),
        ("workload.samples_per_prompt=500000", "asks for 1500000 outputs, more than 1000000; lower num_prompts"),
        ("engine.options.time_scale=1e-300", "time_scale: is 1e-300; it must be at least 1e-06"),
        ("engine.options.max_num_seqs=9000", "max_num_batched_tokens is 8192, below max_num_seqs 9000: a step"),
        ("engine.options.cost_model=llm-mock", "variants.guided.server: cost_model llm-mock cannot price a value"),
        ("workload.arrival.request_rate=1e-300", "request_rate: is 1e-300; it must be at least 1e-06"),
    ],
)
def test_what_could_only_fail_later_is_refused_before_anything_is_measured(
    tmp_path: Path, setting: str, says: str
) -> None:
    for command in ("profiles validate ci-smoke", "run --dry-run --profile ci-smoke"):
        done = in_shell(f"$benchctl {command} --set '{setting}'", tmp_path)
        assert done.returncode == 2
        assert says in done.stderr


def has_launched(record: Path) -> bool:
    """Whether a run's record says when its server was started."""
    return "launch_ns" in json.loads(record.read_bytes()).get("times", {})


@pytest.mark.slow
def test_files_that_cannot_grow_any_more_are_told_with_the_remedy_and_a_way_to_go_on(tmp_path: Path) -> None:
    with started(tmp_path, *TINY, "--set", "engine.options.start_delay_s=3") as process:
        # From the launch until the server is ready nothing is written.
        wait_for(lambda: any(has_launched(path) for path in tmp_path.glob("results/*/2*/runs/*/run.json")))
        (log,) = tmp_path.glob("results/*/2*/runs/*/server.raw.log")
        results = log.parents[2]
        psutil.Process(process.pid).rlimit(psutil.RLIMIT_FSIZE, (0, 0))
        _, stderr = process.communicate(timeout=120)
    assert process.returncode == 5
    assert f"results/ci-smoke/{results.name}/runs/{log.parent.name}/run.json: File too large" in stderr
    assert "ulimit -f unlimited, then continue with --resume; what was measured is kept" in stderr
    (listed,) = json.loads(in_shell("$benchctl list results/ci-smoke --json", tmp_path).stdout)["results"]
    assert json.loads((results / "manifest.json").read_bytes())["state"] == "running"
    assert listed["state"] == "interrupted"
    assert "interrupted · 0 of 2 runs done" in in_shell(f"$benchctl show {results}", tmp_path).stdout
    again = in_shell(f"$benchctl run --quiet --resume {results}", tmp_path)
    assert again.returncode == 0, again.stderr


@pytest.mark.slow
def test_resuming_repeats_a_run_whose_record_cannot_be_read_and_keeps_what_it_left(tmp_path: Path) -> None:
    assert in_shell(f"$benchctl {' '.join(TINY)}", tmp_path).returncode == 0
    (record, *_) = sorted(tmp_path.glob("results/ci-smoke/2*/runs/*/run.json"))
    record.write_text('{"state": "do')
    again = in_shell("$benchctl run --quiet --resume results/ci-smoke/latest", tmp_path)
    assert again.returncode == 0, again.stderr
    assert (record.parent / "attempt-1" / "run.json").read_text() == '{"state": "do'
    assert again.stderr.count("done in") == 1


@pytest.mark.slow
def test_resuming_first_records_what_became_of_a_run_whose_process_is_gone(tmp_path: Path) -> None:
    with started(tmp_path, *TINY, "--set", "engine.options.start_delay_s=4") as process:
        wait_for(lambda: any(has_launched(path) for path in tmp_path.glob("results/*/2*/runs/*/run.json")))
        process.kill()
        process.communicate(timeout=120)
    (record,) = tmp_path.glob("results/*/2*/runs/*/run.json")
    assert json.loads(record.read_bytes())["state"] == "running"
    shown = in_shell("$benchctl show results/ci-smoke/latest --json", tmp_path)
    assert '"interrupted"' in shown.stdout
    again = in_shell("$benchctl run --quiet --resume results/ci-smoke/latest", tmp_path)
    assert again.returncode == 0, again.stderr
    earlier = json.loads((record.parent / "attempt-1" / "run.json").read_bytes())
    assert (earlier["state"], earlier["failure"]["cause"]) == ("failed", "interrupted")


@pytest.mark.slow
def test_a_resume_of_latest_stays_with_its_directory_when_a_newer_experiment_begins(tmp_path: Path) -> None:
    line = f"$benchctl {' '.join(TINY)}"
    assert in_shell(f"{line} --set engine.options.start_delay_s=1", tmp_path).returncode == 0
    (first,) = tmp_path.glob("results/ci-smoke/2*")
    for run in (first / "runs").iterdir():
        (run / "run.json").unlink()
    with started(tmp_path, "run", "--quiet", "--resume", "results/ci-smoke/latest") as process:
        wait_for(lambda: bool(list(first.glob("runs/*/attempt-1"))))
        (first.parent / "latest").unlink()
        _, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert [path.name for path in first.parent.iterdir()] == [first.name]
