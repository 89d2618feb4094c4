"""What a Slurm costs beyond itself: submitting many blocks, and the time of a task around its runs.

    python -m benchmarks.cluster.slurm [--blocks 200] [--tasks 6]

It starts a real Slurm on this machine (tests/support/slurm.py), and ends it.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from benchctl.cluster.slurm import ArrayJob, submit_blocks
from benchctl.profile.load import load_profile

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from support.slurm import Slurm, missing_slurm, running_slurm, until, write_profile

GOAL_SUBMIT_S, GOAL_TASK_S = 5.0, 2.0
ROUNDS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=200, help="blocks of the experiment that is submitted")
    parser.add_argument("--tasks", type=int, default=6, help="tasks whose time is measured, one after the other")
    options = parser.parse_args()
    if (reason := missing_slurm()) is not None:
        sys.exit(f"no Slurm can be started here: {reason}")
    print(f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    with running_slurm() as slurm, tempfile.TemporaryDirectory(prefix="bench-slurm-") as name:
        submit(slurm, Path(name), options.blocks)
        per_task(slurm, Path(name), options.tasks)


def submit(slurm: Slurm, path: Path, blocks: int) -> None:
    """Seconds of the command that creates the directory and submits all blocks, and what it leaves running."""
    profile = write_profile(path / "many.yaml", blocks=blocks, tokens=8)
    before, cpu_before_s = own_processes(), cpu_of_children_s()
    began_s = time.monotonic()
    run(slurm, path, "run", profile, "--on", "slurm", "--detach", "-o", "many")
    took_s, cpu_s = time.monotonic() - began_s, cpu_of_children_s() - cpu_before_s
    num_tasks = len(slurm.queue())
    left = own_processes() - before
    slurm.command("scancel", "--me")
    slurm.wait_empty()
    goal = f"goal below {GOAL_SUBMIT_S:g} s"
    print(f"submitting {blocks} blocks: {took_s:.2f} s, {cpu_s:.2f} s of processor time ({goal})")
    print(f"tasks in the queue: {num_tasks}; processes of the command left: {len(left)} (goal 0)")


def cpu_of_children_s() -> float:
    """Processor time of all child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def own_processes() -> set[int]:
    """Processes whose command line names benchctl's package as the module that they run."""
    found = set()
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if line[1:3] == ["-m", "benchctl"] and "--detach" in line:
            found.add(process.pid)
    return found


def per_task(slurm: Slurm, path: Path, tasks: int) -> None:
    """Seconds of a task beyond its runs and beyond a task that does nothing, one task at a time.

    Its blocks are done before, so that the task claims its block, finds nothing to measure, and gives it back.
    """
    profile = write_profile(path / "few.yaml", blocks=tasks, tokens=8, parallel=1)
    run(slurm, path, "run", profile, "--prepare", "-o", "few")
    run(slurm, path, "run", "--resume", "few")
    script = path / "true.sh"
    script.write_text(f"#!/bin/sh\n#SBATCH --array=0-{tasks - 1}%1\n#SBATCH --gres=gpu:1\nsrun true\n")
    loaded = load_profile(str(profile))
    array = ArrayJob(path / "few", loaded)
    os.environ |= slurm.environment | {"PYTHONPATH": str(Path.cwd())}
    for _ in range(ROUNDS):
        idle_s = queue_s(slurm, lambda: slurm.command("sbatch", "--output=/dev/null", script)) / tasks
        ours_s = queue_s(slurm, lambda: submit_blocks(array, range(tasks))) / tasks
        goal = f"goal below {GOAL_TASK_S:g} s; load average {os.getloadavg()[0]:.1f}"
        print(
            f"a task of `srun true`: {idle_s:.2f} s; of a block that is done: {ours_s:.2f} s; "
            f"beyond Slurm {ours_s - idle_s:.2f} s ({goal})"
        )
    before_s = cpu_of_children_s()
    run(slurm, path, "run", "--block", "0", "--into", "few")
    print(f"processor time of the command of such a task: {cpu_of_children_s() - before_s:.2f} s")


def queue_s(slurm: Slurm, submit_all: object) -> float:
    """Seconds from the begin of the first task to the end of the last."""
    submit_all()
    until(lambda: "RUNNING" in slurm.queue().values(), "a task to run")
    began_s = time.monotonic()
    until(lambda: not slurm.queue(), "the queue to be empty", 600.0)
    return time.monotonic() - began_s


def run(slurm: Slurm, path: Path, *words: object) -> None:
    argv = [sys.executable, "-m", "benchctl", *map(str, words)]
    environment = os.environ | slurm.environment | {"PYTHONPATH": str(Path.cwd()), "CI": "1"}
    subprocess.run(argv, cwd=path, env=environment, check=True, capture_output=True)


if __name__ == "__main__":
    main()
