"""Stop mode replay-natural through the command line: measured first, forced then, never measured twice."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.cli import benchctl

from benchctl.records.directory import ResultDirectory

pytestmark = pytest.mark.slow
SETTINGS = (
    "workload.num_prompts=2", "workload.samples_per_prompt=2", "workload.samples_as=requests",
    "workload.max_tokens=2000", "engine.options.time_scale=50",
)  # fmt: skip
SMALL = ["run", "--profile", "ci-smoke", "--engine", "sim-exact", "--quiet", "--blocks", "1"]
SMALL += [word for setting in SETTINGS for word in ("--set", setting)]


def results_of(cwd: Path, profile: str) -> list[Path]:
    return sorted(path for path in (cwd / "results" / profile).glob("*") if not path.is_symlink())


def share_after_the_end(results: Path) -> set[float]:
    document: dict[str, Any] = json.loads((results / "summary.json").read_text())
    return {run["past_eos_frac"] for run in document["runs"]}


@pytest.fixture(scope="module", name="cwd")
def _cwd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One finished experiment whose answers were forced to natural lengths that it measured itself."""
    cwd = tmp_path_factory.mktemp("lengths")
    done = benchctl(*SMALL, "--set", "stop=replay-natural", cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "natural lengths first: baseline once, results in results/ci-smoke-lengths/" in done.stdout
    return cwd


def test_the_lengths_that_the_baseline_measured_are_those_of_every_run(cwd: Path) -> None:
    (pilot_path,), (path,) = results_of(cwd, "ci-smoke-lengths"), results_of(cwd, "ci-smoke")
    pilot, results = ResultDirectory(pilot_path), ResultDirectory(path)
    assert (pilot.manifest().stop, results.manifest().stop) == ("natural", "replay-natural")
    assert results.manifest().lengths_from == f"results/ci-smoke-lengths/{pilot_path.name}"
    (natural_run,) = pilot.runs()
    natural = {r.request_id: r.completion_tokens for r in natural_run.requests() if not r.is_warmup}
    assert len(set(natural.values())) > 1
    assert natural == {request.request_id: request.max_tokens for request in results.prepared_requests()}
    for run in results.runs():
        assert natural == {r.request_id: r.completion_tokens for r in run.requests() if not r.is_warmup}
    assert share_after_the_end(path) == {0.0}


def test_going_on_with_it_measures_no_lengths_again(cwd: Path) -> None:
    (path,) = results_of(cwd, "ci-smoke")
    run_record = next(path.glob("runs/*-guided-*/run.json"))
    run_record.unlink()
    done = benchctl("run", "--quiet", "--resume", str(path), cwd=cwd)
    assert done.returncode == 0, done.stderr
    assert json.loads(run_record.read_text())["state"] == "done"
    assert len(results_of(cwd, "ci-smoke-lengths")) == 1


def test_output_past_the_natural_end_is_counted_where_lengths_are_forced_beyond_it(cwd: Path) -> None:
    (pilot,) = results_of(cwd, "ci-smoke-lengths")
    lengths = ("--set", f"workload.lengths_from={pilot}", "--set", "workload.output_len=1000")
    done = benchctl(*SMALL, *lengths, "--output-dir", "forced", cwd=cwd)
    assert done.returncode == 0, done.stderr
    (path,) = (found for found in (cwd / "forced" / "ci-smoke").glob("*") if not found.is_symlink())
    requests = tuple(ResultDirectory(path).prepared_requests())
    assert {request.max_tokens for request in requests} == {1000}
    natural = [request.natural_tokens for request in requests if request.natural_tokens is not None]
    assert len(natural) == len(requests)
    beyond = sum(max(0, 1000 - num_tokens) for num_tokens in natural)
    assert beyond > 0
    assert share_after_the_end(path) == {beyond / (1000 * len(requests))}


def test_a_dry_run_says_that_lengths_would_be_measured_first(tmp_path: Path) -> None:
    done = benchctl(*SMALL, "--set", "stop=replay-natural", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "first the natural lengths of 4 answers, in a result directory of 'ci-smoke-lengths':" in done.stdout
    assert "then 'ci-smoke', every answer forced to its natural length:" in done.stdout
    assert not (tmp_path / "results").exists()


def test_lengths_of_other_prompts_are_refused_before_anything_is_measured(cwd: Path) -> None:
    (pilot,) = results_of(cwd, "ci-smoke-lengths")
    other = ("--set", "stop=replay-natural", "--set", f"workload.lengths_from={pilot}", "--seed", "99")
    done = benchctl(*SMALL, *other, cwd=cwd)
    assert done.returncode == 2, done.stdout
    assert f"workload.lengths_from: {pilot} has another prompt as" in done.stderr
    assert len(results_of(cwd, "ci-smoke")) == 1
