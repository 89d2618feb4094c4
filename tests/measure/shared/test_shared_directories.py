"""Shared directories: what is continued where, who is waited for, what is assembled, what strangers put there."""

import json
import platform
import shutil
import threading
import time
from contextlib import contextmanager

import msgspec
import pytest
from support.cli import benchctl
from support.hostile_files import HOSTILE, write_hostile
from support.results.builders import write_results
from support.set_clock import SetClock, needs_compiler
from support.shared_directory import (
    LONG_OUTPUT,
    SLOWLY,
    assert_whole,
    claims,
    prepared_directory,
    records,
    run_task,
    task,
    task_in_mid_run,
)

from benchctl.errors import InvalidDataError, LostClaimError, UsageError
from benchctl.measure.machine import node_name
from benchctl.measure.result_directory import reopen_experiment
from benchctl.measure.resume.attempts import begin_attempt
from benchctl.measure.resume.extension import extend_experiment
from benchctl.measure.resume.here import Here
from benchctl.measure.resume.pending import pending_in_block
from benchctl.measure.shared.assembly import assemble
from benchctl.measure.shared.block import block_runs
from benchctl.profile.load import stored_profile
from benchctl.records.claims import Owner, create_lease, current_manifest, newest_leases, sole_writer
from benchctl.records.directory import ResultDirectory
from benchctl.records.files import write_json_atomic
from benchctl.records.integrity import begin_digests, read_digests
from benchctl.records.schema import SCHEMA_VERSION, NodeGpu, NodeInfo
from benchctl.records.shared_claims import share
from benchctl.records.stores import NOISE, NoiseFloor


@pytest.fixture(name="results")
def _results(tmp_path) -> ResultDirectory:
    """Two blocks, measured in one process, made shared."""
    results = write_results(tmp_path / "r", block_factors=({"baseline": 1.0, "guided": 1.0},) * 2)
    begin_digests(results)
    share(results)
    return results


def owner(node: str, boot_id: str | None = "another") -> Owner:
    return Owner(node=node, hostname=node, boot_id=boot_id, pid=4711, job="slurm 17_3")


@contextmanager
def living_owner(path, block, lease_s, node="n9"):
    """A claim of another host that is kept alive by heartbeats of ours."""
    held = create_lease(path, block, 1, owner(node), lease_s)
    ended = threading.Event()

    def beat():
        while not ended.wait(lease_s / 12):
            held.beat()

    beats = threading.Thread(target=beat)
    beats.start()
    try:
        yield held
    finally:
        ended.set()
        beats.join()
        held.close()


def edit(results: ResultDirectory, index: int, **changes) -> None:
    run = results.runs()[index]
    run.write(msgspec.structs.replace(run.read(), **changes))


def test_a_living_owner_on_another_host_is_named_and_its_block_left_alone(tmp_path):
    path = prepared_directory(tmp_path, blocks=1, lease_s=12.0)
    with living_owner(path, 0, 12.0):
        began_s = time.monotonic()
        refused = run_task(path, 0)
        assert time.monotonic() - began_s < 11.0, "one heartbeat is enough"
    assert refused.returncode == 2
    assert "block 0 is being measured by process 4711 on n9 (slurm 17_3); wait until it has ended" in refused.stderr
    assert "waiting up to 12 s for a sign of life" in refused.stderr
    assert claims(path) == ["b000-1.json"]
    assert records(path) == []


def test_the_block_of_a_dead_owner_on_another_host_is_taken_over_after_its_lease(tmp_path):
    path = prepared_directory(tmp_path, blocks=1, lease_s=4.0)
    create_lease(path, 0, 1, owner("n9"), 4.0).close()
    began_s = time.monotonic()
    taken = run_task(path, 0)
    assert (taken.returncode, time.monotonic() - began_s >= 4.0) == (0, True), taken.stderr
    assert newest_leases(path)[0].generation == 2
    assert_whole(path)


@pytest.mark.slow
@needs_compiler
@pytest.mark.nightly  # by default on Slurm
def test_a_node_whose_clock_is_an_hour_off_neither_takes_a_living_block_nor_keeps_a_dead_one(tmp_path):
    path = prepared_directory(tmp_path, *SLOWLY, blocks=1, lease_s=12.0, output_len=LONG_OUTPUT)
    clock = SetClock(tmp_path)
    clock.set_by(3600.0)
    with task_in_mid_run(path, 0) as process:
        with task(path, 0, **clock.environment) as late:
            said = late.communicate(timeout=60)
        assert late.returncode == 2, said
        assert "block 0 is being measured by process" in said[1]
        process.kill()
        process.wait()
    with task(path, 0, **clock.environment) as late:
        said = late.communicate(timeout=120)
    assert late.returncode == 0, said
    assert_whole(path)
    assert newest_leases(path)[0].begun_at > json.loads((path / "manifest.json").read_text())["created_at"]


