"""Blocks as tasks of a real Slurm: where they run, what they inherit, and what becomes of those that are lost.

Nothing is lost, nothing is measured twice: no run has an earlier attempt that was complete, so that its measurement
was thrown away. Where no Slurm can be started, the tests are skipped with the reason.
"""

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from support.set_clock import SetClock, needs_compiler
from support.slurm import Slurm, attempts, missing_slurm, running_slurm, states, submissions, until, write_profile

from benchctl.records.directory import ResultDirectory

pytestmark = pytest.mark.slow
LONG = 700
"""Tokens of an answer whose run takes some seconds."""
SECRET = "hf_abcdefghijklmnopqrstuvwxyz012345"
ON_SLURM = ("--on", "slurm", "-o", "d")
RESUME = ("run", "--resume", "d", "--on", "slurm")


@pytest.fixture(scope="session", name="cluster")
def _cluster() -> Iterator[Slurm]:
    if (reason := missing_slurm()) is not None:
        pytest.skip(reason)
    with running_slurm() as slurm:
        yield slurm


@pytest.fixture(name="slurm")
def _slurm(cluster: Slurm) -> Iterator[Slurm]:
    """The Slurm, whose queue is empty before and after a test."""
    yield cluster
    for words in (("scancel", "--me"), ("scancel", "--me", "--signal=KILL")):
        if cluster.queue():
            cluster.command(*words)
    cluster.wait_empty()


def records(directory: Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in directory.glob("blocks/*/runs/*/run.json")]


def is_complete(directory: Path) -> bool:
    earlier = directory.glob("blocks/*/runs/*/attempt-*/run.json")
    return states(directory) == {"done"} and "done" not in {
        json.loads(each.read_text())["state"] for each in earlier
    }


def one_arm(directory: Path, **options: object) -> Path:
    return write_profile(directory / "p.yaml", has_two_arms=False, **options)


def has_first_done(directory: Path, block: int) -> bool:
    results = ResultDirectory(directory)
    run = results.run(next(planned.run_id for planned in results.plan().runs if planned.block == block))
    return run.is_begun() and run.read().state == "done"


