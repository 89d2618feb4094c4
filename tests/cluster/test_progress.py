"""Progress of an experiment from its files alone: of a run in another process, and of planted records."""

import datetime as dt
import subprocess
import sys
import time

import msgspec
import pytest
from support.results.builders import edit_run, write_results
from support.results.planted_progress import plant_block, plant_shared, write_lease

from benchctl.cluster.progress import progress_document, progress_of
from benchctl.cluster.snapshot import SnapshotReader
from benchctl.cluster.watcher import Watcher
from benchctl.errors import UsageError
from benchctl.records.directory import ResultDirectory, Submission, write_submission
from benchctl.records.record import RunFailure
from benchctl.records.schema import ResultWarning

OUT_OF_MEMORY = RunFailure(cause="out-of-memory", message="the server ran out of memory")
LATE = ResultWarning(code="client-late", message="requests were sent late")


class SetClock:
    """A clock of the observer that only the test sets."""

    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        return self.now_s


def begin_experiment(cwd, *options):
    """An experiment in another process, and its result directory once it is there."""
    argv = [sys.executable, "-m", "benchctl", "run", "ci-smoke", "--engine", "sim-exact", "--blocks", "2"]
    running = subprocess.Popen(
        [*argv, "--output", "results", *options], cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline_s = time.monotonic() + 60
    while not (cwd / "results" / "manifest.json").is_file():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    return running, ResultDirectory(cwd / "results")


def states_of(progress):
    return {state: count for state, count in progress.block_states.items() if count}


@pytest.mark.slow
def test_an_ordinary_run_is_watched_from_another_process_to_its_end(tmp_path):
    running, results = begin_experiment(tmp_path, "--set", "workload.num_prompts=2")
    watcher, views = Watcher(results), []
    while running.poll() is None:
        views.append(watcher.look())
        time.sleep(0.1)
    last = watcher.look()
    assert running.returncode == 0
    assert last.has_ended
    assert (last.state, states_of(last), last.run_states) == ("done", {"done": 2}, {"done": 4})
    currents = [block.current for view in views for block in view.blocks if block.current is not None]
    assert {current.run_id for current in currents} <= {planned.run_id for planned in results.plan().runs}
    assert currents
    assert all(current.elapsed_s is not None and current.elapsed_s < 60 for current in currents)
    assert all(view.block_states["running"] <= 1 for view in views)


def test_each_block_is_in_the_state_that_its_claim_and_its_runs_show(tmp_path):
    results = plant_shared(tmp_path, 7)
    plant_block(results, 0, num_ended=6)
    plant_block(results, 1, num_ended=6, warning=LATE)
    plant_block(results, 2, num_ended=6, failure=OUT_OF_MEMORY)
    plant_block(results, 3, num_ended=2)
    plant_block(results, 4, num_ended=2, is_running=True, node="n04", generation=3)
    plant_block(results, 5, num_ended=0, is_held=True)
    progress = progress_of(SnapshotReader(results).read())
    states = [block.state for block in progress.blocks]
    assert states == ["done", "suspect", "failed", "interrupted", "running", "running", "waiting"]
    running = progress.blocks[4]
    assert (running.node, running.job, running.generation) == ("n04", "slurm 17_4", 3)
    assert running.devices == ("GPU-n04",)
    assert (running.num_ended, running.num_runs) == (2, 6)
    assert running.current is not None
    assert running.current.phase == "warm-up"
    assert [(problem.kind, problem.block) for problem in progress.problems] == [
        ("suspect", 1),
        ("failed", 2),
        ("interrupted", 3),
    ]
    assert not progress.has_ended


def test_a_run_that_a_signal_ended_is_left_to_be_measured(tmp_path):
    results = plant_shared(tmp_path, 1)
    interrupted = RunFailure(cause="interrupted", message="the run was interrupted by a signal")
    plant_block(results, 0, num_ended=6, failure=interrupted)
    (block,) = progress_of(SnapshotReader(results).read()).blocks
    assert (block.state, block.num_ended) == ("interrupted", 5)


def test_a_lease_of_another_host_is_lost_only_when_it_was_seen_unchanged_for_its_time(tmp_path):
    results, clock = plant_shared(tmp_path, 1), SetClock()
    hour_ago = dt.datetime.now(dt.UTC) - dt.timedelta(hours=1)
    plant_block(results, 0, num_ended=1, is_running=True)
    reader = SnapshotReader(results, clock)

    def state():
        return progress_of(reader.read()).blocks[0].state

    assert state() == "running"
    clock.now_s += 119
    assert state() == "running"
    clock.now_s += 2
    assert state() == "lost"
    # A sign of life: whatever the clock of the node says.
    lease = results.path / "claims" / "b000-1.json"
    lease.write_bytes(lease.read_bytes().replace(b'"token"', b'"beat":1,"token"'))
    assert state() == "running"
    # Taken over by another node, whose clock is an hour off.
    write_lease(results, 0, 2, "n02", is_held=True, began=hour_ago)
    progress = progress_of(reader.read())
    assert (progress.blocks[0].state, progress.blocks[0].node, progress.blocks[0].generation) == (
        "running",
        "n02",
        2,
    )


def test_elapsed_time_of_a_node_whose_clock_is_an_hour_off_is_that_of_its_own_clock(tmp_path):
    results = plant_shared(tmp_path, 1)
    plant_block(results, 0, num_ended=1, is_running=True)
    lease = results.path / "claims" / "b000-1.json"
    document = msgspec.json.decode(lease.read_bytes())
    run_id = results.plan().runs[1].run_id
    started = dt.datetime.fromisoformat(results.run(run_id).read().started_at) - dt.timedelta(hours=1)
    edit_run(results, run_id, started_at=started.isoformat())
    document["beaten_at"] = (started + dt.timedelta(seconds=33)).isoformat()
    lease.write_bytes(msgspec.json.encode(document))
    clock = SetClock()
    reader = SnapshotReader(results, clock)
    assert reader.read().elapsed_s[run_id] == pytest.approx(33)
    clock.now_s += 5  # until its next sign of life our own clock goes on
    assert reader.read().elapsed_s[run_id] == pytest.approx(38)


def test_a_half_written_or_missing_file_keeps_the_last_progress(tmp_path):
    results = plant_shared(tmp_path, 2)
    plant_block(results, 0, num_ended=2, is_running=True)
    watcher = Watcher(results)
    before = watcher.look()
    running = results.run(results.plan().runs[2].run_id).path / "run.json"
    content = running.read_bytes()
    running.write_bytes(content[:40])
    lease = results.path / "claims" / "b000-1.json"
    lease.write_bytes(lease.read_bytes()[:100])
    assert [block.state for block in watcher.look().blocks] == [block.state for block in before.blocks]
    manifest = (results.path / "manifest.json").read_bytes()
    (results.path / "manifest.json").write_bytes(manifest[:50])
    assert [block.num_ended for block in watcher.look().blocks] == [2, 0]
    (results.path / "manifest.json").write_bytes(manifest)
    running.write_bytes(content.replace(b'"running"', b'"done"'))
    assert [block.num_ended for block in watcher.look().blocks] == [3, 0]


def test_while_all_tasks_are_queued_the_submission_says_how_many_blocks_will_be_measured_at_a_time(tmp_path):
    results = plant_shared(tmp_path, 9)
    plant_block(results, 0, num_ended=6)
    assert Watcher(results).look().time_left is None
    folder = tmp_path / "submissions" / "20260102T030405Z"
    folder.mkdir(parents=True)
    submission = Submission(
        schema_version=3,
        job="17",
        tasks={f"17_{block}": block for block in range(1, 9)},
        submitted_at="2026-01-02T03:04:05Z",
        argv=("benchctl", "run"),
        cluster={"parallel": 4},
    )
    write_submission(tmp_path, folder, submission)
    assert Watcher(results).look().time_left.num_at_a_time == 4
    plant_block(results, 1, num_ended=1, is_running=True)
    assert Watcher(results).look().time_left.num_at_a_time == 1  # what the cluster gives counts


def test_a_directory_that_vanishes_is_an_error_that_names_it(tmp_path):
    path = tmp_path / "results"
    results = plant_shared(path, 2)
    watcher = Watcher(results)
    watcher.look()
    path.rename(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match=r"results is not there any more: it was moved or deleted"):
        watcher.look()


def test_a_refresh_opens_the_held_leases_and_the_current_runs_and_no_record_that_is_final(tmp_path):
    results = plant_shared(tmp_path, 40)
    for block in range(20):
        plant_block(results, block, num_ended=6, failure=OUT_OF_MEMORY if block % 3 == 0 else None)
    for block in range(20, 24):
        plant_block(results, block, num_ended=3, is_running=True)
    opened = files_opened(SnapshotReader(results), 3)
    assert opened[1] == opened[2]
    assert sorted(opened[2]) == sorted(
        ["manifest.json", *(f"b{block:03d}-1.json" for block in range(20, 24)), *["run.json"] * 4]
    )


def files_opened(reader, num_looks):
    """Names of the files that each look opens."""
    looks, is_on = [], [True]

    def note(event, args):
        if event == "open" and is_on[0] and str(args[0]).endswith(".json"):
            looks[-1].append(str(args[0]).rsplit("/", 1)[-1])

    sys.addaudithook(note)
    try:
        for _ in range(num_looks):
            looks.append([])
            reader.read()
    finally:
        is_on[0] = False
    return looks


def test_runs_measured_again_on_another_node_replace_the_earlier_ones(tmp_path):
    results = plant_shared(tmp_path, 1)
    plant_block(results, 0, num_ended=4)
    reader = SnapshotReader(results)
    assert progress_of(reader.read()).blocks[0].num_ended == 4
    plant_block(results, 0, num_ended=0, is_running=True, node="n02", generation=2)
    assert progress_of(reader.read()).blocks[0].current.run_id == results.plan().runs[0].run_id
    for planned in results.plan().runs[1:4]:  # its owner moves earlier attempts aside
        (results.run(planned.run_id).path / "run.json").unlink()
    plant_block(results, 0, num_ended=1, is_running=True, node="n02", generation=2)
    (block,) = progress_of(reader.read()).blocks
    assert (block.num_ended, block.node) == (1, "n02")


def test_an_ordinary_directory_of_a_process_that_was_killed_is_interrupted(tmp_path):
    results = write_results(tmp_path, state="running")
    edit_run(results, results.plan().runs[-1].run_id, state="running")
    progress = progress_of(SnapshotReader(results).read())
    assert (progress.state, progress.is_shared) == ("interrupted", False)
    assert states_of(progress) == {"done": 2, "interrupted": 1}


def test_an_experiment_that_ended_has_no_time_left_and_says_so(tmp_path):
    progress = progress_of(SnapshotReader(write_results(tmp_path)).read())
    assert progress.has_ended
    assert progress.time_left.s == 0
    document = progress_document(progress)
    assert document["blocks"]["done"] == document["num_blocks"] == 3
    assert msgspec.json.encode(document)
