"""Blocks added to an experiment that lacks some: simulated runs, and laws of the grown plan."""

import json
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from support.cli import WITHOUT_SERVERS, benchctl, only_result

from benchctl.profile.load import load_profile
from benchctl.profile.planning import extend_plan, imbalance_of, plan_runs

SMALL = ["workload.num_prompts=1", "workload.output_len=8", "gates=[]"]
OPTIONS = ["--engine", "sim-exact", "--quiet", *(word for override in SMALL for word in ("--set", override))]


def test_blocks_are_added_in_sight_of_everybody_and_the_first_stay_as_they_were(tmp_path: Path) -> None:
    def run(*words: object) -> "subprocess.CompletedProcess[str]":
        return benchctl("run", *words, cwd=tmp_path, **WITHOUT_SERVERS)

    def files(pattern: str) -> dict[Path, bytes]:
        return {file: file.read_bytes() for file in path.glob(pattern) if file.is_file()}

    assert run("ci-smoke", *OPTIONS, "--blocks", "2").returncode == 0
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


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("run", "ci-smoke", "--until-precision", "1%", "--blocks", "6"), "its stopping rule declared the looks"),
        (("simulate", "--profile", "ci-smoke", "--blocks", "1"), "its runs were simulated in virtual time"),
    ],
)
def test_no_blocks_are_added_where_that_would_break_a_promise(
    tmp_path: Path, words: tuple[str, ...], why: str
) -> None:
    begun = benchctl(*words, *OPTIONS, cwd=tmp_path, **WITHOUT_SERVERS)
    assert begun.returncode == 0, begun.stderr
    assert "--resume" not in begun.stdout
    path = only_result(tmp_path)
    before = (path / "manifest.json").read_bytes()
    grown = benchctl("run", "--resume", path, "--blocks", "8", cwd=tmp_path)
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
