"""A machine without Slurm: the exit code and the names of what is missing."""

import os
import stat
import sys
from pathlib import Path

import pytest
from support.cli import benchctl
from support.slurm import write_profile

from benchctl.cluster.slurm import require_slurm, slurm_check
from benchctl.errors import ProfileError, UsageError
from benchctl.profile.load import load_cluster


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
