"""Experiments that end by a rule, get more blocks, or go on elsewhere: real files of simulated runs."""

import json
import subprocess
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from support.cli import WITHOUT_SERVERS, benchctl, only_result

from benchctl.measure.directory import Origin, reopen_experiment, undone_runs
from benchctl.measure.experiment import Listener, Outcome, create_experiment, run_experiment
from benchctl.measure.virtual import simulate_run
from benchctl.profile.load import load_profile
from benchctl.profile.planning import extend_plan, imbalance_of, plan_runs
from benchctl.records.directory import ResultDirectory
from benchctl.records.integrity import record_run
from benchctl.records.record import PlannedRun, RunRecord
from benchctl.records.schema import NodeGpu, NodeInfo
from benchctl.workload.prepare import prepare_requests

SMALL = ["workload.num_prompts=1", "workload.output_len=8", "gates=[]"]
STEPS_ONLY = [*SMALL, "primary_metrics=[step_ms]"]
"""On a simulator without noise the step time is exact, so that the first look ends the experiment."""
N7 = NodeInfo(name="n7", hostname="n7")


def options(overrides: list[str]) -> list[str]:
    return ["--engine", "sim-exact", "--quiet", *(word for override in overrides for word in ("--set", override))]


def test_an_experiment_ends_at_the_look_at_which_everything_is_precise(tmp_path: Path) -> None:
    words = ("run", "ci-smoke", "--blocks", "10", "--until-precision", "1%", *options(STEPS_ONLY))
    done = benchctl(*words, cwd=tmp_path, **WITHOUT_SERVERS)
    path, said = only_result(tmp_path), done.stdout + done.stderr
    assert done.returncode == 0, said
    for text in (
        "ends early when every primary metric in every cell is known to ±1%",
        "looks after block 6, 7, 9, 10",
        "look after 6 blocks: every primary metric is known to ±1%, 4 blocks are not needed",
    ):
        assert text in said
    assert len(list((path / "runs").iterdir())) == 12
    manifest = json.loads((path / "manifest.json").read_text())
    stopping = manifest["stopping"]
    assert (manifest["state"], stopping["precision_frac"], stopping["look_blocks"]) == ("done", 0.01, [6, 7, 9, 10])
    (look,) = stopping["looks"]
    assert look["is_precise"]
    (width,) = look["half_widths"]
    assert (width["metric"], width["num_blocks"]) == ("step_ms", 6)
    assert width["half_width_frac"] < 1e-9

    sides = (f"{path}:baseline", f"{path}:guided")
    compared = benchctl("compare", *sides, "--metrics", "step_ms", cwd=tmp_path)
    assert compared.returncode == 1, compared.stderr
    assert "change (98.8% CI)" in compared.stdout
    assert "could end at 4 looks" in compared.stdout
    assert "left out" not in compared.stdout, "nobody takes the blocks that were not needed for missing"
    listed = json.loads(benchctl("list", "--json", cwd=tmp_path).stdout)["results"][0]
    assert (listed["num_done"], listed["num_planned"]) == (12, 12)
    assert json.loads(benchctl("show", path, "--json", cwd=tmp_path).stdout)["not_begun"] == []
    resumed = benchctl("run", "--resume", path, "--quiet", cwd=tmp_path, **WITHOUT_SERVERS)
    assert resumed.returncode == 0, resumed.stderr
    assert "runs: 12 done before" in resumed.stdout
    assert "--resume" not in said
    assert_no_blocks_can_be_added(path, "its stopping rule declared the looks")


def test_an_interrupted_experiment_goes_on_under_the_same_rule_and_runs_that_are_lost_are_done_again(
    tmp_path: Path,
) -> None:
    overrides = [*STEPS_ONLY, "stopping.precision=0.01", "stopping.looks=3"]
    profile = load_profile("ci-smoke", engine="sim-exact", blocks=8, overrides=overrides)
    prepared = prepare_requests(profile)
    results = create_experiment(profile, prepared, Origin(output_root=tmp_path, label=None, argv=("benchctl",)))
    seen: list[tuple[int, bool]] = []

    def measure(last: int = 99) -> Outcome:
        def interrupt(planned: PlannedRun, _record: RunRecord) -> None:
            if planned.index == last:
                raise KeyboardInterrupt

        listener = Listener(
            on_run_start=lambda _planned, _number: None,
            on_request_end=lambda _number: None,
            on_run_end=interrupt,
            on_log_line=lambda _line: None,
            on_look=lambda look, _rule: seen.append((look.num_blocks, look.is_precise)),
        )
        reopened = reopen_experiment(results.path, profile)
        return run_experiment(results, reopened.profile, reopened.requests, listener, simulate_run)

    with pytest.raises(KeyboardInterrupt):
        measure(last=10)
    assert (seen, len(undone_runs(results))) == ([], 5)
    outcome = measure()
    assert seen == [(6, True)]
    assert (outcome.num_done, outcome.num_skipped) == (1, 11)
    assert results.manifest().state == "done"
    assert undone_runs(results) == ()
    (results.run(results.plan().runs[2].run_id).path / "run.json").unlink()
    assert [planned.index for planned in undone_runs(results)] == [2]
    outcome = measure()
    assert (outcome.num_done, outcome.num_skipped) == (1, 11)
    assert not (results.path / "runs" / results.plan().runs[12].run_id).exists()


