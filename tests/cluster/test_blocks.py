"""Blocks that processes of their own measure: what each may begin and continue, how it ends, and the union."""

import platform
import signal
import subprocess
import sys
import time
from contextlib import suppress

import msgspec
import psutil
import pytest
from support.cli import benchctl, printed, refusal
from support.hostile_files import HOSTILE, write_hostile
from support.results.builders import write_results
from support.shared_directory import (
    LONG_OUTPUT,
    SLOWLY,
    assert_whole,
    foreign_owner,
    prepared_directory,
    records,
    run_task,
    task,
    task_in_mid_run,
)

from benchctl.cluster.blocks import block_runs, divide
from benchctl.errors import InvalidDataError, UsageError
from benchctl.measure.directory import extend_experiment, reopen_experiment
from benchctl.measure.experiment import pending_in_block
from benchctl.profile.load import stored_profile
from benchctl.records.directory import ResultDirectory, RunDirectory
from benchctl.records.integrity import begin_digests, read_digests, verify_directory
from benchctl.records.schema import NodeGpu, NodeInfo, ResultWarning
from benchctl.records.writers import current_manifest, owner_of, sole_writer


def test_blocks_in_any_order_are_one_experiment_whose_own_files_never_change(tmp_path):
    path = prepared_directory(tmp_path, blocks=2, has_two_arms=True)
    before = {file: file.read_bytes() for file in path.iterdir() if file.is_file()}
    assert run_task(path, 1).stdout == "block 1: 2 done\n"
    assert "interrupted · 2 of 4 runs done" in printed("show", path)
    assert run_task(path, 0).returncode == 0
    assert_whole(path)
    assert run_task(path, 0).stdout == "block 0: 2 done before\n"
    assert {file: file.read_bytes() for file in path.iterdir() if file.is_file()} == before
    assert "done · 4 of 4 runs done" in printed("show", path)
    assert sorted(entry.name for entry in (path / "blocks").iterdir()) == ["b000", "b001"]
    assert "done · 2 of 2 runs done · 1 block" in printed("show", path / "blocks/b001")
    printed("verify", path / "blocks/b001")


def test_no_block_a_stopping_rule_and_a_directory_of_one_process_are_refused_until_it_is_prepared(tmp_path):
    path, ordinary = prepared_directory(tmp_path), tmp_path / "ordinary"
    assert "has 2 blocks: 0 to 1; --block 2 is none" in refusal("run", "--block", 2, "--into", path)
    rule = ("--blocks", "12", "--until-precision", "1%", "--prepare")
    assert "leave out --until-precision" in refusal("run", "ci-smoke", *rule, "-o", ordinary)
    assert not ordinary.exists()
    printed("run", "-p", tmp_path / "small.yaml", "-o", ordinary, "--blocks", "1", cwd=tmp_path)
    assert not (ordinary / "blocks").exists()
    assert "has 1 block: 0; --block 1 is none" in refusal("run", "--block", 1, "--into", ordinary)
    assert f"'benchctl run --resume {ordinary} --prepare' first" in refusal("run", "--block", 0, "--into", ordinary)
    printed("run", "--resume", ordinary, "--prepare", "--blocks", "2")
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
    killed = RunDirectory(ResultDirectory(path).run(records(path, 1)[0].run_id).path / "attempt-1").read()
    assert (killed.state, killed.failure.cause) == ("failed", "interrupted")
    assert "ended before it could record" in killed.failure.message


def signal_tree(pid, number):
    """Signal all descendants and then the process itself, so that its server's end is noticed before the signal."""
    process = psutil.Process(pid)
    for each in (*process.children(recursive=True), process):
        with suppress(psutil.NoSuchProcess):  # some end with the others
            each.send_signal(number)
        time.sleep(0.05)


