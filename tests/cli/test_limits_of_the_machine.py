"""Limits of the machine: each is named by its true cause, with its remedy, before or after it has ended a run."""

import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from benchctl.measure.machine import ADDRESS_SPACE_BYTES, OWN_OPEN_FILES

ROOT = Path(__file__).parent.parent.parent
SIM = "--engine sim-exact --blocks 1 --quiet --set engine.options.time_scale=20"
STREAMS = "--set workload.num_prompts=64 --set workload.arrival.max_concurrency=64 --set workload.output_len=8"


def in_shell(line: str, cwd: Path, *, isolated: bool = False, **env: str) -> "subprocess.CompletedProcess[str]":
    """Run a line of bash; ``isolated`` with mounts of its own, as root of them."""
    return subprocess.run(
        [*(["unshare", "-rm"] if isolated else []), "bash", "-c", line],
        cwd=cwd,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "XDG_STATE_HOME": str(cwd / "state"),
            "benchctl": f"{sys.executable} -m benchctl",
            **env,
        },
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


@cache
def can_mount() -> bool:
    program = shutil.which("unshare")
    return program is not None and (
        subprocess.run([program, "-rm", "mount", "-t", "tmpfs", "none", "/mnt"], check=False).returncode == 0
    )


needs_mounts = pytest.mark.skipif(
    "not can_mount()", reason="needs mounts of its own: permissions do not bind the superuser"
)


def is_one_message(done: "subprocess.CompletedProcess[str]") -> bool:
    """Whether stderr holds one message of benchctl, beside warnings, and nothing of Python's."""
    lines = [line for line in done.stderr.splitlines() if not line.startswith("warning: ")]
    return len(lines) == 1 and lines[0].startswith("benchctl: ")


def test_limits_too_low_are_named_with_their_remedy_before_anything_is_measured(tmp_path: Path) -> None:
    streams = "64 requests are open at once, each an open file, and a process may have"
    for limit, words in (
        ("-n 16", [f"{streams} 16", f"ulimit -n {64 + OWN_OPEN_FILES}"]),
        ("-n 64", [f"{streams} 64", f"ulimit -n {64 + OWN_OPEN_FILES}", "max_concurrency to at most 32"]),
        ("-v 600000", ["ulimit -v unlimited"]),
        ("-f 1", ["File too large; raise the limit of the size of a file: ulimit -f unlimited"]),
    ):
        done = in_shell(f"ulimit {limit}; $benchctl run ci-smoke {SIM} {STREAMS}", tmp_path)
        assert done.returncode == 2, done.stderr
        assert is_one_message(done), done.stderr
        assert [text for text in words if text not in done.stderr] == []
        assert "kept" not in done.stderr
    assert list(tmp_path.glob("results/*/*/runs/*")) == []


def test_a_plan_and_the_doctor_name_the_same_limit(tmp_path: Path) -> None:
    plan = in_shell(f"ulimit -n 64; $benchctl run ci-smoke --dry-run {STREAMS}", tmp_path)
    assert plan.returncode == 0
    assert "not to be measured on this machine: 64 requests are open at once" in plan.stderr
    enough = in_shell(f"ulimit -v {ADDRESS_SPACE_BYTES // 1000}; $benchctl run ci-smoke --dry-run", tmp_path)
    assert "address space" not in enough.stderr
    doctor = in_shell("ulimit -n 64; ulimit -v 800000; $benchctl doctor --json", tmp_path)
    checks = {check["name"]: check for check in json.loads(doctor.stdout)["checks"]}
    assert checks["open files"]["finding"] == "64 at once, enough for 32 requests in flight"
    assert "ulimit -n 65536" in checks["open files"]["remedy"]
    assert "a process may reserve 819 MB of address space" in checks["memory"]["finding"]
    assert checks["memory"]["state"] == "missing"
    assert doctor.returncode == 2


@pytest.mark.slow
def test_as_many_streams_as_the_message_says_are_measured_and_a_soft_limit_is_raised(tmp_path: Path) -> None:
    for limit in ("ulimit -n 64; fewer=--set=workload.arrival.max_concurrency=32", "ulimit -S -n 64"):
        done = in_shell(f"{limit}; $benchctl run ci-smoke {SIM} {STREAMS} $fewer", tmp_path)
        assert (done.returncode, "runs: 2 done" in done.stdout) == (0, True), done.stderr


