"""Tasks that end before their block: nothing is lost, nothing is measured twice, and ``--resume`` completes.

A run counts as measured twice when it has an earlier attempt that was complete, so that its measurement was thrown
away.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from support.set_clock import SetClock, needs_compiler
from support.slurm import GPUS, Slurm, attempts, states, until, write_profile

from benchctl.records.directory import ResultDirectory

pytestmark = pytest.mark.slow
LONG = 1200
"""Tokens of an answer whose run takes some seconds."""


def thrown_away(directory: Path) -> list[str]:
    """Runs whose earlier attempt had been complete."""
    return [
        str(record.parent)
        for record in directory.glob("blocks/*/runs/*/attempt-*/run.json")
        if json.loads(record.read_text())["state"] == "done"
    ]


def is_complete(directory: Path) -> bool:
    return states(directory) == {"done"} and not thrown_away(directory)


def ended(slurm: Slurm, command: "subprocess.Popen[str]", patience_s: float = 120) -> str:
    """The output of a command that ends by itself, while tasks that were queued again begin soon."""
    until(lambda: slurm.begin_soon() or command.poll() is not None, "the command to end", patience_s)
    return command.communicate(timeout=10)[0]


def first_done(directory: Path, block: int) -> object:
    """True once the first run of a block is done."""
    results = ResultDirectory(directory)
    planned = next(run for run in results.plan().runs if run.block == block)
    run = results.run(planned.run_id)
    return run.is_begun() and run.read().state == "done"


def test_a_cancelled_task_is_not_submitted_again_and_resume_completes(slurm: Slurm, tmp_path: Path):
    profile = write_profile(tmp_path / "p.yaml", blocks=2, tokens=LONG)
    command = slurm.start("run", profile, "--on", "slurm", "-o", "d", cwd=tmp_path)
    slurm.measuring(1)
    job = next(iter(slurm.queue())).partition("_")[0]
    until(lambda: first_done(tmp_path / "d", 1), "the first run of block 1")
    slurm.command("scancel", f"{job}_1")
    output = command.communicate(timeout=120)[0]
    assert command.returncode == 130, output
    assert "block 1: the task was cancelled" in output
    assert f"submitted as job {job}" in output
    assert output.count("submitted as job") == 1, output
    resumed = slurm.benchctl("run", "--resume", "d", "--on", "slurm", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "submitted as job" in resumed.stdout
    assert ": block 1;" in resumed.stdout
    assert is_complete(tmp_path / "d")
    assert set(attempts(tmp_path / "d").values()) <= {1, 2}


def test_the_block_of_a_killed_process_is_submitted_again(slurm: Slurm, tmp_path: Path):
    profile = write_profile(tmp_path / "p.yaml", blocks=2, tokens=LONG)
    command = slurm.start("run", profile, "--on", "slurm", "-o", "d", cwd=tmp_path)
    measuring = slurm.measuring(0)
    until(lambda: first_done(tmp_path / "d", 0), "the first run of block 0")
    measuring.send_signal(signal.SIGKILL)
    output = command.communicate(timeout=120)[0]
    assert command.returncode == 0, output
    assert output.count("submitted as job") == 2
    assert is_complete(tmp_path / "d")
    assert set(attempts(tmp_path / "d").values()) <= {1, 2}


@contextmanager
def node_that_comes_back(slurm: Slurm, name: str) -> Iterator[psutil.Process]:
    """The daemon of a node, which is started again afterwards."""
    daemon = psutil.Process(int((slurm.directory / f"slurmd-{name}.pid").read_text()))
    restart = daemon.cmdline()
    try:
        yield daemon
    finally:
        psutil.Popen(restart, env=os.environ | slurm.environment).wait(timeout=30)
        with suppress(subprocess.CalledProcessError):  # it may be up by itself
            slurm.command("scontrol", "update", f"NodeName={name}", "State=RESUME")
        until(
            lambda: slurm.command("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == "2", "both nodes to be idle"
        )


def test_the_blocks_of_a_lost_node_are_measured_on_another(slurm: Slurm, tmp_path: Path):
    profile = write_profile(tmp_path / "p.yaml", blocks=4, tokens=LONG)
    command = slurm.start("run", profile, "--on", "slurm", "-o", "d", cwd=tmp_path)
    until(lambda: "node1" in slurm.command("squeue", "--noheader", "--format", "%N"), "a task on node1")
    until(lambda: slurm.processes_on("node1"), "processes on node1")
    with node_that_comes_back(slurm, "node1") as daemon:
        for process in (daemon, *slurm.processes_on("node1")):
            if process.is_running():
                process.send_signal(signal.SIGKILL)
        slurm.command("scontrol", "update", "NodeName=node1", "State=DOWN", "Reason=lost")
        output = ended(slurm, command)
        assert command.returncode == 0, output
        assert is_complete(tmp_path / "d")


@pytest.mark.nightly
def test_a_node_that_only_lost_its_daemon_goes_on_measuring_and_nobody_measures_its_block_twice(
    slurm: Slurm, tmp_path: Path
):
    profile = write_profile(tmp_path / "p.yaml", blocks=1, tokens=LONG)
    command = slurm.start("run", profile, "--on", "slurm", "-o", "d", cwd=tmp_path)
    measuring = slurm.measuring(0)
    node = measuring.environ()["SLURMD_NODENAME"]
    with node_that_comes_back(slurm, node) as daemon:
        daemon.kill()
        slurm.command("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost")
        until(lambda: "PENDING" in slurm.queue().values(), "the job to be queued again")
        assert measuring.is_running()
        output = ended(slurm, command)
        assert command.returncode == 0, output
        assert is_complete(tmp_path / "d")
        assert set(attempts(tmp_path / "d").values()) == {1}
        assert {run.read().node_name for run in ResultDirectory(tmp_path / "d").runs()} == {node}


def test_a_task_that_is_warned_of_its_time_limit_goes_on_as_the_same_job(slurm: Slurm, tmp_path: Path):
    profile = write_profile(tmp_path / "p.yaml", blocks=1, tokens=LONG)
    command = slurm.start("run", profile, "--on", "slurm", "-o", "d", cwd=tmp_path)
    slurm.measuring(0)
    until(lambda: first_done(tmp_path / "d", 0), "the first run of block 0")
    (job,) = slurm.queue()
    time.sleep(2)  # into the second run
    slurm.command("scancel", "--signal=USR2", job)  # as Slurm does before the limit, to every process of the step
    until(lambda: slurm.queue().get(job) == "PENDING", "the job to be queued again")
    output = ended(slurm, command)
    assert command.returncode == 0, output
    assert output.count("submitted as job") == 1, output
    assert is_complete(tmp_path / "d")
    assert set(attempts(tmp_path / "d").values()) <= {1, 2}


@pytest.mark.nightly  # three minutes: Slurm's shortest limit is one, and it warns up to a minute early
def test_a_block_that_takes_longer_than_its_job_goes_on_in_the_next(slurm: Slurm, tmp_path: Path):
    # Two runs of 28 s by the estimate fit into a minute; with the start of two servers they do not.
    profile = write_profile(tmp_path / "p.yaml", blocks=1, tokens=8400, time=1, warn_s=5)
    command = slurm.start("run", profile, "--on", "slurm", "-o", "d", cwd=tmp_path)
    output = ended(slurm, command, patience_s=240)
    assert command.returncode == 0, output
    assert is_complete(tmp_path / "d")
    logs = "".join(path.read_text() for path in (tmp_path / "d").glob("submissions/*/*_log.out"))
    assert "would take about" in logs or "block 0 was interrupted" in logs, "its first job was too short"


def test_a_task_that_is_queued_again_goes_on_with_its_block(slurm: Slurm, tmp_path: Path):
    profile = write_profile(tmp_path / "p.yaml", blocks=1, tokens=LONG)
    command = slurm.start("run", profile, "--on", "slurm", "-o", "d", cwd=tmp_path)
    slurm.measuring(0)
    until(lambda: first_done(tmp_path / "d", 0), "the first run of block 0")
    (job,) = slurm.queue()
    slurm.command("scontrol", "requeue", job)
    output = ended(slurm, command)
    assert command.returncode == 0, output
    assert output.count("submitted as job") == 1, output
    assert is_complete(tmp_path / "d")
    assert set(attempts(tmp_path / "d").values()) <= {1, 2}


def test_two_submissions_into_one_directory_measure_each_block_once(slurm: Slurm, tmp_path: Path):
    profile = write_profile(tmp_path / "p.yaml", blocks=4, tokens=60)
    prepared = slurm.benchctl("run", profile, "--prepare", "-o", "d", cwd=tmp_path)
    assert prepared.returncode == 0, prepared.stderr
    resume = ("run", "--resume", "d", "--on", "slurm")
    commands = [slurm.start(*resume, cwd=tmp_path) for _ in range(2)]
    outputs = [command.communicate(timeout=120)[0] for command in commands]
    assert [command.returncode for command in commands] == [0, 0], "\n".join(outputs)[-3000:]
    assert is_complete(tmp_path / "d")
    assert set(attempts(tmp_path / "d").values()) == {1}
    again = slurm.benchctl(*resume, "--detach", cwd=tmp_path)
    assert again.returncode == 0
    assert "submitted as job" not in again.stdout


def test_a_node_on_which_nothing_more_can_be_written_fails_its_blocks_alone(slurm: Slurm, tmp_path: Path):
    # A limit on the size of files is refused by the system as a full disk is, and can be set for one node.
    full = tmp_path / "full"
    full.touch()
    setup = [f"if [ -e {full} ] && [ $SLURMD_NODENAME = node1 ]; then ulimit -f 16; fi"]
    profile = write_profile(tmp_path / "p.yaml", blocks=2 * GPUS, tokens=LONG, setup=setup, cpus=2, resubmissions=0)
    first = slurm.benchctl("run", profile, "--on", "slurm", "-o", "d", cwd=tmp_path)
    assert first.returncode == 5, first.stdout + first.stderr
    done = [
        run.run_id for run in ResultDirectory(tmp_path / "d").plan().runs if is_done(tmp_path / "d", run.run_id)
    ]
    assert len(done) >= 2
    full.unlink()
    resumed = slurm.benchctl("run", "--resume", "d", "--on", "slurm", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert is_complete(tmp_path / "d")
    assert {attempts(tmp_path / "d")[run_id] for run_id in done} == {1}


def is_done(directory: Path, run_id: str) -> bool:
    run = ResultDirectory(directory).run(run_id)
    return run.is_begun() and run.read().state == "done"


@needs_compiler
def test_a_node_whose_clock_is_an_hour_off_measures_its_blocks_once(slurm: Slurm, tmp_path: Path):
    clock = SetClock(tmp_path)
    clock.set_by(-3600.0)
    python = tmp_path / "python"
    wrong = " ".join(f"{name}={value}" for name, value in clock.environment.items())
    python.write_text(f'#!/bin/sh\n[ "$SLURMD_NODENAME" = node1 ] && export {wrong}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    profile = write_profile(tmp_path / "p.yaml", blocks=4, tokens=60, cpus=2, python=str(python))
    ended = slurm.benchctl("run", profile, "--on", "slurm", "-o", "d", cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert is_complete(tmp_path / "d")
    assert set(attempts(tmp_path / "d").values()) == {1}
    records = [json.loads(path.read_text()) for path in (tmp_path / "d").glob("blocks/*/runs/*/run.json")]
    hours = {record["node"]["name"]: record["started_at"][11:13] for record in records if "started_at" in record}
    assert len(hours) == 2
