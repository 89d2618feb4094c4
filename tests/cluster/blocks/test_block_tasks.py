"""One block as a task of its own: what it measures, what it says, and how it ends."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest
from support.cli import WITHOUT_PICTURES, benchctl
from support.shared_directory import (
    LONG_OUTPUT,
    SLOWLY,
    assert_whole,
    prepared_directory,
    records,
    run_task,
    task,
    task_in_mid_run,
)

from benchctl.measure.directory import extend_experiment, reopen_experiment
from benchctl.records.directory import ResultDirectory
from benchctl.records.integrity import read_digests
from benchctl.records.writers import owner_of


def test_blocks_in_any_order_are_one_experiment_whose_own_files_never_change(tmp_path):
    path = prepared_directory(tmp_path, blocks=2, has_two_arms=True)
    before = {file: file.read_bytes() for file in path.iterdir() if file.is_file()}
    first = run_task(path, 1)
    assert (first.returncode, first.stdout) == (0, "block 1: 2 done\n")
    assert "interrupted · 2 of 4 runs done" in benchctl("show", path, cwd=tmp_path).stdout
    assert run_task(path, 0).returncode == 0
    assert_whole(path)
    again = run_task(path, 0)
    assert (again.returncode, again.stdout) == (0, "block 0: 2 done before\n")
    assert {file: file.read_bytes() for file in path.iterdir() if file.is_file()} == before
    assert "done · 4 of 4 runs done" in benchctl("show", path, cwd=tmp_path).stdout
    assert sorted(entry.name for entry in (path / "blocks").iterdir()) == ["b000", "b001"]
    assert "done · 2 of 2 runs done · 1 block" in benchctl("show", path / "blocks/b001", cwd=tmp_path).stdout
    assert benchctl("verify", path / "blocks/b001", cwd=tmp_path).returncode == 0


def test_no_block_a_stopping_rule_and_a_directory_of_one_process_are_refused_until_it_is_prepared(tmp_path):
    path = prepared_directory(tmp_path)
    refused = run_task(path, 2)
    assert (refused.returncode, "has 2 blocks, from 0 to 1; --block 2 is none" in refused.stderr) == (2, True)
    ordinary, profile = tmp_path / "ordinary", tmp_path / "small.yaml"
    rule = ("--blocks", "12", "--until-precision", "1%", "--prepare")
    refused = benchctl("run", "ci-smoke", *rule, "-o", ordinary, cwd=tmp_path)
    assert (refused.returncode, "leave out --until-precision" in refused.stderr) == (2, True)
    assert not ordinary.exists()
    assert (
        benchctl("run", "-p", profile, "-o", ordinary, "--blocks", "1", cwd=tmp_path, **WITHOUT_PICTURES).returncode
        == 0
    )
    assert not (ordinary / "blocks").exists()
    refused = run_task(ordinary, 0)
    assert refused.returncode == 2
    assert f"'benchctl run --resume {ordinary} --prepare' first" in refused.stderr
    assert benchctl("run", "--resume", ordinary, "--prepare", "--blocks", "2", cwd=tmp_path).returncode == 0
    assert run_task(ordinary, 0).stdout == "block 0: 1 done before\n"
    assert run_task(ordinary, 1).returncode == 0
    assert_whole(ordinary)
    assert extend_experiment(reopen_experiment(ordinary, None), 3).to_blocks == 3
    assert run_task(ordinary, 2).returncode == 0
    assert_whole(ordinary)


@pytest.mark.slow
def test_a_task_that_is_signalled_or_killed_in_mid_run_is_followed_at_once_on_the_same_machine(tmp_path):
    path = prepared_directory(tmp_path, *SLOWLY, blocks=2, output_len=LONG_OUTPUT)
    with task_in_mid_run(path, 0) as process:
        signal_tree(process.pid, signal.SIGUSR1)
        said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    (record,) = records(path)
    assert (record.state, record.failure.cause) == ("failed", "interrupted")
    assert owner_of(ResultDirectory(path), 0) is None
    with task_in_mid_run(path, 1) as process:
        process.kill()
        process.wait()
    assert owner_of(ResultDirectory(path), 1).pid == process.pid
    for block in (0, 1):
        followed = run_task(path, block)
        assert followed.returncode == 0, followed.stderr
    assert_whole(path)
    assert [record.attempt for record in records(path)] == [2, 2]
    killed = records(path, 1)[0]
    lost = json.loads((ResultDirectory(path).run(killed.run_id).path / "attempt-1" / "run.json").read_text())
    assert (lost["state"], lost["failure"]["cause"]) == ("failed", "interrupted")
    assert "ended before it could record" in lost["failure"]["message"]


def signal_tree(pid, number):
    """Signal all descendants and then the process itself, so that its server's end is noticed before the signal."""
    process = psutil.Process(pid)
    for each in (*process.children(recursive=True), process):
        with suppress(psutil.NoSuchProcess):  # some end with the others
            each.send_signal(number)
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("number", "after_s"), [(signal.SIGUSR1, 0.05), (signal.SIGTERM, 0.1), (signal.SIGUSR1, 0.3)]
)
def test_a_signal_in_the_first_moments_of_a_task_ends_it_in_silence(tmp_path, number, after_s):
    with task(tmp_path / "none", 0) as process:
        time.sleep(after_s)
        process.send_signal(number)
        said = process.communicate(timeout=30)
    # While Python itself starts no program can catch a signal; on a busy machine that takes long.
    assert process.returncode in {130, 2, -number}, said
    assert "Traceback" not in said[1]


@pytest.mark.slow
def test_of_many_who_begin_one_block_at_once_one_measures_it(tmp_path):
    path = prepared_directory(tmp_path, *SLOWLY, blocks=1, output_len=60)
    tasks = [task(path, 0) for _ in range(4)]
    ended = [(*each.communicate(timeout=180), each.returncode) for each in tasks]
    assert [out for out, _, _ in ended].count("block 0: 1 done\n") == 1, ended
    for out, error, code in ended:
        assert code in {0, 2}, ended
        if code == 2:
            assert "block 0 is being measured by process" in error
        else:
            assert out in {"block 0: 1 done\n", "block 0: 1 done before\n"}
    assert_whole(path)
    assert [record.attempt for record in records(path)] == [1]


@pytest.mark.slow
def test_a_disk_that_is_full_for_one_task_costs_its_run_alone(tmp_path):
    path = prepared_directory(tmp_path, blocks=2, output_len=200)
    argv = f"ulimit -f 40; exec {sys.executable} -m benchctl run --block 0 --into {path}"
    with subprocess.Popen(["bash", "-c", argv], stderr=subprocess.PIPE, text=True, env={**os.environ}) as limited:
        assert run_task(path, 1).returncode == 0
        said = limited.communicate(timeout=120)
    assert limited.returncode == 5, said
    assert records(path, 0)[0].state == "failed"
    assert all(record.state == "done" for record in records(path, 1))
    assert owner_of(ResultDirectory(path), 0) is None
    assert run_task(path, 0).returncode == 0
    assert_whole(path)
    recorded = read_digests(path).files
    assert len([name for name in recorded if name.endswith("run.json")]) == len(ResultDirectory(path).plan().runs)
