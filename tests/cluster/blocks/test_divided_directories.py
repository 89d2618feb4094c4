"""Blocks with directories of their own: who may continue what, their union, and what strangers put there."""

import json
import platform

import msgspec
import pytest
from support.cli import benchctl
from support.hostile_files import HOSTILE, write_hostile
from support.results.builders import write_results
from support.shared_directory import (
    assert_whole,
    foreign_owner,
    prepared_directory,
    records,
    run_task,
    task,
)

from benchctl.cluster.blocks import block_runs, divide
from benchctl.errors import InvalidDataError, UsageError
from benchctl.measure.directory import begin_attempt, extend_experiment, reopen_experiment
from benchctl.measure.experiment import pending_in_block
from benchctl.measure.machine import node_name
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


def test_an_owner_on_another_host_is_named_and_its_block_left_alone_until_the_user_knows_better(tmp_path):
    path = prepared_directory(tmp_path, blocks=1)
    foreign_owner(path, 0)
    refused = run_task(path, 0)
    assert refused.returncode == 2
    assert "block 0 was begun by process 4711 on n9 (slurm 17_3) at 20" in refused.stderr
    assert "if it no longer lives, add --take-over" in refused.stderr
    assert records(path) == []
    taken = run_task(path, 0, "--take-over")
    assert taken.returncode == 0, taken.stderr
    assert_whole(path)


def test_the_same_job_of_a_scheduler_follows_its_own_earlier_beginning(tmp_path):
    path = prepared_directory(tmp_path, blocks=1)
    foreign_owner(path, 0)
    other = run_task(path, 0, SLURM_ARRAY_JOB_ID="17", SLURM_ARRAY_TASK_ID="4")
    assert other.returncode == 2
    again = run_task(path, 0, SLURM_ARRAY_JOB_ID="17", SLURM_ARRAY_TASK_ID="3")
    assert again.returncode == 0, again.stderr
    assert_whole(path)


def test_resume_measures_what_is_free_and_names_whom_it_left_alone(tmp_path):
    path = prepared_directory(tmp_path, blocks=2)
    foreign_owner(path, 1)
    resumed = benchctl("run", "--resume", path, cwd=tmp_path, CI="1")
    assert resumed.returncode == 0, resumed.stderr
    assert "block 1 was begun by process 4711 on n9 (slurm 17_3)" in resumed.stderr
    assert [record.block for record in records(path)] == [0, 0]
    nothing = benchctl("run", "--resume", path, cwd=tmp_path, CI="1")
    assert nothing.returncode == 2
    assert "other processes measure all blocks that are left" in nothing.stderr
    assert benchctl("run", "--resume", path, "--take-over", cwd=tmp_path, CI="1").returncode == 0
    assert_whole(path)


@pytest.mark.slow
def test_two_processes_and_any_order_of_blocks_give_the_bytes_and_the_verdict_of_one_machine(tmp_path):
    options = ("--engine", "sim-exact", "--blocks", "6", "--set", "workload.num_prompts=3")
    options += ("--set", "workload.output_len=16", "--set", "sweep.top_k=[5]", "--set", "workload.num_warmups=0")
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    measured = benchctl("run", "topk-sweep", *options, "-o", alone, cwd=tmp_path, CI="1")
    assert measured.returncode == 0, measured.stderr
    assert benchctl("run", "topk-sweep", *options, "--prepare", "-o", shared, cwd=tmp_path).returncode == 0
    for blocks in ((5, 0), (2, 4), (3, 1)):
        tasks = [task(shared, block) for block in blocks]
        said = [each.communicate(timeout=180) for each in tasks]
        assert [each.returncode for each in tasks] == [0, 0], said
    assert_whole(shared)
    for name in ("requests.jsonl", "plan.json"):
        assert (shared / name).read_bytes() == (alone / name).read_bytes()
    for planned in ResultDirectory(alone).plan().runs:
        steps = ResultDirectory(alone).run(planned.run_id).step_log.read_bytes()
        assert ResultDirectory(shared).run(planned.run_id).step_log.read_bytes() == steps
        assert steps
    assert verdicts(alone, tmp_path) == verdicts(shared, tmp_path)