@pytest.mark.slow
def test_of_many_who_begin_one_block_at_once_one_measures_it(tmp_path):
    path = prepared_directory(tmp_path, *SLOWLY, blocks=1, output_len=60)
    tasks = [task(path, 0) for _ in range(3)]
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
    with subprocess.Popen(["bash", "-c", argv], stderr=subprocess.PIPE, text=True) as limited:
        assert run_task(path, 1).returncode == 0
        said = limited.communicate(timeout=120)
    assert limited.returncode == 5, said
    assert [record.state for record in records(path)] == ["failed", "done"]
    assert owner_of(ResultDirectory(path), 0) is None
    assert run_task(path, 0).returncode == 0
    assert_whole(path)


@pytest.fixture(name="results")
def _results(tmp_path) -> ResultDirectory:
    """Two blocks, measured in one process, then divided."""
    results = write_results(tmp_path / "r", block_factors=({"baseline": 1.0, "guided": 1.0},) * 2)
    begin_digests(results)
    divide(results)
    return results


def edit(results: ResultDirectory, index: int, **changes) -> None:
    run = results.runs()[index]
    run.write(msgspec.structs.replace(run.read(), **changes))


def resume(path, *options):
    return benchctl("run", "--resume", path, *options, cwd=path.parent, CI="1")


def test_a_block_of_another_host_is_left_alone_but_for_its_own_job_or_until_the_user_knows_better(tmp_path):
    path = prepared_directory(tmp_path, blocks=4)
    for block in (1, 2, 3):
        foreign_owner(path, block)
    refused = run_task(path, 1)
    owner = "block 1 was begun by process 4711 on n9 (slurm 17_3)"
    assert (refused.returncode, f"{owner} at 20" in refused.stderr) == (2, True)
    assert "if it no longer lives, add --take-over" in refused.stderr
    assert records(path) == []
    resumed = resume(path)
    assert (resumed.returncode, owner in resumed.stderr) == (0, True), resumed.stderr
    assert [record.block for record in records(path)] == [0]
    nothing = resume(path)
    assert (nothing.returncode, "other processes measure all blocks that are left" in nothing.stderr) == (2, True)
    for task_id, code in (("4", 2), ("3", 0)):
        assert run_task(path, 1, SLURM_ARRAY_JOB_ID="17", SLURM_ARRAY_TASK_ID=task_id).returncode == code
    assert run_task(path, 2, "--take-over").stdout == "block 2: 1 done\n"
    assert resume(path, "--take-over").returncode == 0
    assert_whole(path)
    foreign_owner(path, 1)  # as if it had died behind the last run of its block
    assert current_manifest(ResultDirectory(path)).state == "running"
    assert run_task(path, 1, "--take-over").stdout == "block 1: 1 done before\n"
    assert_whole(path)


def pending(results: ResultDirectory, block: int = 0) -> list[int]:
    profile = stored_profile(results.profile_yaml(), "profile.yaml", is_to_send=True)
    return [run.position for run in pending_in_block(results, block_runs(results, block), profile)]


def test_a_block_that_was_begun_on_another_node_is_measured_again_as_a_whole(results):
    here = NodeInfo(name=platform.node(), hostname=platform.node())
    edit(results, 0, clock="host", node=here)
    edit(results, 1, clock="host", node=here, state="failed")
    assert pending(results) == [1]
    there = msgspec.structs.replace(here, name="n7")
    edit(results, 0, node=there)
    assert pending(results) == [0, 1]
    edit(results, 1, node=there, state="done")
    assert pending(results) == [], "all of it is done, on one node"
    edit(results, 1, node=here)
    assert pending(results) == [0, 1], "done on two nodes, it cannot be compared"
    edit(results, 1, node=msgspec.structs.replace(there, gpus=(NodeGpu(index=0, name="g", uuid="GPU-1"),)))
    assert pending(results) == [0, 1], "done on other devices of one node"
    edit(results, 0, clock="virtual", node=there)
    edit(results, 1, clock="virtual", node=here, state="failed")
    assert pending(results) == [1], "a simulated block is continued anywhere"


