"""``benchctl watch``: other processes measure, and a terminal, a log or a program sees how far they are."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from contextlib import contextmanager, suppress

import pytest
from support.cli import benchctl
from support.results.builders import edit_run, write_results
from support.results.planted_progress import plant_block, plant_shared
from support.shared_directory import SLOWLY, prepared_directory, task
from support.waiting import wait_until

from benchctl.cli.commands.watch import progress_lines
from benchctl.cluster.progress import Watcher
from benchctl.records.directory import ResultDirectory
from benchctl.records.record import RunFailure
from benchctl.records.schema import ResultWarning

OUT_OF_MEMORY = RunFailure(cause="out-of-memory", message="the server ran out of memory: choose a smaller model")
LATE = ResultWarning(code="client-late", message="requests were sent late")


def large_experiment(path):
    """An experiment of 200 blocks in its middle, with most things that can go wrong."""
    results = plant_shared(path, 200)
    for block in range(57):
        failure = OUT_OF_MEMORY if block in {4, 9} else None
        plant_block(results, block, num_ended=6, failure=failure, warning=LATE if block in {7, 8} else None)
    for block in range(57, 73):
        plant_block(results, block, num_ended=block % 6, is_running=True, node=f"gpu-node-{block % 8:02d}")
    plant_block(results, 73, num_ended=2)
    return results


@contextmanager
def watching(*args, cwd, term="xterm-256color", **streams):
    """``benchctl watch`` in a process of its own; it is interrupted in the end."""
    argv = [sys.executable, "-m", "benchctl", "watch", *map(str, args)]
    environment = {name: value for name, value in os.environ.items() if name not in ("CI", "COLUMNS", "LINES")}
    running = subprocess.Popen(argv, cwd=cwd, env=environment | {"TERM": term}, **streams)
    try:
        yield running
    finally:
        with suppress(ProcessLookupError):
            running.send_signal(signal.SIGINT)
        running.wait(timeout=30)
        if running.stdout is not None:
            running.stdout.close()


@pytest.mark.slow
def test_two_tasks_are_watched_and_the_block_of_a_killed_one_is_lost_and_then_taken_over(tmp_path):
    results = prepared_directory(tmp_path, *SLOWLY, blocks=2, output_len=100)
    watcher = Watcher(ResultDirectory(results))
    assert [block.state for block in watcher.look().blocks] == ["waiting"] * 2
    tasks = [task(results, block) for block in (0, 1)]
    wait_until("a run of block 1", lambda: watcher.look().blocks[1].current is not None)
    current = watcher.look().blocks[1].current
    assert (current.run_id[3:6], 0 <= current.elapsed_s < 60) == ("-b1", True)
    os.killpg(tasks[1].pid, signal.SIGKILL)
    tasks[1].communicate()
    lost = watcher.look()
    assert (lost.blocks[1].state, [(each.kind, each.block) for each in lost.problems]) == ("lost", [("lost", 1)])
    with watching(results, "--json", cwd=tmp_path, stdout=subprocess.PIPE, text=True) as watch:
        first = watch.stdout.readline()
        heir = task(results, 1)
        lines = [json.loads(line) for line in (first, *watch.stdout)]
        assert watch.wait(timeout=60) == 0
    for each in (tasks[0], heir):
        each.communicate(timeout=60)
        assert each.returncode == 0
    assert (lines[-1]["state"], lines[-1]["runs"]) == ("done", {"done": 2})
    assert lines[0]["blocks"][1]["state"] == "lost"
    assert any(line["blocks"][1]["state"] == "running" for line in lines)


def test_it_ends_with_the_exit_code_of_run_when_nothing_is_left_to_wait_for(tmp_path):
    suspect, failed = {"state": "suspect", "warnings": (LATE,)}, {"state": "failed", "failure": OUT_OF_MEMORY}
    for code, changes in {0: {}, 4: suspect, 5: failed, 130: {"state": "running"}}.items():
        results = write_results(tmp_path / str(code), state="running" if code == 130 else "done")
        if changes:
            edit_run(results, results.plan().runs[0].run_id, **changes)
        watched = benchctl("watch", results.path)
        assert watched.returncode == code, watched.stderr
        assert benchctl("watch", results.path, "--once").returncode == 0
    refused = benchctl("watch", tmp_path)
    assert (refused.returncode, "is not a result directory" in refused.stderr) == (2, True)


def test_without_a_terminal_there_is_a_line_only_when_something_changed(tmp_path):
    results = plant_shared(tmp_path / "results", 2)
    with watching(results.path, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as watch:
        lines = [watch.stdout.readline()]
        plant_block(results, 0, num_ended=1, is_running=True)
        lines.append(watch.stdout.readline())
        plant_block(results, 0, num_ended=6, failure=OUT_OF_MEMORY)
        plant_block(results, 1, num_ended=6)
        lines += watch.stdout.readlines()
        assert watch.wait(timeout=30) == 5
    assert lines[0].startswith("blocks: 2 waiting; 0 of 12 runs ended; nothing is measured now")
    assert lines[1].startswith("blocks: 1 running, 1 waiting; 1 of 12 runs ended; about ")
    assert any(line.startswith("failed: 00") and "out-of-memory" in line for line in lines[2:])
    assert lines[-1].startswith("blocks: 1 failed, 1 done; 12 of 12 runs ended; nothing is left to measure")
    assert len(set(lines)) == len(lines)


def test_two_hundred_blocks_fit_a_terminal_of_any_height(tmp_path):
    progress = Watcher(large_experiment(tmp_path)).look()
    for height in (9, 13, 23):
        lines = progress_lines(progress, height)
        assert len(lines) <= height
        assert lines[1].startswith("386 of 1200 runs ended; about ")
        assert "16 running" in lines[2]
        text = "\n".join(lines)
        assert re.search(r"^2 runs failed: 0.* and 1 more: ", text, re.MULTILINE)
        assert re.search(r"^block 57 running on gpu-node-01 GPU-gpu-node-01 \(slurm 17_57\): ", text, re.MULTILINE)
        assert bool(re.search(r"^\d+ more running blocks not shown", lines[-1])) == (height < 23)
    assert lines == progress_lines(progress)


def times_of_files(path):
    return {file: file.stat().st_mtime_ns for file in sorted(path.rglob("*"))}


@contextmanager
def on_a_terminal(results, columns, term):
    """``benchctl watch`` on a terminal of so many columns; yields it and the terminal's other end."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, columns))
    with watching(results.path, cwd=results.path, stdout=theirs, stderr=theirs, term=term) as watch:
        os.close(theirs)
        yield watch, ours
    os.close(ours)


