"""Blocks added to an experiment that lacks some: real runs of the simulator, and laws of the grown plan."""

import json
from collections import Counter
from pathlib import Path

import pytest
from support.cli import benchctl, only_result
from support.results.builders import edit_manifest, write_results

from benchctl.analysis.compare.compare import CompareOptions, compare_sides
from benchctl.analysis.experiment.ladder import num_looks_of
from benchctl.analysis.experiment.pairing import Side
from benchctl.profile.load import load_profile
from benchctl.profile.planning import extend_plan, imbalance_of, plan_runs
from benchctl.records.record import Extension

SMALL = ["workload.num_prompts=1", "workload.output_len=8", "engine.options.time_scale=20", "gates=[]"]
OPTIONS = ["--engine", "sim-exact", "--quiet", *(word for override in SMALL for word in ("--set", override))]


def extension(before: int, after: int, num_looks: int = 2) -> Extension:
    return Extension(
        extended_at="2026-01-02T00:00:00Z", from_blocks=before, to_blocks=after, num_done=2, num_looks=num_looks
    )


@pytest.fixture(scope="module", name="extended")
def _extended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes], str]:
    """An experiment of two blocks with four more, the files of its first runs before, and what was printed."""
    cwd = tmp_path_factory.mktemp("extended")
    assert benchctl("run", "ci-smoke", *OPTIONS, "--blocks", "2", cwd=cwd).returncode == 0
    path = only_result(cwd)
    before = {str(file.relative_to(path)): file.read_bytes() for file in path.glob("runs/*/*.json*")}
    grown = benchctl("run", "--resume", path, "--blocks", "6", "--quiet", cwd=cwd)
    assert grown.returncode == 0, grown.stderr
    return path, before, grown.stdout + grown.stderr


@pytest.mark.slow
def test_added_blocks_are_measured_and_the_first_stay_as_they_were(
    extended: tuple[Path, dict[str, bytes], str],
) -> None:
    path, before, said = extended
    assert {name: (path / name).read_bytes() for name in before} == before
    manifest = json.loads((path / "manifest.json").read_text())
    assert (manifest["blocks"], manifest["state"]) == (6, "done")
    (added,) = manifest["extensions"]
    assert (added["from_blocks"], added["to_blocks"], added["num_done"], added["num_looks"]) == (2, 6, 4, 2)
    assert "4 blocks are added to 2" in said
    assert "runs: 8 done, 4 done before" in said


@pytest.mark.slow
def test_a_plan_of_the_rest_shows_what_resuming_would_measure_and_writes_nothing(
    extended: tuple[Path, dict[str, bytes], str],
) -> None:
    path, _, _ = extended
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    missing = max((path / "runs").iterdir())
    hidden = missing.rename(path.parent / missing.name)
    try:
        rest = benchctl("run", "--resume", path, "--dry-run")
        more = benchctl("run", "--resume", path, "--dry-run", "--blocks", "8")
    finally:
        hidden.rename(missing)
    assert missing.name in rest.stdout
    assert "1 of 12 runs left to measure" in rest.stdout
    assert "5 of 16 runs left to measure" in more.stdout
    assert benchctl("run", "--resume", path, "--dry-run", "--blocks", "2").returncode == 2
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before


@pytest.mark.slow
def test_every_verdict_says_what_the_added_blocks_cost(extended: tuple[Path, dict[str, bytes], str]) -> None:
    path, _, said = extended
    cost = "blocks were added once after results were seen: intervals are those of 97.5%"
    compared = benchctl("compare", path)
    assert compared.returncode == 1
    assert "change (97.5% CI)" in compared.stdout
    for text in (said, compared.stdout, benchctl("compare", path, "--markdown").stdout):
        assert cost in text
    assert cost in (path / "report.html").read_text()
    (document,) = json.loads(benchctl("compare", path, "--json").stdout)["comparisons"]
    assert (document["confidence"], document["num_looks"], document["num_extensions"]) == (0.975, 2, 1)
    assert "6 blocks, 4 of them added" in benchctl("show", path).stdout


