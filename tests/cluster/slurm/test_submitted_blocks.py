"""Blocks as tasks of a real Slurm: where they run, what they inherit, and how they are submitted."""

import re
from pathlib import Path

import pytest
from support.slurm import Slurm, attempts, generations, states, submissions, write_profile

pytestmark = pytest.mark.slow


def test_blocks_are_measured_by_tasks_with_a_gpu_each(slurm: Slurm, tmp_path: Path):
    setup = [f"env > {tmp_path}/env-$SLURM_ARRAY_TASK_ID"]
    profile = write_profile(tmp_path / "p.yaml", blocks=3, tokens=8, setup=setup, parallel=2)
    ended = slurm.benchctl("run", profile, "--on", "slurm", "-o", "d", cwd=tmp_path, DISPLAY=":9", SLURM_NTASKS="7")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    directory = tmp_path / "d"
    assert states(directory) == {"done"}
    assert set(attempts(directory).values()) == {1}
    assert generations(directory) == {0: 1, 1: 1, 2: 1}
    tasks = submissions(directory)[0]["tasks"]
    assert list(tasks.values()) == [0, 1, 2]
    environment = (tmp_path / "env-0").read_text()
    assert re.search(r"^CUDA_VISIBLE_DEVICES=[01]$", environment, re.MULTILINE)
    assert "DISPLAY=" not in environment
    assert "SLURM_NTASKS=7" not in environment
    script = next(directory.glob("submissions/*/*submission.sh")).read_text()
    assert "#SBATCH --array=0-2%2" in script
    shown = slurm.benchctl("run", profile, "--on", "slurm", "--dry-run", cwd=tmp_path).stdout
    folder = str(next(directory.glob("submissions/*")))
    assert script.replace(folder, "DIR/submissions/UTC") in shown
