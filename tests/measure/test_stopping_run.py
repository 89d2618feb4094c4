"""Experiments that end by a declared rule: real servers, real files."""

import json
from pathlib import Path

import pytest
from support.cli import benchctl, only_result

from benchctl.cli.conduct import experiment_progress
from benchctl.measure.directory import Origin, reopen_experiment, undone_runs
from benchctl.measure.experiment import Listener, create_experiment, run_experiment
from benchctl.profile.load import load_profile
from benchctl.records.record import Look, PlannedRun, RunRecord, StoppingRecord
from benchctl.workload.prepare import prepare_requests

pytestmark = pytest.mark.slow
SMALL = ["workload.num_prompts=1", "workload.output_len=8", "engine.options.time_scale=20", "gates=[]"]
STEPS_ONLY = ["primary_metrics=[step_ms]", "stopping.precision=0.01", "stopping.looks=3"]
"""On a simulator without noise the step time is exact, so that the first look ends the experiment."""


def as_options(overrides: list[str]) -> list[str]:
    return [word for override in overrides for word in ("--set", override)]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """An experiment that its first look ended, and what was said on the way."""
    cwd = tmp_path_factory.mktemp("ended")
    done = benchctl(
        *("run", "--profile", "ci-smoke", "--engine", "sim-exact", "--quiet", "--blocks", "10"),
        *("--until-precision", "1%", *as_options([*SMALL, *STEPS_ONLY[:1]])),
        cwd=cwd,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return only_result(cwd), done.stdout + done.stderr


def test_the_looks_are_said_before_and_the_end_when_it_comes(ended: tuple[Path, str]) -> None:
    path, said = ended
    assert "ends early when every primary metric in every cell is known to ±1%" in said
    assert "looks after block 6, 7, 9, 10" in said
    assert "look after 6 blocks: every primary metric is known to ±1%, 4 blocks are not needed" in said
    assert len(list((path / "runs").iterdir())) == 12


def test_the_manifest_says_what_was_seen_at_each_look(ended: tuple[Path, str]) -> None:
    manifest = json.loads((ended[0] / "manifest.json").read_text())
    assert manifest["state"] == "done"
    stopping = manifest["stopping"]
    assert (stopping["precision_frac"], stopping["look_blocks"]) == (0.01, [6, 7, 9, 10])
    (look,) = stopping["looks"]
    assert look["is_precise"]
    (width,) = look["half_widths"]
    assert (width["metric"], width["num_blocks"]) == ("step_ms", 6)
    assert width["half_width_frac"] < 1e-9


def test_nobody_takes_the_blocks_that_were_not_needed_for_missing(ended: tuple[Path, str]) -> None:
    path, _ = ended
    compared = benchctl(
        "compare", f"{path}:baseline", f"{path}:guided", "--metrics", "step_ms", cwd=path.parents[2]
    )
    assert compared.returncode == 1, compared.stderr
    assert "change (98.8% CI)" in compared.stdout
    assert "could end at 4 looks" in compared.stdout
    assert "left out" not in compared.stdout
    listed = json.loads(benchctl("list", "--json", cwd=path.parents[2]).stdout)
    assert (listed["results"][0]["num_done"], listed["results"][0]["num_planned"]) == (12, 12)
    shown = json.loads(benchctl("show", str(path), "--json", cwd=path.parents[2]).stdout)
    assert shown["not_begun"] == []
    resumed = benchctl("run", "--resume", str(path), "--quiet", cwd=path.parents[2])
    assert resumed.returncode == 0, resumed.stderr
    assert "runs: 12 done before" in resumed.stdout


def test_an_interrupted_experiment_goes_on_under_the_same_rule(tmp_path: Path) -> None:
    profile = load_profile("ci-smoke", engine="sim-exact", blocks=8, overrides=[*SMALL, *STEPS_ONLY])
    prepared = prepare_requests(profile)
    results = create_experiment(profile, prepared, Origin(output_root=tmp_path, label=None, argv=("benchctl",)))
    seen: list[tuple[int, bool]] = []

    def note(look: Look, _rule: StoppingRecord) -> None:
        seen.append((look.num_blocks, look.is_precise))

    def interrupt(planned: PlannedRun, _record: RunRecord) -> None:
        if planned.index == 10:
            raise KeyboardInterrupt

    def listener(ended: object) -> Listener:
        return Listener(
            on_run_start=lambda _planned, _number: None,
            on_request_end=lambda _number: None,
            on_run_end=ended,  # type: ignore[arg-type]
            on_log_line=lambda _line: None,
            on_look=note,
        )

    with pytest.raises(KeyboardInterrupt):
        run_experiment(results, profile, prepared.requests, listener(interrupt))
    assert seen == []
    assert len(undone_runs(results)) == 5
    reopened = reopen_experiment(results.path, profile)
    outcome = run_experiment(
        reopened.results, reopened.profile, reopened.requests, listener(lambda _planned, _record: None)
    )
    assert seen == [(6, True)]
    assert (outcome.num_done, outcome.num_skipped) == (1, 11)
    assert results.manifest().state == "done"
    assert undone_runs(results) == ()


@pytest.mark.nightly
def test_a_run_that_failed_is_done_again_after_the_rule_has_ended_the_rest(tmp_path: Path) -> None:
    overrides = [*SMALL, "primary_metrics=[step_ms]", "stopping.precision=0.01", "stopping.looks=2"]
    profile = load_profile("ci-smoke", engine="sim-exact", blocks=7, overrides=overrides)
    prepared = prepare_requests(profile)
    results = create_experiment(profile, prepared, Origin(output_root=tmp_path, label=None, argv=("benchctl",)))
    with experiment_progress(14, 2, is_quiet=True) as listener:
        run_experiment(results, profile, prepared.requests, listener)
    assert results.manifest().stopping is not None
    first = results.run(results.plan().runs[2].run_id)
    (first.path / "run.json").unlink()
    assert [planned.index for planned in undone_runs(results)] == [2]
    with experiment_progress(1, 1, is_quiet=True) as listener:
        outcome = run_experiment(results, profile, prepared.requests, listener)
    assert (outcome.num_done, outcome.num_skipped) == (1, 11)
    assert not (results.path / "runs" / results.plan().runs[12].run_id).exists()


def test_a_screening_cannot_have_a_rule(tmp_path: Path) -> None:
    done = benchctl("run", "--profile", "ci-smoke", "--quick", "--until-precision", "1%", "--dry-run", cwd=tmp_path)
    assert done.returncode == 2
    assert "the first look is after 6 blocks" in done.stderr


def test_a_precision_that_is_no_number_is_refused_by_name(tmp_path: Path) -> None:
    done = benchctl("run", "--profile", "ci-smoke", "--until-precision", "tight", "--dry-run", cwd=tmp_path)
    assert done.returncode == 2
    assert "--until-precision is 'tight'" in done.stderr
