"""Experiments that end by a rule, get more blocks, go on elsewhere or measure noise: files of simulated runs."""

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from support.cli import WITHOUT_SERVERS, benchctl, document, only_result, printed, refusal

from benchctl.cli.conduct import measure
from benchctl.measure.directory import Origin, reopen_experiment, undone_runs
from benchctl.measure.experiment import create_experiment, run_experiment
from benchctl.measure.run import Listener, RunContext
from benchctl.measure.virtual import simulate_run
from benchctl.profile.load import load_profile
from benchctl.profile.planning import extend_plan, imbalance_of, plan_runs
from benchctl.records.directory import ResultDirectory, RunDirectory
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


def resumed(path: Path, *words: object, **env: str) -> str:
    return printed("run", "--resume", path, "--quiet", *words, **env, **WITHOUT_SERVERS)


def assert_no_blocks_can_be_added(path: Path, why: str) -> None:
    before = (path / "manifest.json").read_bytes()
    assert why in refusal("run", "--resume", path, "--blocks", "12")
    assert (path / "manifest.json").read_bytes() == before


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
    assert "--resume" not in said
    assert len(list((path / "runs").iterdir())) == 12
    manifest = json.loads((path / "manifest.json").read_text())
    stopping = manifest["stopping"]
    assert (manifest["state"], stopping["precision_frac"], stopping["look_blocks"]) == ("done", 0.01, [6, 7, 9, 10])
    (look,) = stopping["looks"]
    (width,) = look["half_widths"]
    assert (look["is_precise"], width["metric"], width["num_blocks"]) == (True, "step_ms", 6)
    assert width["half_width_frac"] < 1e-9

    compared = printed("compare", f"{path}:baseline", f"{path}:guided", "--metrics", "step_ms", code=1)
    assert "change (98.5% CI)" in compared, "at a look before the last"
    assert "could end at 4 looks" in compared
    assert "left out" not in compared, "nobody takes the blocks that were not needed for missing"
    (listed,) = document("list", cwd=tmp_path)["results"]
    assert (listed["num_done"], listed["num_planned"], document("show", path)["not_begun"]) == (12, 12, [])
    assert "runs: 12 done before" in resumed(path)
    assert_no_blocks_can_be_added(path, "its stopping rule declared the looks")


def test_an_interrupted_experiment_goes_on_under_the_same_rule_and_runs_that_are_lost_are_done_again(
    tmp_path: Path,
) -> None:
    overrides = [*STEPS_ONLY, "stopping.precision=0.01", "stopping.looks=3"]
    profile = load_profile("ci-smoke", engine="sim-exact", blocks=8, overrides=overrides)
    origin = Origin(output_root=tmp_path, label=None, argv=("benchctl",))
    results = create_experiment(profile, prepare_requests(profile), origin)
    seen: list[tuple[int, bool]] = []

    def measure(last: int = 99) -> tuple[int, int]:
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
        outcome = run_experiment(results, reopened.profile, reopened.requests, listener, simulate_run)
        return outcome.num_done, outcome.num_skipped

    with pytest.raises(KeyboardInterrupt):
        measure(last=10)
    assert (seen, len(undone_runs(results))) == ([], 5)
    assert (measure(), seen, results.manifest().state) == ((1, 11), [(6, True)], "done")
    assert undone_runs(results) == ()
    (results.run(results.plan().runs[2].run_id).path / "run.json").unlink()
    assert [planned.index for planned in undone_runs(results)] == [2]
    assert measure() == (1, 11)
    assert not (results.path / "runs" / results.plan().runs[12].run_id).exists()