def test_two_submissions_measure_each_block_once_and_give_what_one_machine_gives(slurm: Slurm, tmp_path: Path):
    # Two cores of a node's four: two tasks fill a node, and the third goes to the second.
    setup = [f"env > {tmp_path}/env-$SLURM_ARRAY_TASK_ID"]
    profile = one_arm(tmp_path, blocks=3, tokens=24, cpus=2, setup=setup)
    here = slurm.benchctl("run", profile, "-o", "here", cwd=tmp_path)
    assert here.returncode == 0, here.stderr
    assert slurm.benchctl("run", profile, "--prepare", "-o", "d", cwd=tmp_path).returncode == 0
    of_login = {"DISPLAY": ":9", "SLURM_NTASKS": "7", "HF_TOKEN": SECRET}
    commands = [slurm.start(*RESUME, cwd=tmp_path, **of_login) for _ in range(2)]
    ended = [slurm.end(command) for command in commands]
    assert [code for code, _ in ended] == [0, 0], ended
    directory = tmp_path / "d"
    assert is_complete(directory)
    assert set(attempts(directory).values()) == {1}
    assert {record["node"]["name"] for record in records(directory)} == {"node0", "node1"}
    for name in ("plan.json", "requests.jsonl"):
        assert (tmp_path / "here" / name).read_bytes() == (directory / name).read_bytes()
    steps = {path.parent.name: path.read_bytes() for path in tmp_path.glob("here/runs/*/steps.jsonl")}
    assert len(steps) == 3
    assert {path.parent.name: path.read_bytes() for path in directory.glob("blocks/*/runs/*/steps.jsonl")} == steps

    assert list(submissions(directory)[0]["tasks"].values()) == [0, 1, 2]
    environment = (tmp_path / "env-0").read_text()
    assert re.search(r"^CUDA_VISIBLE_DEVICES=[01]$", environment, re.MULTILINE)
    assert f"HF_TOKEN={SECRET}" in environment
    assert "DISPLAY=" not in environment
    assert "SLURM_NTASKS=7" not in environment
    assert not [path for path in directory.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    script = next(directory.glob("submissions/*/*submission.sh"))
    assert "#SBATCH --array=0-2%3" in script.read_text()
    planned = slurm.benchctl("run", profile, "--on", "slurm", "--dry-run", cwd=tmp_path).stdout
    assert script.read_text().replace(str(script.parent), "DIR/submissions/UTC") in planned


def test_a_detached_command_leaves_nothing_behind_and_ctrl_c_ends_the_waiting_alone(slurm: Slurm, tmp_path: Path):
    profile = one_arm(tmp_path, blocks=1, tokens=LONG)
    code, output = slurm.end(slurm.start("run", profile, *ON_SLURM, "--detach", cwd=tmp_path))
    assert code == 0, output
    assert "progress: benchctl watch d" in output
    lines = [process.info["cmdline"] or () for process in psutil.process_iter(["cmdline"])]
    assert not [line for line in lines if str(profile) in line]
    slurm.measuring(0)
    waiting = slurm.start(*RESUME, cwd=tmp_path)
    assert waiting.stdout is not None
    assert any("block 0: queued or running already, as " in line for line in waiting.stdout)
    assert any(line.startswith("blocks: ") for line in waiting.stdout)
    waiting.send_signal(signal.SIGINT)
    code, output = slurm.end(waiting)
    assert code == 130, output
    assert "the tasks go on without this command" in output
    assert "cancel: scancel " in output
    assert slurm.benchctl("watch", "d", cwd=tmp_path).returncode == 0
    slurm.wait_empty()
    reported = slurm.benchctl(*RESUME, cwd=tmp_path)
    assert reported.returncode == 0, reported.stderr
    assert "submitted as job" not in reported.stdout
    assert "runs: " in reported.stdout
    assert is_complete(tmp_path / "d")


def test_blocks_whose_tasks_are_killed_warned_queued_again_or_cancelled_are_completed(slurm: Slurm, tmp_path: Path):
    directory = tmp_path / "d"
    profile = write_profile(tmp_path / "p.yaml", blocks=4, tokens=2 * LONG)
    command = slurm.start("run", profile, *ON_SLURM, cwd=tmp_path)
    measuring = slurm.measuring(0)
    job = next(iter(slurm.queue())).partition("_")[0]
    strikes = {
        0: lambda: measuring.send_signal(signal.SIGKILL),
        1: lambda: slurm.command("scancel", "--signal=USR2", f"{job}_1"),  # as Slurm does before the time limit
        2: lambda: slurm.command("scontrol", "requeue", f"{job}_2"),
        3: lambda: slurm.command("scancel", f"{job}_3"),
    }
    while strikes:
        block = until(lambda: [each for each in strikes if has_first_done(directory, each)], "a first run")[0]
        strikes.pop(block)()
    code, output = slurm.end(command)
    assert code == 130, output
    assert "block 3: the task was cancelled" in output
    assert re.findall(r"submitted as job \d+: (.*);", output) == ["blocks 0-3", "block 0"], output
    code, output = slurm.end(slurm.start(*RESUME, cwd=tmp_path))
    assert code == 0, output
    assert re.findall(r"submitted as job \d+: (.*);", output) == ["block 3"], output
    assert is_complete(directory)
    assert set(attempts(directory).values()) <= {1, 2}


@contextmanager
def node_that_comes_back(slurm: Slurm, name: str) -> Iterator[psutil.Process]:
    """The daemon of a node, which is started again afterwards."""
    daemon = psutil.Process(int((slurm.directory / f"slurmd-{name}.pid").read_text()))
    restart = daemon.cmdline()
    try:
        yield daemon
    finally:
        psutil.Popen(restart, env=os.environ | slurm.environment).wait(timeout=30)
        slurm.resume_nodes(name)


def test_the_block_of_a_lost_node_is_measured_on_another(slurm: Slurm, tmp_path: Path):
    command = slurm.start("run", one_arm(tmp_path, blocks=3, tokens=LONG), *ON_SLURM, cwd=tmp_path)
    until(lambda: slurm.processes_on("node1"), "processes on node1")
    with node_that_comes_back(slurm, "node1") as daemon:
        for process in (daemon, *slurm.processes_on("node1")):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        slurm.command("scontrol", "update", "NodeName=node1", "State=DOWN", "Reason=lost")
        code, output = slurm.end(command)
        assert code == 0, output
        assert is_complete(tmp_path / "d")


@needs_compiler
def test_a_full_disk_fails_the_blocks_of_its_node_alone_and_a_wrong_clock_none(slurm: Slurm, tmp_path: Path):
    # A limit on the size of files is refused by the system as a full disk is, and can be set for one node.
    full, python, clock = tmp_path / "full", tmp_path / "python", SetClock(tmp_path)
    full.touch()
    clock.set_by(-3600.0)
    wrong = " ".join(f"{name}={value}" for name, value in clock.environment.items())
    python.write_text(f'#!/bin/sh\n[ "$SLURMD_NODENAME" = node1 ] && export {wrong}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    profile = one_arm(
        tmp_path, blocks=3, tokens=LONG, cpus=2, resubmissions=0, python=str(python),
        setup=[f"if [ -e {full} ] && [ $SLURMD_NODENAME = node1 ]; then ulimit -f 16; fi"],
    )  # fmt: skip
    code, output = slurm.end(slurm.start("run", profile, *ON_SLURM, cwd=tmp_path))
    assert code == 5, output
    done = {record["run_id"] for record in records(tmp_path / "d") if record["state"] == "done"}
    assert len(done) >= 2
    full.unlink()
    slurm.command("scontrol", "update", "NodeName=node0", "State=DRAIN", "Reason=aside")
    try:
        code, output = slurm.end(slurm.start(*RESUME, cwd=tmp_path))
    finally:
        slurm.resume_nodes("node0")
    assert code == 0, output
    assert is_complete(tmp_path / "d")
    assert {attempts(tmp_path / "d")[run_id] for run_id in done} == {1}
    hours = {record["node"]["name"]: record["started_at"][11:13] for record in records(tmp_path / "d")}
    assert len(set(hours.values())) == len(hours) == 2
