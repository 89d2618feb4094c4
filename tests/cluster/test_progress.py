"""Progress of an experiment from its files alone: of a run in another process, and of planted records."""

import sys
from collections import Counter

import msgspec
import pytest
from support.results.builders import edit_run, write_results
from support.results.planted_progress import ARM_S, plant_block, plant_shared

from benchctl.cluster.blocks import this_owner
from benchctl.cluster.progress import Watcher
from benchctl.errors import UsageError
from benchctl.records.record import RunFailure
from benchctl.records.schema import ResultWarning
from benchctl.records.writers import sole_writer

OUT_OF_MEMORY = RunFailure(cause="out-of-memory", message="the server ran out of memory")
LATE = ResultWarning(code="client-late", message="requests were sent late")


def test_each_block_is_in_the_state_that_its_owner_and_its_runs_show(tmp_path):
    results = plant_shared(tmp_path, 7)
    plant_block(results, 0, num_ended=6)
    plant_block(results, 1, num_ended=6, warning=LATE)
    plant_block(results, 2, num_ended=6, failure=OUT_OF_MEMORY)
    plant_block(results, 3, num_ended=2)
    plant_block(results, 4, num_ended=2, is_running=True, node="n04")
    plant_block(results, 5, num_ended=0, is_held=True)
    progress = Watcher(results).look()
    states = [block.state for block in progress.blocks]
    assert states == ["done", "suspect", "failed", "interrupted", "running", "running", "waiting"]
    running = progress.blocks[4]
    assert (running.node, running.job, running.devices) == ("n04", "slurm 17_4", ("GPU-n04",))
    assert (running.num_ended, running.num_runs, running.current.phase) == (2, 6, "warm-up")
    problems = [(problem.kind, problem.block) for problem in progress.problems]
    assert problems == [("interrupted", 3), ("suspect", 1), ("failed", 2)]
    assert not progress.has_ended


def test_a_run_that_a_signal_ended_is_left_to_be_measured(tmp_path):
    results = plant_shared(tmp_path, 1)
    interrupted = RunFailure(cause="interrupted", message="the run was interrupted by a signal")
    plant_block(results, 0, num_ended=6, failure=interrupted)
    (block,) = Watcher(results).look().blocks
    assert (block.state, block.num_ended) == ("interrupted", 5)


def test_a_half_written_or_missing_file_keeps_the_last_progress(tmp_path):
    results = plant_shared(tmp_path, 2)
    plant_block(results, 0, num_ended=2, is_running=True)
    watcher = Watcher(results)
    watcher.look()
    running = results.run(results.plan().runs[2].run_id).path / "run.json"
    content = running.read_bytes()
    running.write_bytes(content[:40])
    owner = results.block(0).path / "owner.json"
    whole = owner.read_bytes()
    owner.write_bytes(whole[:60])
    assert [block.state for block in watcher.look().blocks] == ["running", "waiting"]
    manifest = (results.path / "manifest.json").read_bytes()
    (results.path / "manifest.json").write_bytes(manifest[:50])
    assert [block.num_ended for block in watcher.look().blocks] == [2, 0]
    (results.path / "manifest.json").write_bytes(manifest)
    owner.write_bytes(whole)
    running.write_bytes(content.replace(b'"running"', b'"done"'))
    assert [block.num_ended for block in watcher.look().blocks] == [3, 0]


def test_a_directory_that_vanishes_is_an_error_that_names_it(tmp_path):
    watcher = Watcher(plant_shared(tmp_path / "results", 2))
    watcher.look()
    (tmp_path / "results").rename(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match=r"results is not there any more: it was moved or deleted"):
        watcher.look()


def test_the_block_of_an_owner_that_died_on_this_machine_is_lost(tmp_path):
    results = plant_shared(tmp_path, 1)
    plant_block(results, 0, num_ended=2, is_running=True)
    assert Watcher(results).look().blocks[0].state == "running", "nobody can see whether one of another host lives"
    dead = msgspec.structs.replace(this_owner(), pid=1)
    (results.block(0).path / "owner.json").write_bytes(msgspec.json.encode(dead))
    progress = Watcher(results).look()
    assert [(problem.kind, problem.block) for problem in progress.problems] == [("lost", 0)]
    assert "2 of 6 runs ended" in progress.problems[0].message
    assert progress.state == "interrupted"


def test_a_record_that_has_not_changed_is_read_once(tmp_path):
    results = plant_shared(tmp_path, 4)
    for block in range(3):
        plant_block(results, block, num_ended=6)
    plant_block(results, 3, num_ended=3, is_running=True)
    watcher, opened = Watcher(results), []
    watcher.look()
    sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
    watcher.look()
    assert not [path for path in opened if path.endswith("run.json")]
    plant_block(results, 3, num_ended=4)
    assert watcher.look().blocks[3].num_ended == 4


def test_the_time_left_is_that_of_the_runs_left_in_rounds_of_blocks(tmp_path):
    results = plant_shared(tmp_path, 5)
    plant_block(results, 0, num_ended=6)
    assert Watcher(results).look().time_left_s is None, "nobody knows how many will be measured at a time"
    of_block_s = sum(ARM_S.values()) * 0.97 + 6
    for width, rounds in ((1, 4), (2, 2), (3, 2), (4, 1), (9, 1)):
        assert Watcher(results, width).look().time_left_s == pytest.approx(rounds * of_block_s, rel=0.01)


def test_runs_measured_again_on_another_node_replace_the_earlier_ones(tmp_path):
    results = plant_shared(tmp_path, 1)
    plant_block(results, 0, num_ended=4)
    watcher = Watcher(results)
    assert watcher.look().blocks[0].num_ended == 4
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
    assert (progress.state, progress.is_shared) == ("interrupted", False)
    assert Counter(block.state for block in progress.blocks) == {"done": 2, "interrupted": 1}
    ended = Watcher(write_results(tmp_path / "ended")).look()
    assert (ended.has_ended, ended.time_left_s) == (True, 0)
    assert {block.state for block in ended.blocks} == {"done"}