def test_resume_measures_what_is_free_and_names_whom_it_left_alone(tmp_path):
    path = prepared_directory(tmp_path, blocks=2, lease_s=10.0)
    with living_owner(path, 1, 10.0):
        resumed = benchctl("run", "--resume", path, cwd=tmp_path, CI="1")
        assert resumed.returncode == 0, resumed.stderr
        assert "block 1 is being measured by process 4711 on n9 (slurm 17_3)" in resumed.stderr
        assert [record.block for record in records(path)] == [0, 0]
        nothing = benchctl("run", "--resume", path, cwd=tmp_path, CI="1")
        assert nothing.returncode == 2
        assert "live processes measure all blocks that are left" in nothing.stderr
    assert benchctl("run", "--resume", path, cwd=tmp_path, CI="1").returncode == 0, "the owner has died"
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
        steps = f"runs/{planned.run_id}/steps.jsonl"
        assert (shared / steps).read_bytes() == (alone / steps).read_bytes()
        assert (alone / steps).stat().st_size
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
    return [run.position for run in pending_in_block(results, block_runs(results, block), Here(profile))]


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


def test_state_and_digests_follow_from_the_runs_whoever_assembles_them(results, tmp_path):
    assert assemble(results)
    assert current_manifest(results).state == "done"
    edit(results, 1, state="failed")
    assert current_manifest(results).state == "failed"
    assert assemble(results)
    assert results.manifest().state == "failed"
    edit(results, 1, state="running")
    assert not assemble(results)
    assert current_manifest(results).state == "interrupted"
    held = create_lease(results.path, 0, 1, owner("n2"), 60.0)
    assert current_manifest(results).state == "running"
    held.close()
    copy = ResultDirectory(shutil.copytree(results.path, tmp_path / "copy"))
    for each in (results, copy):
        edit(each, 1, state="suspect")
    assert assemble(results)
    assert assemble(copy)
    for name in ("manifest.json", "digests.json"):
        assert (results.path / name).read_bytes() == (copy.path / name).read_bytes()


def test_noise_of_another_version_of_the_engine_is_told_by_the_assembly(results):
    floor = NoiseFloor(
        schema_version=SCHEMA_VERSION,
        measured_at="2026-01-01T00:00:00Z",
        source="aa",
        host="host",
        engine="sim",
        engine_sha256="0" * 64,
        engine_version="1.0",
        model="qwen2.5-7b",
        request_set_sha256="0" * 64,
        metrics={},
    )
    write_json_atomic(results.path / NOISE.file, floor)
    for index in range(4):
        edit(results, index, engine_version="2.0")
    assert assemble(results)
    codes = [warning.code for warning in results.manifest().warnings]
    assert [code for code in codes if code.startswith("noise-")] == ["noise-of-another-version"]
    assert assemble(results)
    assert [warning.code for warning in results.manifest().warnings] == codes


def test_a_directory_that_is_measured_is_not_made_a_shared_one(tmp_path):
    results = write_results(tmp_path / "r")
    with sole_writer(results.path), pytest.raises(UsageError, match="another benchctl is measuring"):
        share(results)
    assert not (results.path / "claims").exists()
    share(results)
    share(results)
    assert claims(results.path) == []


def test_blocks_are_added_while_none_is_measured(tmp_path):
    path = prepared_directory(tmp_path, blocks=2)
    reopened = reopen_experiment(path, None)
    held = create_lease(path, 1, 1, owner("n4"), 60.0)
    with pytest.raises(
        UsageError, match=r"block 1 is claimed by process 4711 on n4 \(slurm 17_3\), and blocks are"
    ):
        extend_experiment(reopened, 3)
    held.release()
    held.close()
    assert extend_experiment(reopened, 3).to_blocks == 3
    assert [run_task(path, block).returncode for block in (2, 1, 0)] == [0, 0, 0]
    assert_whole(path)


class Owned:
    """A claim that stands or not, as a test says."""

    def __init__(self):
        self.is_lost = False
        self.at_check = lambda: None

    def __call__(self):
        act, self.at_check = self.at_check, lambda: None
        act()
        if self.is_lost:
            raise LostClaimError("lost")