def verdicts(path, cwd):
    """What compare says of the time per step, which is exact; what clients saw differs between experiments."""
    compared = benchctl("compare", path, "--json", cwd=cwd)
    comparisons = json.loads(compared.stdout)["comparisons"]
    metrics = [metric for each in comparisons for metric in each["metrics"] if metric["name"] == "step_ms"]
    assert metrics
    keys = (
        "cell",
        "a",
        "b",
        "ratio",
        "ci_low",
        "ci_high",
        "blocks",
        "verdict",
        "margin_frac",
        "a_blocks",
        "b_blocks",
    )
    return compared.returncode, [[metric[key] for key in keys] for metric in metrics]


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


def test_a_simulated_block_is_continued_anywhere(results):
    edit(results, 0, clock="virtual", node=NodeInfo(name="n7", hostname="n7"))
    edit(results, 1, clock="virtual", state="failed")
    assert pending(results) == [1]


def test_the_name_of_a_node_is_what_the_user_says_it_is(monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "n3")
    assert node_name() == "n3"
    monkeypatch.setenv("BENCHCTL_NODE_NAME", "worker-1")
    assert node_name() == "worker-1"


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


def test_blocks_are_added_to_a_divided_experiment(tmp_path):
    path = prepared_directory(tmp_path, blocks=2)
    assert run_task(path, 1).returncode == 0
    assert extend_experiment(reopen_experiment(path, None), 3).to_blocks == 3
    assert [run_task(path, block).returncode for block in (2, 1, 0)] == [0, 0, 0]
    assert_whole(path)


def test_earlier_attempts_stay_numbered(results):
    run = results.runs()[0]
    for attempt in (2, 3):
        assert begin_attempt(run) == attempt
        run.write(msgspec.structs.replace(results.runs()[1].read(), attempt=attempt))
    assert sorted(path.name for path in run.path.iterdir()) == ["attempt-1", "attempt-2", "run.json"]


def test_altered_and_missing_files_of_a_block_are_named_with_their_path(results):
    block = results.begun_blocks()[1]
    manifest = msgspec.json.decode((block.path / "manifest.json").read_bytes())
    (block.path / "manifest.json").write_bytes(msgspec.json.encode(manifest | {"seed": 77}))
    (results.begun_blocks()[0].path / "digests.json").unlink()
    altered = {alteration.file: alteration.kind for alteration in verify_directory(results.path).alterations}
    assert altered["blocks/b001/manifest.json"] == "altered-file"
    assert altered["blocks/b000/digests.json"] == "missing-file"


@pytest.mark.parametrize("document", ["owner.json", "digests.json"])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_damaged_document_of_a_block_is_named(results, document, name):
    path = results.begun_blocks()[0].path / document
    write_hostile(path, name)
    if document == "owner.json" and name == "empty":
        assert owner_of(results, 0) is None
        return
    with pytest.raises(InvalidDataError) as refusal:
        owner_of(results, 0) if document == "owner.json" else read_digests(results.path)
    assert str(refusal.value).startswith(str(path)), refusal.value


@pytest.mark.parametrize("link", ["blocks", "blocks/b000", "blocks/b000/runs"])
def test_blocks_that_lead_elsewhere_are_refused(results, tmp_path, link):
    (results.path / link).rename(tmp_path / "elsewhere")
    (results.path / link).symlink_to(tmp_path / "elsewhere")
    before = sorted(tmp_path.rglob("elsewhere/**"))
    with pytest.raises(InvalidDataError, match=f"{link} is a link, not a directory of this directory"):
        results.runs()[0].read()
    refused = run_task(results.path, 0)
    assert refused.returncode == 4, refused.stderr
    assert sorted(tmp_path.rglob("elsewhere/**")) == before


def test_a_directory_of_an_older_version_with_claims_says_so_in_one_sentence(results, tmp_path):
    (results.path / "claims").mkdir()
    shown = benchctl("show", results.path, cwd=tmp_path)
    assert shown.returncode == 4
    assert "measured its blocks by an older version of benchctl" in shown.stderr