def test_a_terminal_gets_one_picture_that_is_drawn_over_and_its_cursor_back_and_no_file_is_touched(tmp_path):
    results = large_experiment(tmp_path / "results")
    before = times_of_files(results.path)
    with on_a_terminal(results, 80, "xterm-256color") as (watch, ours):
        shown = read_until(ours, lambda shown: shown.count(b"\x1b[2K") >= 24)  # later ones replace the first
        watch.send_signal(signal.SIGINT)
        shown += read_until(ours, lambda shown: b"\x1b[?25h" in shown)
        assert watch.wait(timeout=30) == 130
    assert times_of_files(results.path) == before
    text = shown.decode()
    assert "\\x1b" not in text  # what rich draws arrives as it is
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1
    first = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text).split("results", 1)[0]
    assert "16 running" in first
    assert max(len(line) for line in first.splitlines()) <= 80


def test_a_terminal_on_which_nothing_can_be_drawn_gets_lines(tmp_path):
    results = plant_shared(tmp_path / "results", 2)
    for columns, term in ((80, "dumb"), (0, "xterm")):
        with on_a_terminal(results, columns, term) as (_, ours):
            assert read_until(ours, lambda shown: b"\n" in shown).startswith(b"blocks: 2 waiting")


def read_until(handle, condition, limit_s=60.0):
    """Bytes that arrive at a terminal until ``condition`` is true of them."""
    shown, end_s = b"", time.monotonic() + limit_s
    while not condition(shown):
        left_s = end_s - time.monotonic()
        assert left_s > 0, shown
        if select.select([handle], [], [], left_s)[0]:
            shown += os.read(handle, 65536)
    return shown


def test_names_of_strangers_reach_a_terminal_without_their_control_characters(tmp_path):
    results = plant_shared(tmp_path / "results", 2)
    plant_block(results, 0, num_ended=1, is_running=True, node="n\x1b[2J\x07[red]x")
    shown = benchctl("watch", results.path, "--once")
    assert "\x1b" not in shown.stdout
    assert "[red]x" in shown.stdout
