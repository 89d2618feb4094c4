"""The job script of cluster settings, what becomes of tasks that Slurm tells of, and a machine without Slurm."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from support.cli import benchctl
from support.slurm import states, write_profile

from benchctl.cluster import slurm
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
from benchctl.records.directory import Submission
from benchctl.records.writers import Owner

DIRECTORY = Path("/shared/results/d")


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
    for word in (
        "partition", "account", "qos", "cpus", "mem", "--time", "constraint", "exclude", "gres", "wckey", "--array"
    ):  # fmt: skip
        assert word not in bare


def test_pyxis_starts_the_task_itself_in_the_container():
    text = script(container="/images/b.sqsh", container_runtime="pyxis", python="/opt/bin/python")
    assert " --container-image=/images/b.sqsh --container-mounts=/shared/results/d:/shared/results/d " in text
    assert " /opt/bin/python -u -m submitit.core._submit " in text


def test_apptainer_runs_the_block_with_the_devices_and_the_directory(tmp_path: Path):
    profile = write_profile(tmp_path / "p.yaml", blocks=1, tokens=8)
    assert benchctl("run", profile, "--prepare", "-o", "d", cwd=tmp_path).returncode == 0
    fake = tmp_path / "bin" / "apptainer"
    fake.parent.mkdir()
    fake.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/words\nshift 5\nexec "$@"\n')
    fake.chmod(0o755)
    array = array_job(tmp_path / "d", container="/images/b.sif", python=sys.executable)
    environment = os.environ | {"PATH": f"{fake.parent}:{os.environ['PATH']}", "PYTHONPATH": str(Path.cwd())}
    ended = subprocess.run(array.words(0), env=environment, check=False, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "words").read_text().startswith(f"exec --nv --bind {tmp_path / 'd'} /images/b.sif ")
    assert states(tmp_path / "d") == {"done"}
    assert array.python() == sys.executable
    assert array_job(container="b.sif").words(0)[6] == "python3"


def test_tasks_inherit_everything_but_what_belongs_to_the_login_or_to_another_job():
    for name in ("CUDA_VISIBLE_DEVICES", "SLURM_JOB_ID", "SLURM_MEM_PER_CPU", "XDG_RUNTIME_DIR"):
        assert not is_passed_on(name)
    for name in ("SLURM_CONF", "SBATCH_ACCOUNT", "HF_TOKEN", "PATH"):
        assert is_passed_on(name)


def test_a_block_without_a_task_is_over_measured_by_another_cancelled_or_submitted_as_often_as_allowed(
    monkeypatch: pytest.MonkeyPatch,
):
    states = {
        "1_0": "COMPLETED", "1_1": "CANCELLED", "1_2": "NODE_FAIL", "1_3": "TIMEOUT", "1_4": "RUNNING",
        "2_7": "RUNNING", "9_0": "FAILED",
    }  # fmt: skip
    owner = Owner(node="n9", boot_id="another", pid=4711, job="slurm 2_7", begun_at="2026", schema_version=1)
    answers: dict[str, object] = {
        "_POLL_S": 0.0,
        "_states_of_tasks": lambda: dict(states),
        "has_ended": lambda _results, block: block == 0,
        "living_owner": lambda _results, block: owner if block == 3 else None,
        "submit_blocks": lambda _array, blocks: Submission(
            schema_version=1, job="9", tasks={f"9_{i}": block for i, block in enumerate(blocks)}
        ),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(slurm, name, answer)
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
    monkeypatch.setattr(slurm, "has_ended", lambda _results, _block: True)
    watched.look()
    assert watched.is_over

    def fail() -> None:
        raise SlurmCommandError("connect failure")

    monkeypatch.setattr(slurm, "_states_of_tasks", fail)
    watched.look()
    watched.look()
    assert problems == ["the queue cannot be read, it is tried again: connect failure"]


def programs(directory: Path, **answers: str) -> None:
    """Programs that print these texts; one whose text begins with ``!`` fails with the rest."""
    directory.mkdir(exist_ok=True)
    for name, answer in answers.items():
        path = directory / name
        failing = answer.startswith("!")
        path.write_text(f"#!/bin/sh\necho '{answer.removeprefix('!')}'{' >&2; exit 1' if failing else ''}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture(name="path")
def _path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An own PATH with nothing but the shell."""
    directory = tmp_path / "bin"
    directory.mkdir()
    monkeypatch.setenv("PATH", f"{directory}:/nowhere")
    (directory / "sh").symlink_to("/bin/sh")
    return directory


