"""Progress of an experiment from its files alone, and ``benchctl watch``, which shows it to people and programs."""

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

import msgspec
import pytest
from support.cli import printed, refusal
from support.results.builders import edit_run, write_results
from support.results.planted_progress import ARM_S, plant_block, plant_shared
from support.shared_directory import SLOWLY, prepared_directory, task
from support.waiting import wait_until

from benchctl.cli.commands.watch import progress_lines
from benchctl.cluster.blocks import this_owner
from benchctl.cluster.progress import Watcher
from benchctl.errors import UsageError
from benchctl.records.directory import ResultDirectory
from benchctl.records.record import RunFailure
from benchctl.records.schema import ResultWarning
from benchctl.records.writers import sole_writer

OUT_OF_MEMORY = RunFailure(cause="out-of-memory", message="the server ran out of memory: choose a smaller model")
INTERRUPTED = RunFailure(cause="interrupted", message="the run was interrupted by a signal")
LATE = ResultWarning(code="client-late", message="requests were sent late")


def states(progress):
    return [block.state for block in progress.blocks]


def problems(progress):
    return [(problem.kind, problem.block) for problem in progress.problems]


def test_each_block_is_in_the_state_that_its_owner_and_its_runs_show(tmp_path):
    results = plant_shared(tmp_path, 8)
    for block, (state, planted) in enumerate(
        (
            ("done", {"num_ended": 6}),
            ("suspect", {"num_ended": 6, "warning": LATE}),
            ("failed", {"num_ended": 6, "failure": OUT_OF_MEMORY}),
            ("interrupted", {"num_ended": 2}),
            ("running", {"num_ended": 2, "is_running": True, "node": "n04"}),
            ("running", {"num_ended": 0, "is_held": True}),
            ("interrupted", {"num_ended": 6, "failure": INTERRUPTED}),
        )
    ):
        plant_block(results, block, **planted)
        assert Watcher(results).look().blocks[block].state == state, block
    progress = Watcher(results).look()
    running = progress.blocks[4]
    assert (running.node, running.job, running.devices) == ("n04", "slurm 17_4", ("GPU-n04",))
    assert (running.num_ended, running.num_runs, running.current.phase) == (2, 6, "warm-up")
    assert progress.blocks[6].num_ended == 5, "a run that a signal ended is left to be measured"
    assert problems(progress) == [("interrupted", 3), ("interrupted", 6), ("suspect", 1), ("failed", 2)]
    assert (progress.blocks[7].state, progress.has_ended) == ("waiting", False)


def test_a_half_written_or_missing_file_keeps_the_last_progress_and_a_missing_directory_is_an_error(tmp_path):
    results = plant_shared(tmp_path / "results", 2)
    plant_block(results, 0, num_ended=2, is_running=True)
    watcher = Watcher(results)
    watcher.look()
    running = results.run(results.plan().runs[2].run_id).path / "run.json"
    files = (running, results.block(0).path / "owner.json", results.path / "manifest.json")
    contents = {file: file.read_bytes() for file in files}
    for file, content in contents.items():
        file.write_bytes(content[:40])
        progress = watcher.look()
        assert (states(progress), progress.blocks[0].num_ended) == (["running", "waiting"], 2), file
    contents[running] = contents[running].replace(b'"running"', b'"done"')
    for file, content in contents.items():
        file.write_bytes(content)
    assert watcher.look().blocks[0].num_ended == 3
    results.path.rename(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match=r"results is not there any more: it was moved or deleted"):
        watcher.look()


def test_the_block_of_an_owner_that_died_on_this_machine_is_lost(tmp_path):
    results = plant_shared(tmp_path, 1)
    plant_block(results, 0, num_ended=2, is_running=True)
    assert states(Watcher(results).look()) == ["running"], "nobody can see whether one of another host lives"
    dead = msgspec.structs.replace(this_owner(), pid=1, job="slurm 17_0")
    (results.block(0).path / "owner.json").write_bytes(msgspec.json.encode(dead))
    progress = Watcher(results).look()
    assert (problems(progress), progress.state) == ([("lost", 0)], "interrupted")
    assert "2 of 6 runs ended" in progress.problems[0].message
    waiting = f"waiting for Slurm to give up its task, or {dead.node} (SlurmdTimeout)"
    assert progress.problems[0].message.endswith(f"back; {waiting}")


