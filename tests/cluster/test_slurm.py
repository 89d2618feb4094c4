"""Blocks as tasks of Slurm: the job script, what becomes of tasks, a machine without Slurm, and a real one.

Nothing is lost, nothing is measured twice: no run has an earlier attempt that was complete, so that its measurement
was thrown away. Where no Slurm can be started, the tests on it are skipped with the reason.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from unittest import mock

import psutil
import pytest
from support.cli import benchctl, refusal
from support.shared_directory import assert_whole, prepared_directory, records
from support.slurm import Slurm, missing_slurm, running_slurm, until, write_profile

from benchctl.cluster import slurm as slurm_module
from benchctl.cluster.slurm import (
    ArrayJob,
    BlocksOnSlurm,
    SlurmCommandError,
    is_passed_on,
    require_slurm,
    slurm_check,
)
from benchctl.errors import ProfileError, UsageError
from benchctl.profile.load import load_cluster, load_profile
from benchctl.profile.sections import ClusterSettings
from benchctl.records.directory import ResultDirectory, RunDirectory, Submission
from benchctl.records.writers import Owner, current_manifest

DIRECTORY = Path("/shared/results/d")


LONG = 700
"""Tokens of an answer whose run takes some seconds."""
SECRET = "hf_abcdefghijklmnopqrstuvwxyz012345"
ON_SLURM = ("--on", "slurm", "-o", "d")
RESUME = ("run", "--resume", "d", "--on", "slurm")


def array_job(directory: Path = DIRECTORY, num_gpus: int = 1, **keys: object) -> ArrayJob:
    settings = ClusterSettings.model_validate({"gpus_per_block": num_gpus, **keys})
    return ArrayJob(directory, load_profile("ci-smoke").model_copy(update={"cluster": settings}))


def script(num_blocks: int = 3, num_gpus: int = 1, **keys: object) -> str:
    return array_job(num_gpus=num_gpus, **keys).script(DIRECTORY / "submissions" / "x", num_blocks)


def test_each_key_has_its_line_and_one_without_a_value_has_none():
    text = script(
        partition="gpu", account="mine", qos="low", cpus=8, mem="64G", time="1-00:30:00", constraint="h100&ib",
        exclude="n[3,7]", setup=("module load cuda",), parallel=2, warn_s=90,
    )  # fmt: skip
    for line in (
        "--partition=gpu", "--account=mine", "--qos=low", "--cpus-per-task=8", "--mem=64G", "--time=1470",
        "--constraint='h100&ib'", "--exclude='n[3,7]'", "--gres=gpu:1", "--array=0-2%2", "--signal=USR2@90",
        "--requeue", "--open-mode=append",
    ):  # fmt: skip
        assert f"#SBATCH {line}\n" in text
    assert "\nmodule load cuda\n" in text
    assert " --cpus-per-task=8 " in text.partition("\nsrun ")[2]
    bare = script(num_blocks=1, num_gpus=0)
    words = ("partition", "account", "qos", "cpus", "mem", "--time", "constraint", "exclude", "gres", "--array")
    assert not [word for word in words if word in bare]
    pyxis = script(container="/images/b.sqsh", container_runtime="pyxis", python="/opt/bin/python")
    assert " --container-image=/images/b.sqsh --container-mounts=/shared/results/d:/shared/results/d " in pyxis
    assert " /opt/bin/python -u -m submitit.core._submit " in pyxis, "pyxis starts the task itself in the container"


def test_apptainer_runs_the_block_with_the_devices_and_the_directory(tmp_path: Path):
    path = prepared_directory(tmp_path, blocks=1)
    programs(tmp_path / "bin", apptainer=f'echo "$@" > {tmp_path}/words; shift 5; exec "$@"')
    array = array_job(path, container="/images/b.sif", python=sys.executable)
    environment = os.environ | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "PYTHONPATH": str(Path.cwd())}
    subprocess.run(array.words(0), env=environment, check=True, capture_output=True)
    assert (tmp_path / "words").read_text().startswith(f"exec --nv --bind {path} /images/b.sif ")
    assert_whole(path)
    assert array_job(container="b.sif").words(0)[6] == "python3"


def test_tasks_inherit_everything_but_what_belongs_to_the_login_or_to_another_job():
    of_login = ("CUDA_VISIBLE_DEVICES", "SLURM_JOB_ID", "SLURM_MEM_PER_CPU", "XDG_RUNTIME_DIR")
    inherited = ("SLURM_CONF", "SBATCH_ACCOUNT", "HF_TOKEN", "PATH")
    assert [name for name in (*of_login, *inherited) if is_passed_on(name)] == [*inherited]


def test_a_block_without_a_task_is_over_measured_by_another_cancelled_or_submitted_as_often_as_allowed(
    monkeypatch: pytest.MonkeyPatch,
):
    states = {
        "1_0": "COMPLETED", "1_1": "CANCELLED", "1_2": "NODE_FAIL", "1_3": "TIMEOUT", "1_4": "RUNNING",
        "2_7": "RUNNING", "9_0": "FAILED",
    }  # fmt: skip
    owner = Owner(node="n9", boot_id="another", pid=4711, job="slurm 2_7", begun_at="2026", schema_version=1)
    for name, answer in {
        "_POLL_S": 0.0,
        "_states_of_tasks": lambda: dict(states),
        "has_ended": lambda _results, block: block == 0,
        "living_owner": lambda _results, block: owner if block == 3 else None,
        "submit_blocks": lambda _array, blocks: Submission(
            schema_version=1, job="9", tasks={f"9_{i}": block for i, block in enumerate(blocks)}
        ),
    }.items():
        monkeypatch.setattr(slurm_module, name, answer)
    submitted: list[Submission] = []
    problems: list[str] = []
    tasks = {f"1_{block}": block for block in range(5)}
    watched = BlocksOnSlurm(array_job(), tasks, on_submit=submitted.append, on_problem=problems.append)
    watched.look()
    assert (watched.cancelled, submitted) == ({}, []), "files of a node may appear late"
    watched.look()
    assert (watched.cancelled, [each.tasks for each in submitted]) == ({1: "1_1"}, [{"9_0": 2}])
    for _ in range(4):
        watched.look()
    assert (len(submitted), watched.given_up) == (2, {2: "9_0"}), "two resubmissions are allowed"
    assert watched.jobs == ("1",)
    del states["2_7"]
    watched.look()
    assert submitted[-1].tasks == {"9_0": 3}, "nobody measures it any more"
    states.update({"1_4": "COMPLETED", "9_0": "COMPLETED"})
    monkeypatch.setattr(slurm_module, "has_ended", lambda _results, _block: True)
    watched.look()
    assert watched.is_over
    monkeypatch.setattr(
        slurm_module, "_states_of_tasks", mock.Mock(side_effect=SlurmCommandError("connect failure"))
    )
    for _ in range(2):
        watched.look()
    assert problems == ["the queue cannot be read, it is tried again: connect failure"]


def programs(directory: Path, **codes: str) -> dict[str, str]:
    """Programs that run these lines of a shell, and a PATH that begins with them."""
    directory.mkdir(exist_ok=True)
    for name, code in codes.items():
        (directory / name).write_text(f"#!/bin/sh\n{code}\n")
        (directory / name).chmod(0o755)
    return {"PATH": f"{directory}:{os.environ['PATH']}"}


def test_without_its_programs_the_command_ends_with_2_and_a_plan_is_a_warning_with_the_script(tmp_path: Path):
    words = ("run", write_profile(tmp_path / "p.yaml", blocks=2, tokens=8), "--on", "slurm")
    without = {"cwd": tmp_path, "PATH": f"{Path(sys.executable).parent}:/nowhere"}
    refused = refusal(*words, "-o", "d", **without)
    assert "no --on slurm: Slurm does not answer: sinfo: No such file" in refused
    assert "'--on local' uses the GPUs of this host" in refused
    assert not (tmp_path / "d").exists()
    planned = benchctl(*words, "--dry-run", **without)
    assert (planned.returncode, "no --on slurm: Slurm does not answer" in planned.stderr) == (0, True)
    for line in ("#SBATCH --array=0-1%2", "#SBATCH --gres=gpu:1", "array index 1: block 1"):
        assert line in planned.stdout


def test_what_is_missing_is_named_and_a_cluster_that_answers_is_shown_with_its_partitions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    silent = "echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1"
    monkeypatch.setenv("PATH", programs(tmp_path, sbatch="", srun="", squeue="", sinfo=silent)["PATH"])
    with pytest.raises(UsageError, match="does not answer: Unable to contact slurm controller"):
        require_slurm()
    assert (slurm_check().state, slurm_check().is_needed) == ("missing", False)
    programs(tmp_path, sinfo="echo 'main* long'")
    require_slurm()
    assert (slurm_check().state, slurm_check().facts["partitions"]) == ("ok", ("main", "long"))
    monkeypatch.setattr("benchctl.cluster.slurm.find_spec", lambda _name: None)
    with pytest.raises(UsageError, match=r"pip install submitit"):
        require_slurm()


def test_a_file_of_cluster_settings_is_refused_with_its_lines(tmp_path: Path):
    file = tmp_path / "c.yaml"
    file.write_text("partition: long\ntime: 2h\nnodes: 3\n")
    with pytest.raises(ProfileError, match=r"(?s)c\.yaml:2: time.*c\.yaml:3: nodes: unknown key"):
        load_cluster(file)
    file.write_text("partition: long\ntime: 2:00:00\n")
    assert load_cluster(file).time_s == 7200


def test_what_slurm_would_only_fail_at_later_is_refused_before_anything_is_written(tmp_path: Path):
    env = programs(tmp_path / "bin", sbatch="exit 1", srun="", squeue="", sinfo="echo 'main*'")
    short = write_profile(tmp_path / "p.yaml", blocks=2, tokens=20_000, time="0:30")
    for words, says in (
        ((short,), "cluster.time is 0:30, 30 s, and one block of 2 runs needs about"),
        (("ci-smoke", "--engine", "vllm-cpu"), "set cluster.gpus_per_block to their number"),
        (("natural", "--set", "stop=replay-natural"), "--set workload.lengths_from=DIR"),
    ):
        assert says in refusal("run", *words, *ON_SLURM, cwd=tmp_path, **env)
        assert not (tmp_path / "d").exists()


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


def assert_measured_once(directory: Path) -> None:
    """All planned runs are done, and no attempt was thrown away that was complete."""
    assert current_manifest(ResultDirectory(directory)).state == "done"
    attempts = [RunDirectory(path).read().state for path in directory.glob("blocks/*/runs/*/attempt-*")]
    assert "done" not in attempts


def one_arm(directory: Path, **options: object) -> Path:
    return write_profile(directory / "p.yaml", has_two_arms=False, **options)


@pytest.mark.slow
def test_two_submissions_measure_each_block_once_and_give_what_one_machine_gives(slurm: Slurm, tmp_path: Path):
    # Two cores of a node's four: two tasks fill a node, and the third goes to the second.
    setup = [f"env > {tmp_path}/env-$SLURM_ARRAY_TASK_ID"]
    profile = one_arm(tmp_path, blocks=3, tokens=24, cpus=2, setup=setup)
    slurm.printed("run", profile, "-o", "here", cwd=tmp_path)
    slurm.printed("run", profile, "--prepare", "-o", "d", cwd=tmp_path)
    of_login = {"DISPLAY": ":9", "SLURM_NTASKS": "7", "HF_TOKEN": SECRET}
    commands = [slurm.start(*RESUME, cwd=tmp_path, **of_login) for _ in range(2)]
    ended = [slurm.end(command) for command in commands]
    assert [code for code, _ in ended] == [0, 0], ended
    directory = tmp_path / "d"
    assert_measured_once(directory)
    assert {record.attempt for record in records(directory)} == {1}
    assert {record.node.name for record in records(directory)} == {"node0", "node1"}
    for name in ("plan.json", "requests.jsonl"):
        assert (tmp_path / "here" / name).read_bytes() == (directory / name).read_bytes()
    steps = {path.parent.name: path.read_bytes() for path in tmp_path.glob("here/runs/*/steps.jsonl")}
    assert len(steps) == 3
    assert {path.parent.name: path.read_bytes() for path in directory.glob("blocks/*/runs/*/steps.jsonl")} == steps

    environment = (tmp_path / "env-0").read_text()
    assert re.search(r"^CUDA_VISIBLE_DEVICES=[01]$", environment, re.MULTILINE)
    assert f"HF_TOKEN={SECRET}" in environment
    assert not re.search(r"^(DISPLAY|SLURM_NTASKS=7)", environment, re.MULTILINE)
    assert not [path for path in directory.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    script = next(directory.glob("submissions/*/*submission.sh"))
    assert "#SBATCH --array=0-2%3" in script.read_text()
    planned = slurm.printed("run", profile, "--on", "slurm", "--dry-run", cwd=tmp_path)
    assert script.read_text().replace(str(script.parent), "DIR/submissions/UTC") in planned


@pytest.mark.slow
def test_a_detached_command_leaves_nothing_behind_and_ctrl_c_ends_the_waiting_alone(slurm: Slurm, tmp_path: Path):
    profile = one_arm(tmp_path, blocks=1, tokens=2 * LONG)
    code, output = slurm.end(slurm.start("run", profile, *ON_SLURM, "--detach", cwd=tmp_path))
    assert (code, "progress: benchctl watch d" in output) == (0, True), output
    lines = [process.info["cmdline"] or () for process in psutil.process_iter(["cmdline"])]
    assert not [line for line in lines if str(profile) in line]
    slurm.measuring(0)
    waiting = slurm.start(*RESUME, cwd=tmp_path)
    assert any("block 0: queued or running already, as " in line for line in waiting.stdout)
    assert any(line.startswith("blocks: ") for line in waiting.stdout)
    waiting.send_signal(signal.SIGINT)
    code, output = slurm.end(waiting)
    assert code == 130, output
    assert re.search("(?s)the tasks go on without this command.*cancel: scancel ", output)
    slurm.printed("watch", "d", cwd=tmp_path)
    slurm.wait_empty()
    reported = slurm.printed(*RESUME, cwd=tmp_path)
    assert ("submitted as job" in reported, "runs: " in reported) == (False, True)
    assert_measured_once(tmp_path / "d")


@pytest.mark.slow
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

    def begun() -> list[int]:
        return [each.block for each in records(directory) if each.state == "done" and each.block in strikes]

    while strikes:
        strikes.pop(until("a first run", begun)[0])()
    code, output = slurm.end(command)
    assert (code, "block 3: the task was cancelled" in output) == (130, True), output
    assert re.findall(r"submitted as job \d+: (.*);", output) == ["blocks 0-3", "block 0"], output
    code, output = slurm.end(slurm.start(*RESUME, cwd=tmp_path))
    assert code == 0, output
    assert re.findall(r"submitted as job \d+: (.*);", output) == ["block 3"], output
    assert_measured_once(directory)
    assert {record.attempt for record in records(directory)} <= {1, 2}


@pytest.mark.slow
def test_the_block_of_a_lost_node_is_measured_on_another(slurm: Slurm, tmp_path: Path):
    command = slurm.start("run", one_arm(tmp_path, blocks=3, tokens=LONG), *ON_SLURM, cwd=tmp_path)
    until("processes on node1", lambda: slurm.processes_on("node1"))
    daemon = psutil.Process(int((slurm.directory / "slurmd-node1.pid").read_text()))
    restart = daemon.cmdline()
    try:
        for process in (daemon, *slurm.processes_on("node1")):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        slurm.command("scontrol", "update", "NodeName=node1", "State=DOWN", "Reason=lost")
        code, output = slurm.end(command)
        assert code == 0, output
        assert_measured_once(tmp_path / "d")
    finally:
        subprocess.run(restart, env=os.environ | slurm.environment, check=True, timeout=30)
        slurm.resume_nodes("node1")