def test_arms_to_which_the_profile_gives_devices_may_have_other_ones_on_one_node(results):
    yaml = results.profile_yaml()
    server = "{server: {env: {CUDA_VISIBLE_DEVICES: '%s'}}}\n"
    arms = f"  baseline: {server % '0'}  guided: {server % '0,1'}"
    begin, end = yaml.index("  baseline:"), yaml.index("sweep:")
    results.write_profile((yaml[:begin] + arms + yaml[end:]).replace("{kind: sim}", "{kind: vllm}"))
    for index, uuids in enumerate((("GPU-1",), ("GPU-1", "GPU-2"))):
        gpus = tuple(NodeGpu(index=i, name="g", uuid=uuid) for i, uuid in enumerate(uuids))
        edit(results, index, clock="host", state="done", node=NodeInfo(name="n7", hostname="n7", gpus=gpus))
    assert pending(results) == []
    edit(results, 1, node=NodeInfo(name="n8", hostname="n8"))
    assert pending(results) == [0, 1]


def test_state_and_warnings_are_those_of_the_runs_and_blocks(results):
    for changes, state in (({}, "done"), ({"state": "failed"}, "failed"), ({"state": "running"}, "interrupted")):
        edit(results, 1, **changes)
        assert current_manifest(results).state == state
    foreign_owner(results.path, 0)
    assert current_manifest(results).state == "running"
    warning = ResultWarning(code="noise-of-another-version", message="other version")
    for block in results.begun_blocks().values():
        block.write_manifest(msgspec.structs.replace(block.manifest(), warnings=(warning,)))
    assert current_manifest(results).warnings.count(warning) == 1


def test_a_directory_that_is_measured_is_not_divided_and_its_runs_move_into_their_blocks(tmp_path):
    results = write_results(tmp_path / "r")
    begin_digests(results)
    with sole_writer(results.path), pytest.raises(UsageError, match="another benchctl is measuring"):
        divide(results)
    assert not results.is_divided
    for _ in range(2):
        divide(results)
    assert (sorted(results.begun_blocks()), list((results.path / "runs").iterdir())) == ([0, 1, 2], [])
    assert all(run.is_begun() for run in results.runs())
    assert verify_directory(results.path, is_fresh=True).alterations == ()


def test_altered_missing_and_damaged_files_of_a_block_are_named_with_their_path(results):
    first, second = (results.begun_blocks()[block].path for block in (0, 1))
    manifest = second / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"seed"', b'"Seed"'))
    (first / "digests.json").unlink()
    altered = {(each.file, each.kind) for each in verify_directory(results.path).alterations}
    assert {("blocks/b001/manifest.json", "altered-file"), ("blocks/b000/digests.json", "missing-file")} <= altered
    for path, read in (
        (first / "digests.json", read_digests),
        (second / "owner.json", lambda _: owner_of(results, 1)),
    ):
        for name in HOSTILE:
            write_hostile(path, name)
            if (path.name, name) == ("owner.json", "empty"):
                assert read(results.path) is None
                continue
            with pytest.raises(InvalidDataError) as refused:
                read(results.path)
            assert str(refused.value).startswith(str(path)), (name, refused.value)


def test_blocks_that_lead_elsewhere_and_claims_of_an_older_version_are_refused(results, tmp_path):
    for link in ("blocks", "blocks/b000", "blocks/b000/runs"):
        path, elsewhere = results.path / link, tmp_path / "elsewhere"
        path.rename(elsewhere)
        path.symlink_to(elsewhere)
        before = sorted(tmp_path.rglob("elsewhere/**"))
        with pytest.raises(InvalidDataError, match=f"{link} is a link, not a directory of this directory"):
            results.runs()[0].read()
        assert run_task(results.path, 0).returncode == 4
        assert sorted(tmp_path.rglob("elsewhere/**")) == before
        path.unlink()
        elsewhere.rename(path)
    (results.path / "claims").mkdir()
    assert "measured its blocks by an older version of benchctl" in refusal("show", results.path, code=4)