def test_the_time_left_is_that_of_the_runs_left_in_rounds_of_blocks(tmp_path):
    results = plant_shared(tmp_path, 5)
    plant_block(results, 0, num_ended=6)
    assert Watcher(results).look().time_left_s is None, "nobody knows how many will be measured at a time"
    of_block_s = sum(ARM_S.values()) * 0.97 + 6
    for width, rounds in ((1, 4), (2, 2), (3, 2), (4, 1), (9, 1)):
        assert Watcher(results, width).look().time_left_s == pytest.approx(rounds * of_block_s, rel=0.01)


def test_a_run_on_a_node_that_may_be_lost_is_late_and_then_no_time_left_is_said(tmp_path):
    results = plant_shared(tmp_path, 2)
    plant_block(results, 0, num_ended=6)
    plant_block(results, 1, num_ended=2, is_running=True, elapsed_s=200, node="node0")
    assert "; about " in progress_lines(Watcher(results).look())[1]
    plant_block(results, 1, num_ended=2, is_running=True, elapsed_s=260, node="node0")
    (problem,) = Watcher(results).look().problems
    slurm = "waiting for Slurm to give up node0 (SlurmdTimeout)"
    reason = f"{slurm}, or the run hangs: it takes more than three times as long as others"
    assert (problem.kind, problem.block, problem.message) == ("late", 1, reason)
    lines = progress_lines(Watcher(results).look())
    assert lines[1] == "8 of 12 runs ended; time left unknown until runs have ended"
    assert lines[-1].startswith("late: ")
    plant_block(results, 1, num_ended=2)
    (results.run(results.plan().runs[8].run_id).path / "run.json").unlink()
    left = "nothing is measured now; unless a command or a queued task does, continue with: benchctl run --resume"
    assert progress_lines(Watcher(results).look())[1] == f"8 of 12 runs ended; {left} {tmp_path}"


def test_runs_measured_again_on_another_node_replace_the_earlier_ones(tmp_path):
    results = plant_shared(tmp_path, 1)
    plant_block(results, 0, num_ended=4)
    watcher = Watcher(results)
    watcher.look()
    plant_block(results, 0, num_ended=0, is_running=True, node="n02")
    assert watcher.look().blocks[0].current.run_id == results.plan().runs[0].run_id
    for planned in results.plan().runs[1:4]:  # its owner moves earlier attempts aside
        (results.run(planned.run_id).path / "run.json").unlink()
    plant_block(results, 0, num_ended=1, is_running=True, node="n02")
    (block,) = watcher.look().blocks
    assert (block.num_ended, block.node) == (1, "n02")


def test_an_ordinary_directory_runs_is_interrupted_or_has_ended_as_its_process_has(tmp_path):
    results = write_results(tmp_path, state="running")
    edit_run(results, results.plan().runs[-1].run_id, state="running")
    with sole_writer(results.path):
        assert Watcher(results).look().state == "running"
    progress = Watcher(results).look()
    assert (progress.state, progress.is_shared, states(progress)) == (
        "interrupted", False, ["done", "done", "interrupted"]
    )  # fmt: skip
    ended = Watcher(write_results(tmp_path / "ended")).look()
    assert (ended.has_ended, ended.time_left_s, states(ended)) == (True, 0, ["done"] * 3)


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
        running.wait(timeout=60)
        if running.stdout is not None:
            running.stdout.close()


