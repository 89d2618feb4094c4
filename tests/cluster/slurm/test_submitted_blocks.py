"""Blocks as tasks of a real Slurm: where they run, what they inherit, and how they are submitted."""

import json
import re
import signal
from pathlib import Path

import psutil
import pytest
from support.slurm import Slurm, attempts, states, submissions, write_profile

pytestmark = pytest.mark.slow
SECRET = "hf_abcdefghijklmnopqrstuvwxyz012345"


def test_blocks_are_measured_by_tasks_with_a_gpu_each(slurm: Slurm, tmp_path: Path):
    setup = [f"env > {tmp_path}/env-$SLURM_ARRAY_TASK_ID"]
    profile = write_profile(tmp_path / "p.yaml", blocks=3, tokens=8, setup=setup, parallel=2)
    of_login = {"DISPLAY": ":9", "SLURM_NTASKS": "7", "HF_TOKEN": SECRET}
    ended = slurm.benchctl("run", profile, "--on", "slurm", "-o", "d", cwd=tmp_path, **of_login)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    directory = tmp_path / "d"
    assert states(directory) == {"done"}
    assert set(attempts(directory).values()) == {1}
    tasks = submissions(directory)[0]["tasks"]
    assert list(tasks.values()) == [0, 1, 2]
    environment = (tmp_path / "env-0").read_text()
    assert re.search(r"^CUDA_VISIBLE_DEVICES=[01]$", environment, re.MULTILINE)
    assert f"HF_TOKEN={SECRET}" in environment
    assert not [path for path in directory.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert "DISPLAY=" not in environment
    assert "SLURM_NTASKS=7" not in environment
    script = next(directory.glob("submissions/*/*submission.sh")).read_text()
    assert "#SBATCH --array=0-2%2" in script
    shown = slurm.benchctl("run", profile, "--on", "slurm", "--dry-run", cwd=tmp_path).stdout
    folder = str(next(directory.glob("submissions/*")))
    assert script.replace(folder, "DIR/submissions/UTC") in shown


def test_a_sweep_over_two_nodes_is_the_same_experiment_as_on_one_machine(slurm: Slurm, tmp_path: Path):
    arguments = ("run", "topk-sweep", "--engine", "sim-exact", "--seed", "5", "--set", "workload.num_prompts=2")
    small = (*arguments, "--set", "workload.output_len=24", "--set", "sweep.top_k=[3]")
    here = slurm.benchctl(*small, "-o", "here", cwd=tmp_path)
    assert here.returncode == 0, here.stderr
    # Two cores of a node's four: two tasks fill a node, and the others go to the second.
    options = ("--set", "cluster.gpus_per_block=1", "--set", "cluster.cpus=2", "--set", "cluster.time=10")
    there = slurm.benchctl(*small, "--on", "slurm", *options, "-o", "there", cwd=tmp_path)
    assert there.returncode == 0, there.stdout + there.stderr
    for name in ("plan.json", "requests.jsonl"):
        assert (tmp_path / "here" / name).read_bytes() == (tmp_path / "there" / name).read_bytes()
    steps = {path.parent.name: path.read_bytes() for path in tmp_path.glob("here/runs/*/steps.jsonl")}
    assert len(steps) == 12
    in_blocks = tmp_path.glob("there/blocks/*/runs/*/steps.jsonl")
    assert {path.parent.name: path.read_bytes() for path in in_blocks} == steps
    records = [json.loads(path.read_text()) for path in tmp_path.glob("there/blocks/*/runs/*/run.json")]
    assert {record["node"]["name"] for record in records} == {"node0", "node1"}
    verdicts = [verdict_of(slurm, tmp_path, name) for name in ("here", "there")]
    assert verdicts[0] == verdicts[1]


def verdict_of(slurm: Slurm, path: Path, name: str) -> object:
    """Exit code, verdict and step-time ratios, which are exact; times of the client are those of a busy machine."""
    compared = slurm.benchctl("compare", name, "--json", cwd=path)
    document = json.loads(compared.stdout)
    metrics = [
        metric for arm in document["comparisons"] for metric in arm["metrics"] if metric["name"] == "step_ms"
    ]
    assert metrics
    ratios = [(metric["cell"], metric["ratio"], metric["verdict"], metric["blocks"]) for metric in metrics]
    return compared.returncode, document["verdict"], ratios


def test_a_detached_command_leaves_nothing_behind_and_resume_reports(slurm: Slurm, tmp_path: Path):
    profile = write_profile(tmp_path / "p.yaml", blocks=2, tokens=8)
    command = slurm.start("run", profile, "--on", "slurm", "--detach", "-o", "d", cwd=tmp_path)
    output = command.communicate(timeout=60)[0]
    assert command.returncode == 0, output
    assert "progress: benchctl watch d" in output
    lines = [process.info["cmdline"] or () for process in psutil.process_iter(["cmdline"])]
    assert not [line for line in lines if str(profile) in line]
    watched = slurm.benchctl("watch", "d", cwd=tmp_path)
    assert watched.returncode == 0, watched.stderr
    reported = slurm.benchctl("run", "--resume", "d", "--on", "slurm", cwd=tmp_path)
    assert reported.returncode == 0, reported.stderr
    assert "submitted as job" not in reported.stdout
    assert "runs: " in reported.stdout


def test_ctrl_c_ends_the_waiting_and_not_the_tasks(slurm: Slurm, tmp_path: Path):
    profile = write_profile(tmp_path / "p.yaml", blocks=1, tokens=200)
    command = slurm.start("run", profile, "--on", "slurm", "-o", "d", cwd=tmp_path)
    slurm.measuring(0)
    command.send_signal(signal.SIGINT)
    output = command.communicate(timeout=60)[0]
    assert command.returncode == 130, output
    assert "the tasks go on without this command" in output
    assert "cancel: scancel " in output
    slurm.wait_empty()
    assert states(tmp_path / "d") == {"done"}