def test_a_screening_cannot_have_a_rule_and_a_precision_is_a_number(tmp_path: Path) -> None:
    for words, says in (
        (("--quick", "--until-precision", "1%"), "the first look is after 6 blocks"),
        (("--until-precision", "tight"), "--until-precision is 'tight'"),
    ):
        done = benchctl("run", "--profile", "ci-smoke", *words, "--dry-run", cwd=tmp_path)
        assert (done.returncode, says in done.stderr) == (2, True), done.stderr


def test_blocks_are_added_in_sight_of_everybody_and_the_first_stay_as_they_were(tmp_path: Path) -> None:
    def run(*words: object) -> "subprocess.CompletedProcess[str]":
        return benchctl("run", *words, cwd=tmp_path, **WITHOUT_SERVERS)

    def files(pattern: str) -> dict[Path, bytes]:
        return {file: file.read_bytes() for file in path.glob(pattern) if file.is_file()}

    assert run("ci-smoke", *options(SMALL), "--blocks", "2").returncode == 0
    path = only_result(tmp_path)
    first = files("runs/*/*.json*")
    grown = run("--resume", path, "--blocks", "6", "--quiet")
    assert grown.returncode == 0, grown.stderr
    said = grown.stdout + grown.stderr
    assert "4 blocks are added to 2" in said
    assert "runs: 8 done, 4 done before" in said
    assert {name: name.read_bytes() for name in first} == first
    manifest = json.loads((path / "manifest.json").read_text())
    assert (manifest["blocks"], manifest["state"]) == (6, "done")
    (added,) = manifest["extensions"]
    assert (added["from_blocks"], added["to_blocks"], added["num_done"], added["num_looks"]) == (2, 6, 4, 2)

    cost = "blocks were added once after results were seen: intervals are those of 97.5%"
    compared = benchctl("compare", path)
    assert compared.returncode == 1
    assert "change (97.5% CI)" in compared.stdout
    outputs = (said, compared.stdout, benchctl("compare", path, "--markdown").stdout)
    assert all(cost in text for text in (*outputs, (path / "report.html").read_text()))
    (document,) = json.loads(benchctl("compare", path, "--json").stdout)["comparisons"]
    assert (document["confidence"], document["num_looks"], document["num_extensions"]) == (0.975, 2, 1)
    assert "6 blocks, 4 of them added" in benchctl("show", path).stdout

    verified = benchctl("verify", path)
    assert verified.returncode == 0, verified.stdout
    before = files("**/*")
    missing = max((path / "runs").iterdir())
    hidden = missing.rename(tmp_path / missing.name)
    rest, more = (run("--resume", path, "--dry-run", *words) for words in ((), ("--blocks", "8")))
    hidden.rename(missing)
    assert missing.name in rest.stdout
    assert "1 of 12 runs left to measure" in rest.stdout
    assert "5 of 16 runs left to measure" in more.stdout
    assert run("--resume", path, "--dry-run", "--blocks", "2").returncode == 2
    assert files("**/*") == before
    again = run("--resume", path, "--blocks", "6", "--quiet")
    assert again.returncode == 0, again.stderr
    assert "runs: 12 done before" in again.stdout
    assert len(json.loads((path / "manifest.json").read_text())["extensions"]) == 1
    fewer = run("--resume", path, "--blocks", "5")
    assert (fewer.returncode, "blocks are only added" in fewer.stderr) == (2, True)
    plan = path / "plan.json"
    plan.write_bytes(plan.read_bytes().replace(b'"block": 5', b'"block": 4'))
    assert benchctl("verify", path).returncode == 4


def test_no_blocks_are_added_to_what_was_simulated(tmp_path: Path) -> None:
    begun = benchctl("simulate", "--profile", "ci-smoke", "--blocks", "1", *options(SMALL), cwd=tmp_path)
    assert begun.returncode == 0, begun.stderr
    assert "--resume" not in begun.stdout
    assert_no_blocks_can_be_added(only_result(tmp_path), "its runs were simulated in virtual time")