@pytest.mark.slow
def test_two_tasks_are_watched_and_the_block_of_a_killed_one_is_lost_and_then_taken_over(tmp_path):
    results = prepared_directory(tmp_path, *SLOWLY, blocks=2, output_len=100)
    watcher = Watcher(ResultDirectory(results))
    assert states(watcher.look()) == ["waiting"] * 2
    tasks = [task(results, block) for block in (0, 1)]
    current = wait_until("a run of block 1", lambda: watcher.look().blocks[1].current)
    assert (current.run_id[3:6], 0 <= current.elapsed_s < 60) == ("-b1", True)
    os.killpg(tasks[1].pid, signal.SIGKILL)
    tasks[1].communicate()
    lost = watcher.look()
    assert (lost.blocks[1].state, problems(lost)) == ("lost", [("lost", 1)])
    with watching(results, "--json", cwd=tmp_path, stdout=subprocess.PIPE, text=True) as watch:
        first = watch.stdout.readline()
        heir = task(results, 1)
        lines = [json.loads(line) for line in (first, *watch.stdout)]
        assert watch.wait(timeout=60) == 0
    for each in (tasks[0], heir):
        each.communicate(timeout=60)
        assert each.returncode == 0
    assert (lines[-1]["state"], lines[-1]["runs"]) == ("done", {"done": 2})
    of_block = [line["blocks"][1]["state"] for line in lines]
    assert (of_block[0], "running" in of_block) == ("lost", True)


def test_it_ends_with_the_exit_code_of_run_when_nothing_is_left_to_wait_for(tmp_path):
    suspect, failed = {"state": "suspect", "warnings": (LATE,)}, {"state": "failed", "failure": OUT_OF_MEMORY}
    for code, changes in {0: {}, 4: suspect, 5: failed, 130: {"state": "running"}}.items():
        results = write_results(tmp_path / str(code), state="running" if code == 130 else "done")
        edit_run(results, results.plan().runs[0].run_id, **changes)
        printed("watch", results.path, code=code)
        printed("watch", results.path, "--once")
    assert "is not a result directory" in refusal("watch", tmp_path)


def test_without_a_terminal_there_is_a_line_only_when_something_changed(tmp_path):
    results = plant_shared(tmp_path / "results", 2)
    with watching(results.path, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as watch:
        first = watch.stdout.readline()
        plant_block(results, 0, num_ended=1, is_running=True)
        second = watch.stdout.readline()
        plant_block(results, 0, num_ended=6, failure=OUT_OF_MEMORY)
        plant_block(results, 1, num_ended=6)
        *others, last = watch.stdout.readlines()
        assert watch.wait(timeout=60) == 5
    assert first.startswith("blocks: 2 waiting; 0 of 12 runs ended; nothing is measured now")
    assert second.startswith("blocks: 1 running, 1 waiting; 1 of 12 runs ended; about ")
    assert any(line.startswith("failed: 00") and "out-of-memory" in line for line in others)
    assert last.startswith("blocks: 1 failed, 1 done; 12 of 12 runs ended; nothing is left to measure")
    assert len({first, second, *others, last}) == len(others) + 3


def test_two_hundred_blocks_fit_a_terminal_of_any_height(tmp_path):
    progress = Watcher(large_experiment(tmp_path)).look()
    for height in (9, 13, 23):
        lines = progress_lines(progress, height)
        text = "\n".join(lines)
        assert len(lines) <= height
        for pattern in (
            r"^386 of 1200 runs ended; about .*\n.*16 running",
            r"^2 runs failed: 0.* and 1 more: ",
            r"^block 57 running on gpu-node-01 GPU-gpu-node-01 \(slurm 17_57\): ",
        ):
            assert re.search(pattern, text, re.MULTILINE), pattern
        assert bool(re.search(r"^\d+ more running blocks not shown", lines[-1])) == (height < 23)
    assert lines == progress_lines(progress)


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
    before = {file: file.stat().st_mtime_ns for file in results.path.rglob("*")}
    with on_a_terminal(results, 80, "xterm-256color") as (watch, ours):
        shown = read_until(ours, lambda shown: shown.count(b"\x1b[2K") >= 24)  # later ones replace the first
        watch.send_signal(signal.SIGINT)
        shown += read_until(ours, lambda shown: b"\x1b[?25h" in shown)
        assert watch.wait(timeout=60) == 130
    assert {file: file.stat().st_mtime_ns for file in results.path.rglob("*")} == before
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
    shown = printed("watch", results.path, "--once")
    assert ("\x1b" in shown, "[red]x" in shown) == (False, True)