def test_a_write_that_comes_after_the_claim_was_lost_leaves_the_record_as_it_is(results):
    fence = Owned()
    run = results.run(results.plan().runs[0].run_id, fence)
    before = (run.path / "run.json").read_bytes()
    fence.is_lost = True
    with pytest.raises(LostClaimError):
        run.write(msgspec.structs.replace(run.read(), state="failed"))
    with pytest.raises(LostClaimError):
        run.append("steps")
    assert (run.path / "run.json").read_bytes() == before
    assert not list(run.path.glob(".*"))


def test_a_write_that_was_checked_in_time_and_comes_late_lands_in_the_attempt_that_went_aside(results):
    """The owner is paused just after its check; meanwhile another one takes the run over."""
    paused, successor = Owned(), Owned()
    run_id = results.plan().runs[0].run_id
    run = results.run(run_id, paused)
    late = msgspec.structs.replace(run.read(), state="suspect", attempt=1)

    def take_over():
        theirs = results.run(run_id, successor)
        assert begin_attempt(theirs) == 2
        theirs.write(msgspec.structs.replace(late, state="running", attempt=2))

    paused.at_check = take_over
    run.write(late)
    assert (results.run(run_id).read().state, results.run(run_id).read().attempt) == ("running", 2)
    assert json.loads((run.path / "attempt-1" / "run.json").read_text())["state"] == "suspect"


def test_a_write_of_an_owner_that_lost_its_claim_takes_nothing_from_the_write_of_its_successor(results):
    """The former owner writes, and is refused, just before the new one gives its file its name."""
    former, successor = Owned(), Owned()
    former.is_lost = True
    run_id = results.plan().runs[0].run_id
    record = results.run(run_id).read()

    def write_in_vain():
        with pytest.raises(LostClaimError):
            results.run(run_id, former).write(msgspec.structs.replace(record, state="failed"))

    successor.at_check = write_in_vain
    results.run(run_id, successor).write(msgspec.structs.replace(record, attempt=9))
    assert (results.run(run_id).read().state, results.run(run_id).read().attempt) == ("done", 9)


def test_earlier_attempts_stay_numbered_and_a_take_over_that_was_killed_loses_none(results):
    run = results.run(results.plan().runs[0].run_id, Owned())
    for attempt in (2, 3):
        assert begin_attempt(run) == attempt
        run.write(msgspec.structs.replace(ResultDirectory(results.path).runs()[1].read(), attempt=attempt))
    assert sorted(path.name for path in run.path.iterdir()) == ["attempt-1", "attempt-2", "run.json"]
    # Killed between the two renames: the folder has lost its name.
    fresh = run.path.with_name(f".{run.path.name}.abcd")
    fresh.mkdir()
    run.path.rename(fresh / "attempt-3")
    assert begin_attempt(run) == 4
    kept = {path.relative_to(run.path).as_posix() for path in run.path.rglob("run.json")}
    assert len(kept) == 3, kept


def test_a_claim_that_is_being_created_is_no_lease_yet(results):
    write_hostile(results.path / "claims/b000-1.json", "empty")
    assert 0 not in newest_leases(results.path)


DAMAGED = [("claims/b000-1.json", name) for name in HOSTILE if name != "empty"]
DAMAGED += [("digests/b000-1.json", name) for name in HOSTILE]


@pytest.mark.parametrize(("document", "name"), DAMAGED)
def test_a_damaged_claim_or_digest_is_named(results, document, name):
    write_hostile(results.path / document, name)
    read = newest_leases if document.startswith("claims") else read_digests
    with pytest.raises(InvalidDataError) as refusal:
        read(results.path)
    assert str(refusal.value).startswith(str(results.path / document)), refusal.value


def test_claims_that_lead_elsewhere_are_refused(results, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    shutil.rmtree(results.path / "claims")
    (results.path / "claims").symlink_to(tmp_path / "elsewhere")
    for act in (newest_leases, lambda path: create_lease(path, 0, 1, owner("n2"), 60.0)):
        with pytest.raises(InvalidDataError, match="claims is a link, not a directory of this directory"):
            act(results.path)
    assert not list((tmp_path / "elsewhere").iterdir())


def test_other_files_among_the_claims_are_no_claims(results):
    for name in ("b0-1.json", "b000-0001.json", "b000-1.json.bak", ".b000-1.json.abcd.partial", "x"):
        (results.path / "claims" / name).write_text("{}")
    assert newest_leases(results.path) == {}