@pytest.mark.slow
def test_an_extended_directory_is_intact_and_resumes(extended: tuple[Path, dict[str, bytes], str]) -> None:
    path, _, _ = extended
    verified = benchctl("verify", path)
    assert verified.returncode == 0, verified.stdout
    again = benchctl("run", "--resume", path, "--blocks", "6", "--quiet")
    assert again.returncode == 0, again.stderr
    assert "runs: 12 done before" in again.stdout
    assert len(json.loads((path / "manifest.json").read_text())["extensions"]) == 1
    fewer = benchctl("run", "--resume", path, "--blocks", "5")
    assert fewer.returncode == 2
    assert "blocks are only added" in fewer.stderr
    plan = path / "plan.json"
    content = plan.read_bytes()
    plan.write_bytes(content.replace(b'"block": 5', b'"block": 4'))
    assert plan.read_bytes() != content
    altered = benchctl("verify", path)
    plan.write_bytes(content)
    assert altered.returncode == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "options", "why"),
    [
        ("run", ["--until-precision", "1%"], "its stopping rule declared the looks"),
        ("simulate", [], "its runs were simulated in virtual time"),
    ],
)
def test_no_blocks_are_added_where_that_would_break_a_promise(
    tmp_path: Path, command: str, options: list[str], why: str
) -> None:
    blocks = "6" if "--until-precision" in options else "1"
    named = ["ci-smoke"] if command == "run" else ["--profile", "ci-smoke"]
    begun = benchctl(command, *named, *OPTIONS, *options, "--blocks", blocks, cwd=tmp_path)
    assert begun.returncode == 0, begun.stderr
    path = only_result(tmp_path)
    before = (path / "manifest.json").read_bytes()
    grown = benchctl("run", "--resume", path, "--blocks", "8", cwd=tmp_path)
    assert grown.returncode == 2
    assert why in grown.stderr
    assert "--resume" not in begun.stdout
    assert (path / "manifest.json").read_bytes() == before


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 6), (5, 12), (6, 12), (7, 9), (3, 4), (4, 13)])
def test_a_grown_plan_keeps_its_runs_and_every_block_holds_every_arm(before: int, after: int) -> None:
    profile = load_profile("topk-sweep", blocks=before)
    planned = plan_runs(profile)
    grown = extend_plan(planned, profile, after)
    assert grown.runs[: len(planned.runs)] == planned.runs
    assert [run.index for run in grown.runs] == list(range(6 * after))
    assert len({run.run_id for run in grown.runs}) == 6 * after
    for block in range(after):
        runs = [run for run in grown.runs if run.block == block]
        assert [run.position for run in runs] == list(range(6))
        assert len({(run.variant, str(run.cell)) for run in runs}) == 6


@pytest.mark.parametrize(("before", "after"), [(6, 12), (2, 6), (6, 9)])
def test_a_plan_that_begins_the_longer_one_grows_into_it(before: int, after: int) -> None:
    short, long = load_profile("topk-sweep", blocks=before), load_profile("topk-sweep", blocks=after)
    assert extend_plan(plan_runs(short), short, after) == plan_runs(long)


@pytest.mark.parametrize(("before", "after"), [(3, 9), (5, 11), (5, 12), (7, 13)])
def test_new_blocks_are_as_balanced_among_themselves_as_a_plan_of_as_many(before: int, after: int) -> None:
    profile, num_new = load_profile("topk-sweep", blocks=before), after - before
    grown = extend_plan(plan_runs(profile), profile, after)
    new = [run for run in grown.runs if run.block >= before]
    alone = plan_runs(load_profile("topk-sweep", blocks=num_new)).runs
    assert imbalance_of(new, "baseline").position_spread == imbalance_of(alone, "baseline").position_spread
    positions = Counter((run.variant, str(run.cell), run.position) for run in grown.runs)
    assert max(positions.values()) <= after // 6 + 2


def test_each_extension_is_one_more_look_and_widens_every_interval(tmp_path: Path) -> None:
    factors = tuple({"baseline": 1 + 0.004 * i, "guided": 1.02 - 0.003 * i} for i in range(8))
    results = write_results(tmp_path / "r", block_factors=factors)
    sides, options = (Side(results.path, "baseline"), Side(results.path, "guided")), CompareOptions()
    widths = []
    for extensions in ((), (extension(6, 8),), (extension(6, 7), extension(7, 8, 3))):
        edit_manifest(results, extensions=extensions)
        comparison = compare_sides(*sides, options)
        assert comparison.num_looks == num_looks_of(results.manifest(), results.manifest()) == 1 + len(extensions)
        assert comparison.rules.confidence == pytest.approx(1 - 0.05 / (1 + len(extensions)))
        (step,) = [m for m in comparison.cells[0].metrics if m.metric.name == "step_ms"]
        assert step.estimate is not None
        assert step.estimate.half_width is not None
        widths.append(step.estimate.half_width)
    assert widths == sorted(set(widths))