def test_without_its_programs_the_command_ends_with_2_and_a_plan_is_a_warning_with_the_script(tmp_path: Path):
    words = ("run", write_profile(tmp_path / "p.yaml", blocks=2, tokens=8), "--on", "slurm")
    path = f"{Path(sys.executable).parent}:/nowhere"
    ended = benchctl(*words, "-o", "d", cwd=tmp_path, PATH=path)
    assert ended.returncode == 2
    assert "no --on slurm: Slurm does not answer: sinfo: No such file" in ended.stderr
    assert "'--on local' uses the GPUs of this host" in ended.stderr
    assert not (tmp_path / "d").exists()
    planned = benchctl(*words, "--dry-run", cwd=tmp_path, PATH=path)
    assert planned.returncode == 0
    assert "no --on slurm: Slurm does not answer" in planned.stderr
    for line in ("#SBATCH --array=0-1%2", "#SBATCH --gres=gpu:1", "array index 1: block 1"):
        assert line in planned.stdout


def test_what_is_missing_is_named_and_a_cluster_that_answers_is_shown_with_its_partitions(
    path: Path, monkeypatch: pytest.MonkeyPatch
):
    programs(path, sbatch="", srun="", squeue="", sinfo="!Unable to contact slurm controller (connect failure)")
    with pytest.raises(UsageError, match="does not answer: Unable to contact slurm controller"):
        require_slurm()
    check = slurm_check()
    assert (check.state, check.name, check.is_needed) == ("missing", "slurm", False)
    programs(path, sinfo="main* long")
    require_slurm()
    check = slurm_check()
    assert (check.state, check.facts["partitions"]) == ("ok", ("main", "long"))
    monkeypatch.setattr("benchctl.cluster.slurm.find_spec", lambda _name: None)
    with pytest.raises(UsageError, match=r"pip install submitit"):
        require_slurm()


def test_a_file_of_cluster_settings_is_refused_with_its_lines(tmp_path: Path):
    (tmp_path / "c.yaml").write_text("partition: long\ntime: 2h\nnodes: 3\n")
    with pytest.raises(ProfileError) as error:
        load_cluster(tmp_path / "c.yaml")
    assert "c.yaml:2: time" in str(error.value)
    assert "c.yaml:3: nodes: unknown key" in str(error.value)
    (tmp_path / "c.yaml").write_text("partition: long\ntime: 2:00:00\n")
    assert load_cluster(tmp_path / "c.yaml").time_s == 7200


def test_what_slurm_would_only_fail_at_later_is_refused_before_anything_is_written(tmp_path: Path):
    programs(tmp_path / "bin", sbatch="!refused", srun="", squeue="", sinfo="main*")
    short = write_profile(tmp_path / "p.yaml", blocks=2, tokens=20_000, time="0:30")
    for words, says in (
        ((short,), "cluster.time is 0:30, 30 s, and one block of 2 runs needs about"),
        (("ci-smoke", "--engine", "vllm-cpu"), "set cluster.gpus_per_block to their number"),
        (("natural", "--set", "stop=replay-natural"), "--set workload.lengths_from=DIR"),
    ):
        path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
        ended = benchctl("run", *words, "--on", "slurm", "-o", "d", cwd=tmp_path, PATH=path)
        assert (ended.returncode, says in ended.stderr) == (2, True), ended.stderr
        assert not (tmp_path / "d").exists()
