"""Blocks with directories of their own: who may continue what, their union, and what strangers put there."""

import platform

import msgspec
import pytest
from support.cli import WITHOUT_PICTURES, benchctl
from support.hostile_files import HOSTILE, write_hostile
from support.results.builders import write_results
from support.shared_directory import (
    assert_whole,
    foreign_owner,
    prepared_directory,
    records,
    run_task,
)

from benchctl.cluster.blocks import block_runs, divide
from benchctl.errors import InvalidDataError, UsageError
from benchctl.measure.experiment import pending_in_block
from benchctl.profile.load import stored_profile
from benchctl.records.directory import ResultDirectory
from benchctl.records.integrity import begin_digests, read_digests, verify_directory
from benchctl.records.schema import NodeGpu, NodeInfo, ResultWarning
from benchctl.records.writers import current_manifest, owner_of, sole_writer


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
    return benchctl("run", "--resume", path, *options, cwd=path.parent, CI="1", **WITHOUT_PICTURES)


def test_a_block_of_another_host_is_left_alone_but_for_its_own_job_or_until_the_user_knows_better(tmp_path):
    path = prepared_directory(tmp_path, blocks=4)
    for block in (1, 2, 3):
        foreign_owner(path, block)
    refused = run_task(path, 1)
    assert refused.returncode == 2
    assert "block 1 was begun by process 4711 on n9 (slurm 17_3) at 20" in refused.stderr
    assert "if it no longer lives, add --take-over" in refused.stderr
    assert records(path) == []
    resumed = resume(path)
    assert resumed.returncode == 0, resumed.stderr
    assert "block 1 was begun by process 4711 on n9 (slurm 17_3)" in resumed.stderr
    assert [record.block for record in records(path)] == [0]
    nothing = resume(path)
    assert nothing.returncode == 2
    assert "other processes measure all blocks that are left" in nothing.stderr
    assert run_task(path, 1, SLURM_ARRAY_JOB_ID="17", SLURM_ARRAY_TASK_ID="4").returncode == 2
    same = run_task(path, 1, SLURM_ARRAY_JOB_ID="17", SLURM_ARRAY_TASK_ID="3")
    assert same.returncode == 0, same.stderr
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
    assert current_manifest(results).state == "done"
    edit(results, 1, state="failed")
    assert current_manifest(results).state == "failed"
    edit(results, 1, state="running")
    assert current_manifest(results).state == "interrupted"
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
    divide(results)
    divide(results)
    assert sorted(results.begun_blocks()) == [0, 1, 2]
    assert not list((results.path / "runs").iterdir())
    assert all(run.is_begun() for run in results.runs())
    assert verify_directory(results.path, is_fresh=True).alterations == ()


def test_altered_and_missing_files_of_a_block_are_named_with_their_path(results):
    block = results.begun_blocks()[1]
    manifest = msgspec.json.decode((block.path / "manifest.json").read_bytes())
    (block.path / "manifest.json").write_bytes(msgspec.json.encode(manifest | {"seed": 77}))
    (results.begun_blocks()[0].path / "digests.json").unlink()
    altered = {alteration.file: alteration.kind for alteration in verify_directory(results.path).alterations}
    assert altered["blocks/b001/manifest.json"] == "altered-file"
    assert altered["blocks/b000/digests.json"] == "missing-file"


def test_a_damaged_document_of_a_block_is_named(results):
    for document in ("owner.json", "digests.json"):
        path = results.begun_blocks()[0].path / document
        for name in HOSTILE:
            write_hostile(path, name)
            if document == "owner.json" and name == "empty":
                assert owner_of(results, 0) is None
                continue
            with pytest.raises(InvalidDataError) as refusal:
                owner_of(results, 0) if document == "owner.json" else read_digests(results.path)
            assert str(refusal.value).startswith(str(path)), (name, refusal.value)


def test_blocks_that_lead_elsewhere_and_claims_of_an_older_version_are_refused(results, tmp_path):
    for link in ("blocks", "blocks/b000", "blocks/b000/runs"):
        place, elsewhere = results.path / link, tmp_path / "elsewhere"
        place.rename(elsewhere)
        place.symlink_to(elsewhere)
        before = sorted(tmp_path.rglob("elsewhere/**"))
        with pytest.raises(InvalidDataError, match=f"{link} is a link, not a directory of this directory"):
            results.runs()[0].read()
        refused = run_task(results.path, 0)
        assert refused.returncode == 4, refused.stderr
        assert sorted(tmp_path.rglob("elsewhere/**")) == before
        place.unlink()
        elsewhere.rename(place)
    (results.path / "claims").mkdir()
    listed = benchctl("show", results.path, cwd=tmp_path)
    assert listed.returncode == 4
    assert "measured its blocks by an older version of benchctl" in listed.stderr
