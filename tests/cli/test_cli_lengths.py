"""Stop mode replay-natural through the command line: measured first, forced then, never measured twice."""

import json
from pathlib import Path

import pytest
from support.cli import only_result, printed, refusal

from benchctl.records.directory import ResultDirectory

pytestmark = pytest.mark.slow
SETTINGS = (
    "workload.num_prompts=2", "workload.samples_per_prompt=2", "workload.samples_as=requests",
    "workload.max_tokens=2000", "engine.options.time_scale=50",
)  # fmt: skip
SMALL = ["--profile", "ci-smoke", "--engine", "sim-exact", "--quiet", "--blocks", "1"]
SMALL += [word for setting in SETTINGS for word in ("--set", setting)]


def results_of(cwd: Path, profile: str) -> list[Path]:
    return sorted(path for path in (cwd / "results" / profile).glob("*") if not path.is_symlink())


def share_after_the_end(results: Path) -> set[float]:
    return {run["past_eos_frac"] for run in json.loads((results / "summary.json").read_text())["runs"]}


@pytest.fixture(scope="module", name="cwd")
def _cwd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One finished experiment whose answers were forced to natural lengths that it measured itself."""
    cwd = tmp_path_factory.mktemp("lengths")
    output = printed("run", *SMALL, "--set", "stop=replay-natural", cwd=cwd)
    assert "natural lengths first: baseline once, results in results/ci-smoke-lengths/" in output
    return cwd


def test_the_lengths_that_the_baseline_measured_are_those_of_every_run_and_a_resume_measures_none(
    cwd: Path,
) -> None:
    (pilot_path,), (path,) = results_of(cwd, "ci-smoke-lengths"), results_of(cwd, "ci-smoke")
    pilot, results = ResultDirectory(pilot_path), ResultDirectory(path)
    assert (pilot.manifest().stop, results.manifest().stop) == ("natural", "replay-natural")
    assert results.manifest().lengths_from == f"results/ci-smoke-lengths/{pilot_path.name}"
    natural = {request.request_id: request.max_tokens for request in results.prepared_requests()}
    assert len(set(natural.values())) > 1
    for run in (*pilot.runs(), *results.runs()):
        assert natural == {r.request_id: r.completion_tokens for r in run.requests() if not r.is_warmup}
    assert share_after_the_end(path) == {0.0}
    run_record = next(path.glob("runs/*-guided-*/run.json"))
    run_record.unlink()
    printed("run", "--quiet", "--resume", path, cwd=cwd)
    assert json.loads(run_record.read_text())["state"] == "done"
    assert results_of(cwd, "ci-smoke-lengths") == [pilot_path]


def test_output_past_the_natural_end_is_counted_where_lengths_are_forced_beyond_it(
    cwd: Path, tmp_path: Path
) -> None:
    (pilot,) = results_of(cwd, "ci-smoke-lengths")
    lengths = ("--set", f"workload.lengths_from={pilot}", "--set", "workload.output_len=1000")
    printed("simulate", *SMALL, *lengths, cwd=tmp_path)
    path = only_result(tmp_path)
    requests = tuple(ResultDirectory(path).prepared_requests())
    assert {request.max_tokens for request in requests} == {1000}
    beyond = sum(max(0, 1000 - (request.natural_tokens or 0)) for request in requests)
    assert 0 < beyond < 1000 * len(requests)
    assert share_after_the_end(path) == {beyond / (1000 * len(requests))}


def test_a_dry_run_says_that_lengths_would_be_measured_first(tmp_path: Path) -> None:
    output = printed("run", *SMALL, "--set", "stop=replay-natural", "--dry-run", cwd=tmp_path)
    assert "first the natural lengths of 4 answers, in a result directory of 'ci-smoke-lengths':" in output
    assert "then 'ci-smoke', every answer forced to its natural length:" in output
    assert not (tmp_path / "results").exists()


def test_lengths_of_other_prompts_are_refused_before_anything_is_measured(cwd: Path, tmp_path: Path) -> None:
    (pilot,) = results_of(cwd, "ci-smoke-lengths")
    other = ("--set", "stop=replay-natural", "--set", f"workload.lengths_from={pilot}", "--seed", "99")
    told = refusal("run", *SMALL, *other, cwd=tmp_path)
    assert f"workload.lengths_from: {pilot} has another prompt as" in told
    assert not (tmp_path / "results").exists()
