"""Progress of an experiment from its files alone."""

import subprocess
import sys
import time

from benchctl.cli.cluster.view import show_until_done
from benchctl.records.directory import ResultDirectory

SMALL = ["--engine", "sim-exact", "--blocks", "2", "--set", "workload.num_prompts=1"]


def begin_experiment(cwd, *options):
    """A running experiment in another process, and its result directory once it is there."""
    argv = [
        sys.executable,
        "-m",
        "benchctl",
        "run",
        "--profile",
        "ci-smoke",
        *SMALL,
        "--output",
        "results",
        *options,
    ]
    running = subprocess.Popen(argv, cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline_s = time.monotonic() + 60
    while not (cwd / "results" / "manifest.json").is_file():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    return running, ResultDirectory(cwd / "results")


def test_an_ordinary_run_is_watched_from_another_process_to_its_end(tmp_path):
    running, results = begin_experiment(tmp_path)
    views = []
    last = show_until_done(
        results, should_stop=lambda: running.poll() is not None, on_tick=views.append, is_quiet=True
    )
    assert running.returncode == 0
    assert last.has_ended
    assert (last.state, last.block_states["done"], last.run_states) == ("done", 2, {"done": 4})
    runs = {block.current.run_id for view in views for block in view.blocks if block.current is not None}
    assert runs == {planned.run_id for planned in results.plan().runs}
    assert all(sum(block.state == "running" for block in view.blocks) <= 1 for view in views)