def assert_no_blocks_can_be_added(path: Path, why: str) -> None:
    before = (path / "manifest.json").read_bytes()
    grown = benchctl("run", "--resume", path, "--blocks", "12")
    assert (grown.returncode, why in grown.stderr) == (2, True), grown.stderr
    assert (path / "manifest.json").read_bytes() == before


def test_a_grown_plan_keeps_its_runs_and_every_block_holds_every_arm() -> None:
    for before, after in ((1, 2), (2, 6), (6, 9), (5, 12), (6, 12), (7, 9), (3, 4), (4, 13)):
        profile = load_profile("topk-sweep", blocks=before)
        grown = extend_plan(plan_runs(profile), profile, after)
        assert grown.runs[: 6 * before] == plan_runs(profile).runs
        assert [run.index for run in grown.runs] == list(range(6 * after))
        assert len({run.run_id for run in grown.runs}) == 6 * after
        for block in range(after):
            runs = [run for run in grown.runs if run.block == block]
            assert [run.position for run in runs] == list(range(6))
            assert len({(run.variant, str(run.cell)) for run in runs}) == 6
        if before in {2, 6}:
            assert grown == plan_runs(load_profile("topk-sweep", blocks=after)), "it begins the longer one"


def test_new_blocks_are_as_balanced_among_themselves_as_a_plan_of_as_many() -> None:
    for before, after in ((3, 9), (5, 11), (5, 12), (7, 13)):
        profile = load_profile("topk-sweep", blocks=before)
        grown = extend_plan(plan_runs(profile), profile, after)
        new = [run for run in grown.runs if run.block >= before]
        alone = plan_runs(load_profile("topk-sweep", blocks=after - before)).runs
        assert imbalance_of(new, "baseline").position_spread == imbalance_of(alone, "baseline").position_spread
        positions = Counter((run.variant, str(run.cell), run.position) for run in grown.runs)
        assert max(positions.values()) <= after // 6 + 2


@pytest.fixture(name="path")
def _path(tmp_path: Path) -> Path:
    """Two blocks of two runs with the clock of a real engine, on n7; the last run has failed."""
    begun = benchctl("run", "ci-smoke", *options(SMALL), "--blocks", "2", cwd=tmp_path, **WITHOUT_SERVERS)
    assert begun.returncode == 0
    path = only_result(tmp_path)
    for index in range(4):
        edit(path, index, clock="host", node=N7)
    edit(path, 3, state="failed")
    return path


def edit(path: Path, index: int, **changes: object) -> None:
    run = ResultDirectory(path).runs()[index]
    run.write(msgspec.structs.replace(run.read(), **changes))
    record_run(ResultDirectory(path), run.path.name)


def attempts(path: Path) -> list[int]:
    return [run.read().attempt for run in ResultDirectory(path).runs()]


def test_a_block_that_was_begun_elsewhere_is_measured_again_whole_and_the_user_is_told(path):
    resume, here = ("run", "--resume", path), {"BENCHCTL_NODE_NAME": "n7"}
    planned = benchctl(*resume, "--dry-run")
    assert "2 of 4 runs left to measure" in planned.stdout
    assert "block 1 was begun on n7; all its runs are measured again here" in planned.stderr
    edit(path, 2, node=msgspec.structs.replace(N7, gpus=(NodeGpu(index=0, name="fake", uuid="GPU-1"),)))
    planned = benchctl(*resume, "--dry-run", **here)
    assert "block 1 was begun on other devices of this node" in planned.stderr
    assert "2 of 4 runs left to measure" in planned.stdout
    edit(path, 2, node=N7)
    assert attempts(path) == [1, 1, 1, 1]
    on_n7 = benchctl(*resume, "--quiet", **here, **WITHOUT_SERVERS)
    assert on_n7.returncode == 0, on_n7.stderr
    assert "measured again" not in on_n7.stderr
    assert attempts(path) == [1, 1, 1, 2]
    edit(path, 3, state="failed", clock="host", node=N7)
    resumed = benchctl(*resume, "--quiet", **WITHOUT_SERVERS)
    assert resumed.returncode == 0, resumed.stderr
    assert "block 1 was begun on n7; all its runs are measured again here" in resumed.stderr
    assert "runs: 2 done, 2 done before" in resumed.stdout
    assert attempts(path) == [1, 1, 2, 3]
    assert [run.read().node_name for run in ResultDirectory(path).runs()][:2] == ["n7", "n7"]
    assert benchctl("verify", path).returncode == 0