def test_the_only_block_without_which_there_is_no_verdict_is_measured_once_more_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = load_profile("ci-smoke", engine="sim-exact", blocks=6, overrides=SMALL)
    for name, disturbed, num_done in (("one", {4}, 12), ("always", {4, 12}, 11), ("two", {4, 6}, 10)):
        prepared, tried = prepare_requests(profile), Counter[str]()
        origin = Origin(output_root=tmp_path, label=None, argv=("benchctl",), directory=tmp_path / name)
        results = create_experiment(profile, prepared, origin)

        def measure_disturbed(
            context: RunContext, planned: PlannedRun, directory: RunDirectory, disturbed=disturbed, tried=tried
        ) -> RunRecord:
            record = simulate_run(context, planned, directory)
            tried[planned.run_id] += 1
            if tried.total() - 1 in disturbed:
                record = msgspec.structs.replace(record, state="suspect")
                directory.write(record)
            return record

        outcome = measure(results, profile, prepared.requests, "", is_quiet=True, simulate=measure_disturbed)
        again = {"one": {4, 5}, "always": {4, 5}, "two": set()}[name]
        assert (outcome.num_done, outcome.num_suspect) == (num_done, 12 - num_done)
        assert {planned.index for planned in results.plan().runs if tried[planned.run_id] == 2} == again
        told = "block 2 does not count, and a verdict takes all: it is measured once more"
        assert (told in (err := capsys.readouterr().err), "[14/14]" in err) == (bool(again), bool(again))


def test_an_experiment_ends_with_its_verdict_and_every_output_says_what_the_look_said(tmp_path: Path) -> None:
    words = ("run", "ci-smoke", "--blocks", "10", "--until-verdict", *options(STEPS_ONLY))
    done = benchctl(*words, cwd=tmp_path, **WITHOUT_SERVERS)
    path, said = only_result(tmp_path), done.stdout + done.stderr
    for text in (
        "ends early when every primary metric in every cell has its verdict, or when none is likely by the",
        "look after 6 blocks: regression: every metric that decides has its verdict, 4 blocks are not needed",
        "the experiment could end at 4 looks; intervals and verdicts of this one are those of",
    ):
        assert text in said
    stopping = json.loads((path / "manifest.json").read_text())["stopping"]
    (look,) = stopping["looks"]
    assert ("precision_frac" in stopping, look["ends_for"], look["num_blocks"]) == (False, "verdict", 6)
    (comparison,) = document("compare", path, code=1)["comparisons"]
    assert (comparison["verdict"], comparison["confidence"]) == ("regression", stopping["confidence"])
    assert "6 of at most 10 blocks (a verdict reached)" in printed("show", path)
    assert_no_blocks_can_be_added(path, "its stopping rule declared the looks")


def test_a_screening_cannot_have_a_rule_and_a_precision_is_a_number(tmp_path: Path) -> None:
    for words, says in (
        (("--quick", "--until-precision", "1%"), "the first look is after 6 blocks"),
        (("--until-precision", "tight"), "--until-precision is 'tight'"),
        (("--until-precision", "1%", "--until-verdict"), "are two rules; give one of them"),
    ):
        assert says in refusal("run", "--profile", "ci-smoke", *words, "--dry-run", cwd=tmp_path)


def test_blocks_are_added_in_sight_of_everybody_and_the_first_stay_as_they_were(tmp_path: Path) -> None:
    def files(pattern: str) -> dict[Path, bytes]:
        return {file: file.read_bytes() for file in path.glob(pattern) if file.is_file()}

    printed("run", "ci-smoke", *options(SMALL), "--blocks", "2", cwd=tmp_path, **WITHOUT_SERVERS)
    path = only_result(tmp_path)
    first = files("runs/*/*.json*")
    grown = benchctl("run", "--resume", path, "--blocks", "6", "--quiet", **WITHOUT_SERVERS)
    said = grown.stdout + grown.stderr
    assert grown.returncode == 0, said
    assert "4 blocks are added to 2" in said
    assert "runs: 8 done, 4 done before" in said
    assert {name: name.read_bytes() for name in first} == first
    manifest = json.loads((path / "manifest.json").read_text())
    assert (manifest["blocks"], manifest["state"]) == (6, "done")
    (added,) = manifest["extensions"]
    assert (added["from_blocks"], added["to_blocks"], added["num_done"], added["num_looks"]) == (2, 6, 4, 2)

    cost = "blocks were added once after results were seen: intervals are those of 97.5%"
    compared = printed("compare", path, code=1)
    assert "change (97.5% CI)" in compared
    outputs = (said, compared, printed("compare", path, "--markdown", code=1), (path / "report.html").read_text())
    assert all(cost in text for text in outputs)
    (comparison,) = document("compare", path, code=1)["comparisons"]
    assert (comparison["confidence"], comparison["num_looks"], comparison["num_extensions"]) == (0.975, 2, 1)
    assert "6 blocks, 4 of them added" in printed("show", path)

    printed("verify", path)
    before = files("**/*")
    missing = max((path / "runs").iterdir())
    hidden = missing.rename(tmp_path / missing.name)
    rest, more = (resumed(path, "--dry-run", *words) for words in ((), ("--blocks", "8")))
    hidden.rename(missing)
    assert missing.name in rest
    assert "1 of 12 runs left to measure" in rest
    assert "5 of 16 runs left to measure" in more
    assert "blocks are only added" in refusal("run", "--resume", path, "--blocks", "5")
    assert files("**/*") == before
    assert "runs: 12 done before" in resumed(path, "--blocks", "6")
    assert len(json.loads((path / "manifest.json").read_text())["extensions"]) == 1
    plan = path / "plan.json"
    plan.write_bytes(plan.read_bytes().replace(b'"block": 5', b'"block": 4'))
    printed("verify", path, code=4)


