"""The job script and the command of a block: what the cluster settings make of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.cli import benchctl
from support.slurm import states, write_profile

from benchctl.cluster.slurm import ArrayJob, is_passed_on
from benchctl.profile.load import load_profile
from benchctl.profile.sections import ClusterSettings

DIRECTORY = Path("/shared/results/d")


def array_job(directory: Path = DIRECTORY, num_gpus: int = 1, **keys: object) -> ArrayJob:
    settings = ClusterSettings.model_validate({"gpus_per_block": num_gpus, **keys})
    return ArrayJob(directory, load_profile("ci-smoke").model_copy(update={"cluster": settings}))


def script(num_blocks: int = 3, num_gpus: int = 1, **keys: object) -> str:
    return array_job(num_gpus=num_gpus, **keys).script(DIRECTORY / "submissions" / "x", num_blocks)


def test_each_key_has_its_line():
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


def test_a_key_without_a_value_has_no_line():
    text = script(num_gpus=0)
    for word in ("partition", "account", "qos", "cpus", "mem", "--time", "constraint", "exclude", "gres", "wckey"):
        assert word not in text


def test_one_block_is_submitted_without_an_array():
    assert "--array" not in script(num_blocks=1)


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


@pytest.mark.parametrize(
    ("name", "is_expected"),
    [
        ("CUDA_VISIBLE_DEVICES", False),
        ("SLURM_JOB_ID", False),
        ("SLURM_MEM_PER_CPU", False),
        ("XDG_RUNTIME_DIR", False),
        ("SLURM_CONF", True),
        ("SBATCH_ACCOUNT", True),
        ("HF_TOKEN", True),
        ("PATH", True),
    ],
)
def test_tasks_inherit_everything_but_what_belongs_to_the_login_or_to_another_job(name: str, is_expected: bool):
    assert is_passed_on(name) is is_expected
