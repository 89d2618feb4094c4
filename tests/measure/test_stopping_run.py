"""Experiments that end by a declared rule: real files of simulated runs."""

import json
from pathlib import Path

import pytest
from support.cli import WITHOUT_SERVERS, benchctl, only_result

from benchctl.measure.directory import Origin, reopen_experiment, undone_runs
from benchctl.measure.experiment import Listener, Outcome, create_experiment, run_experiment
from benchctl.measure.virtual import simulate_run
from benchctl.profile.load import load_profile
from benchctl.records.record import PlannedRun, RunRecord
from benchctl.workload.prepare import prepare_requests

SMALL = ["workload.num_prompts=1", "workload.output_len=8", "gates=[]", "primary_metrics=[step_ms]"]
"""On a simulator without noise the step time is exact, so that the first look ends the experiment."""


def test_an_experiment_ends_at_the_look_at_which_everything_is_precise(tmp_path: Path) -> None:
    options = [word for override in SMALL for word in ("--set", override)]
    done = benchctl(
        *("run", "--profile", "ci-smoke", "--engine", "sim-exact", "--quiet", "--blocks", "10"),
        *("--until-precision", "1%", *options),
        cwd=tmp_path,
        **WITHOUT_SERVERS,
    )
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


def test_an_interrupted_experiment_goes_on_under_the_same_rule_and_runs_that_are_lost_are_done_again(
    tmp_path: Path,
) -> None:
    overrides = [*SMALL, "stopping.precision=0.01", "stopping.looks=3"]
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