def test_no_blocks_are_added_to_what_was_simulated(tmp_path: Path) -> None:
    said = printed("simulate", "--profile", "ci-smoke", "--blocks", "1", *options(SMALL), cwd=tmp_path)
    assert "--resume" not in said
    assert_no_blocks_can_be_added(only_result(tmp_path), "its runs were simulated in virtual time")


def test_a_grown_plan_keeps_its_runs_and_every_block_holds_every_arm_as_balanced_as_in_a_plan_of_its_own() -> None:
    for before, after in ((1, 2), (2, 6), (6, 9), (3, 9), (5, 11), (5, 12), (6, 12), (7, 13), (3, 4), (4, 13)):
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
        if after - before >= 6:
            new = [run for run in grown.runs if run.block >= before]
            alone = plan_runs(load_profile("topk-sweep", blocks=after - before)).runs
            assert imbalance_of(new, "baseline").position_spread == imbalance_of(alone, "baseline").position_spread
            positions = Counter((run.variant, str(run.cell), run.position) for run in grown.runs)
            assert max(positions.values()) <= after // 6 + 2


def edit(path: Path, index: int, **changes: object) -> None:
    run = ResultDirectory(path).runs()[index]
    run.write(msgspec.structs.replace(run.read(), **changes))
    record_run(ResultDirectory(path), run.path.name)


def attempts(path: Path) -> list[int]:
    return [run.read().attempt for run in ResultDirectory(path).runs()]


def test_a_block_that_was_begun_elsewhere_is_measured_again_whole_and_the_user_is_told(tmp_path: Path) -> None:
    """Two blocks of two runs with the clock of a real engine, on n7; the last run has failed."""
    printed("run", "ci-smoke", *options(SMALL), "--blocks", "2", cwd=tmp_path, **WITHOUT_SERVERS)
    path, here = only_result(tmp_path), {"BENCHCTL_NODE_NAME": "n7"}
    for index in range(4):
        edit(path, index, clock="host", node=N7, state="failed" if index == 3 else "done")
    planned = benchctl("run", "--resume", path, "--dry-run")
    assert "2 of 4 runs left to measure" in planned.stdout
    assert "block 1 was begun on n7; all its runs are measured again here" in planned.stderr
    edit(path, 2, node=msgspec.structs.replace(N7, gpus=(NodeGpu(index=0, name="fake", uuid="GPU-1"),)))
    planned = benchctl("run", "--resume", path, "--dry-run", **here)
    assert "2 of 4 runs left to measure" in planned.stdout
    assert "block 1 was begun on other devices of this node" in planned.stderr
    edit(path, 2, node=N7)
    resumed(path, **here)
    assert attempts(path) == [1, 1, 1, 2]
    edit(path, 3, state="failed", clock="host", node=N7)
    assert "runs: 2 done, 2 done before" in resumed(path)
    assert attempts(path) == [1, 1, 2, 3]
    assert [run.read().node_name for run in ResultDirectory(path).runs()][:2] == ["n7", "n7"]
    printed("verify", path)


@pytest.fixture(name="on")
def _on(tmp_path: Path) -> Callable[..., tuple[str, str]]:
    """Runs benchctl on a machine with a store of noise of its own; output and messages."""

    def on(*args: object) -> tuple[str, str]:
        noise = {"BENCHCTL_NOISE_DIR": str(tmp_path / "noise"), **WITHOUT_SERVERS}
        done = benchctl(*args, cwd=tmp_path, **noise)
        assert done.returncode == 0 or args[0] == "compare", done.stderr
        return done.stdout, done.stderr

    return on