@pytest.mark.slow
def test_an_open_loop_that_meets_the_limit_is_warned_of_and_its_cause_is_on_record(tmp_path: Path) -> None:
    """The number of streams of an open loop is unknown before; here the server waits for requests that fail."""
    loop = {"kind": "poisson", "request_rate": 400, "max_concurrency": "null"}
    settings = " ".join(f"--set workload.arrival.{key}={value}" for key, value in loop.items())
    line = f"ulimit -n 64; $benchctl run ci-smoke {SIM} --set workload.num_prompts=200 {settings}"
    done = in_shell(f"{line} --set timeouts.stall_s=4", tmp_path)
    assert done.returncode == 5, done.stderr
    assert "warning: 200 requests may be open at once" in done.stderr
    assert "the server hangs" not in done.stderr
    for record in tmp_path.glob("results/ci-smoke/2*/runs/*/run.json"):
        failure = json.loads(record.read_bytes())["failure"]
        assert failure["cause"] == "too-many-open-files", failure
        assert "raise the limit: ulimit -n 65536" in failure["message"]


def test_a_limit_of_processes_is_named(tmp_path: Path) -> None:
    if os.getuid() == 0:
        pytest.skip("the superuser has no limit of processes")
    done = in_shell(f"ulimit -u 1; $benchctl run ci-smoke {SIM}", tmp_path)
    assert "no further process or thread can be started" in done.stderr


@pytest.mark.slow
def test_a_limit_on_the_size_of_files_that_ends_a_server_is_the_cause_on_record(tmp_path: Path) -> None:
    done = in_shell(f"ulimit -f 10; $benchctl run ci-smoke {SIM} --set workload.num_prompts=2", tmp_path)
    assert done.returncode == 5, done.stderr
    for record in tmp_path.glob("results/ci-smoke/2*/runs/*/run.json"):
        failure = json.loads(record.read_bytes())["failure"]
        assert failure["cause"] == "file-too-large", failure
        assert "ulimit -f unlimited" in failure["message"]


@needs_mounts
def test_a_disk_too_small_for_the_results_is_named_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    mount = "mount -t tmpfs -o size=1m none small"
    many = "--set workload.num_prompts=64 --set workload.output_len=400"
    done = in_shell(f"{mount}; $benchctl run ci-smoke {SIM} {many} --output-dir small", tmp_path, isolated=True)
    assert done.returncode == 2, done.stderr
    assert is_one_message(done)
    assert re.search(r"small: the experiment writes about [\d.]+ MB, and 1\.0 MB are free there; ", done.stderr)


@pytest.mark.slow
@needs_mounts
def test_a_disk_that_fills_up_in_mid_run_is_the_cause_on_record(tmp_path: Path) -> None:
    """The estimate cannot know what else is written to the disk: here, a file that leaves nothing."""
    (tmp_path / "small").mkdir()
    line = (
        "mount -t tmpfs -o size=16m none small; "
        "(until ls small/ci-smoke/2*/runs/*/server.raw.log >/dev/null 2>&1; do sleep 0.01; done; "
        "cat /dev/zero > small/filler 2>/dev/null) & "
        f"$benchctl run ci-smoke {SIM} --output-dir small --set engine.options.start_delay_s=2; code=$?; wait; "
        "rm small/filler; cat small/ci-smoke/2*/runs/*/run.json; $benchctl list small/ci-smoke --json; exit $code"
    )
    done = in_shell(line, tmp_path, isolated=True)
    assert done.returncode == 5, done.stderr
    assert "No space left on device; free space there, then continue with --resume" in done.stderr
    assert '"state": "interrupted"' in done.stdout or '"state": "failed"' in done.stdout
    assert "Traceback" not in done.stderr


@needs_mounts
def test_results_that_cannot_be_written_to_are_read_reported_elsewhere_and_not_resumed(tmp_path: Path) -> None:
    begun = in_shell(f"$benchctl run ci-smoke {SIM} --set workload.num_prompts=1 --output r", tmp_path)
    assert begun.returncode == 0, begun.stderr
    mount = "rm -f r/runs/000*/run.json; mount --bind r r; mount -o remount,ro,bind r"
    for command, remedy in (
        ("report r", "Read-only file system; write the report elsewhere with -o DIR, or copy r"),
        ("run --resume r", "Read-only file system; copy r to where files can be written, and name the copy"),
    ):
        refused = in_shell(f"{mount}; $benchctl {command}", tmp_path, isolated=True)
        assert (refused.returncode, is_one_message(refused)) == (2, True), refused.stderr
        assert remedy in refused.stderr
    elsewhere = in_shell(f"{mount}; $benchctl report r -o page && $benchctl show r", tmp_path, isolated=True)
    assert elsewhere.returncode == 0, elsewhere.stderr
    assert (tmp_path / "page" / "report.html").is_file()
