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


def begin_block(block, results):
    """A task that measures one block."""
    argv = [sys.executable, "-m", "benchctl", "run", "--block", str(block), "--into", str(results)]
    return subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)


def until(condition, limit_s=60.0):
    deadline_s = time.monotonic() + limit_s
    while not (value := condition()):
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    return value


def progress_once(results):
    shown = benchctl("watch", results, "--once", "--json")
    assert shown.returncode == 0, shown.stderr
    return json.loads(shown.stdout)


@pytest.mark.slow
def test_two_tasks_are_watched_and_the_block_of_a_killed_one_is_lost_and_then_taken_over(tmp_path):
    results = tmp_path / "shared"
    prepared = ["run", "ci-smoke", "--engine", "sim", "--blocks", "2", "--set", "workload.num_prompts=8"]
    assert benchctl(*prepared, "--prepare", "--output", results, cwd=tmp_path).returncode == 0
    watcher = Watcher(ResultDirectory(results))
    assert [block.state for block in watcher.look().blocks] == ["waiting"] * 2
    tasks = [begin_block(block, results) for block in (0, 1)]
    until(lambda: watcher.look().blocks[1].current)
    os.killpg(tasks[1].pid, signal.SIGKILL)
    tasks[1].wait()
    lost = watcher.look()
    assert lost.blocks[1].state == "lost"
    assert [(problem.kind, problem.block) for problem in lost.problems] == [("lost", 1)]
    with watching(results, "--json", cwd=tmp_path, stdout=subprocess.PIPE, text=True) as watch:
        first = watch.stdout.readline()
        heir = begin_block(1, results)
        lines = [json.loads(line) for line in (first, *watch.stdout)]
        assert watch.wait(timeout=60) == 0
    assert [task.wait(timeout=60) for task in (tasks[0], heir)] == [0, 0]
    last = lines[-1]
    assert (last["state"], last["runs"]) == ("done", {"done": 4})
    assert lines[0]["blocks"][1]["state"] == "lost"
    assert any(line["blocks"][1]["state"] == "running" for line in lines)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({}, 0),
        ({"state": "suspect", "warnings": (LATE,)}, 4),
        ({"state": "failed", "failure": OUT_OF_MEMORY}, 5),
        ({"state": "running"}, 130),
    ],
)
def test_it_ends_with_the_exit_code_of_run_when_nothing_is_left_to_wait_for(tmp_path, changes, code):
    results = write_results(tmp_path / "results", state="running" if code == 130 else "done")
    if changes:
        edit_run(results, results.plan().runs[0].run_id, **changes)
    watched = benchctl("watch", results.path)
    assert watched.returncode == code, watched.stderr
    assert benchctl("watch", results.path, "--once").returncode == 0


def test_ctrl_c_ends_it_with_130_and_touches_no_file(tmp_path):
    results = plant_shared(tmp_path / "results", 3)
    plant_block(results, 0, num_ended=1, is_running=True)
    before = {path: path.stat().st_mtime_ns for path in sorted((tmp_path / "results").rglob("*"))}
    with watching(results.path, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as watch:
        assert "1 running, 2 waiting" in watch.stdout.readline()
        watch.send_signal(signal.SIGINT)
        assert watch.wait(timeout=30) == 130
    assert {path: path.stat().st_mtime_ns for path in sorted((tmp_path / "results").rglob("*"))} == before


def test_without_a_terminal_there_is_a_line_only_when_something_changed(tmp_path):
    results = plant_shared(tmp_path / "results", 2)
    with watching(results.path, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as watch:
        lines = [watch.stdout.readline()]
        time.sleep(1)
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


@pytest.mark.parametrize("height", [9, 13, 23])
def test_two_hundred_blocks_fit_a_terminal_of_any_height(tmp_path, height):
    progress = Watcher(large_experiment(tmp_path)).look()
    lines = progress_lines(progress, height)
    assert len(lines) <= height
    assert lines[1].startswith("386 of 1200 runs ended; about ")
    assert "16 running" in lines[2]
    text = "\n".join(lines)
    assert re.search(r"^2 runs failed: 0.* and 1 more: ", text, re.MULTILINE)
    assert re.search(r"^block 57 running on gpu-node-01 GPU-gpu-node-01 \(slurm 17_57\): ", text, re.MULTILINE)
    if height < 23:
        assert re.search(r"^\d+ more running blocks not shown", lines[-1])
    else:
        assert lines == progress_lines(progress)


def test_a_terminal_gets_one_picture_that_is_drawn_over_and_its_cursor_back(tmp_path):
    results = large_experiment(tmp_path / "results")
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    with watching(results.path, cwd=tmp_path, stdout=theirs, stderr=theirs) as watch:
        os.close(theirs)
        shown = read_until(ours, lambda shown: shown.count(b"\x1b[2K") >= 24)  # later ones replace the first
        watch.send_signal(signal.SIGINT)
        shown += read_until(ours, lambda shown: b"\x1b[?25h" in shown)
        assert watch.wait(timeout=30) == 130
    os.close(ours)
    text = shown.decode()
    assert "\\x1b" not in text  # what rich draws arrives as it is
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1
    first = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text).split("results", 1)[0]
    assert "16 running" in first
    assert max(len(line) for line in first.splitlines()) <= 80


@pytest.mark.parametrize(("columns", "term"), [(80, "dumb"), (0, "xterm")])
def test_a_terminal_on_which_nothing_can_be_drawn_gets_lines(tmp_path, columns, term):
    results = plant_shared(tmp_path / "results", 2)
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, columns))
    with watching(results.path, cwd=tmp_path, stdout=theirs, stderr=theirs, term=term) as watch:
        os.close(theirs)
        shown = read_until(ours, lambda shown: b"\n" in shown)
        watch.send_signal(signal.SIGINT)
    os.close(ours)
    assert shown.startswith(b"blocks: 2 waiting")


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


def test_what_is_no_result_directory_is_refused_with_the_remedy(tmp_path):
    refused = benchctl("watch", tmp_path)
    assert refused.returncode == 2
    assert "is not a result directory" in refused.stderr