def noise_warnings_of(path: Path) -> list[str]:
    warnings = json.loads((path / "manifest.json").read_text())["warnings"]
    return [warning["code"] for warning in warnings if warning["code"].startswith("noise-")]


TINY = [
    *("--quiet", "--set", "workload.num_prompts=1", "--set", "workload.output_len=8"),
    *("--set", "workload.samples_per_prompt=2", "--set", "primary_metrics=[step_ms]"),
]


def test_an_aa_experiment_stores_its_noise_with_which_the_next_one_plans_and_is_judged(tmp_path: Path, on) -> None:
    assert "noise of this machine stored: benchctl noise show" in on("run", "aa", "--blocks", "6", *TINY)[0]
    (entry,) = json.loads(on("noise", "list", "--json")[0])["noise"]
    assert (entry["engine"], entry["metrics"]["step_ms"]["num_blocks"]) == ("sim", 6)

    sweep = ("run", "topk-sweep", *TINY)
    assert "/aa/" in on(*sweep, "--blocks", "6", "--set", "sweep.top_k=[2]")[0]
    path = tmp_path / "results" / "topk-sweep" / "latest"
    noise = json.loads((path / "noise.json").read_text())
    assert noise_warnings_of(path) == []
    sides = (f"{path}:baseline", f"{path}:guided")
    comparison = json.loads(on("compare", *sides, "--json")[0])
    floor = comparison["noise"]["step_ms"]["floor_frac"]
    assert floor == noise["metrics"]["step_ms"]["floor_frac"] > 0.01
    assert comparison["noise_source"].startswith(f"{path / 'noise.json'}, measured in {noise['source']} on ")
    table = on("compare", *sides)[0]
    for text in (
        "noise floor up to ",
        "decides where it exceeds the margin",
    ):
        assert text in table
    assert "noise.json" in json.loads((path / "digests.json").read_text())["files"]

    exact = on(*sweep, "--engine", "sim-exact", "--dry-run")[0]
    assert "neither an A/A nor an earlier result of this server is on file" in exact, "a server with other options"
    other = ["--blocks", "1", "--set", "workload.output_len=9", "--set", "sweep.top_k=[2]", "--output-dir", "other"]
    assert "had another request set" in on(*sweep, *other)[1]
    path = tmp_path / "other" / "topk-sweep" / "latest"
    assert ((path / "noise.json").is_file(), noise_warnings_of(path)) == (True, ["noise-of-another-workload"])


def test_an_experiment_can_keep_its_noise_out_of_the_store_and_too_few_blocks_store_nothing(
    tmp_path: Path, on
) -> None:
    args = ["run", "--profile", "aa", "--engine", "sim-exact", *TINY]
    assert "noise of this machine" not in on(*args, "--blocks", "6", "--no-store-noise")[0]
    assert not (tmp_path / "noise").exists()
    assert "stored: " in on("noise", "add", tmp_path / "results" / "aa" / "latest")[0]
    assert re.search("the noise was not stored.* at least 6", on(*args, "--quick")[1])


def test_noise_of_another_server_is_named_with_the_way_to_measure_the_right_one(tmp_path: Path, on) -> None:
    on("run", "aa", "--blocks", "6", *TINY)
    options = ["run", "ci-smoke", "--engine", "sim-exact", *TINY]
    messages = on(*options, "--blocks", "1")[1].splitlines()
    (warning,) = (line.removeprefix("warning: ") for line in messages if "no A/A experiment of this server" in line)
    sentence, remedy = warning.split("; measure the right one ")
    assert remedy == "with --aa behind the same 'benchctl run'"
    assert "of this machine there is sim" in sentence
    assert "with qwen2.5-7b (other options of the server; aa of 20" in sentence
    latest = tmp_path / "results" / "ci-smoke" / "latest"
    assert sentence in " ".join(on("compare", latest)[0].split())
    measured = on(*options, "--aa", "--blocks", "6")[0]
    assert "noise of this machine stored: " in measured
    assert "more blocks" not in measured.partition("Verdicts")[2]
    assert "no A/A experiment" not in on(*options, "--blocks", "1")[1]
    assert noise_warnings_of(latest) == []
