"""The result directory that is kept with the code: what this version reads must not change unnoticed."""

import json
from pathlib import Path

from support.cli import benchctl

from benchctl.analysis.analyzed import analyze_directory

EXAMPLE = Path(__file__).parent.parent.parent / "results" / "example"


def test_the_example_is_read_whole() -> None:
    analysis = analyze_directory(EXAMPLE)
    assert analysis.damage == ()
    assert [run.run.record.state for run in analysis.runs] == ["done"] * 12
    assert [cell.label for cell in analysis.cells] == ["baseline", "guided top_k=5"]
    (row,) = analysis.sweep
    ratio = row.number("step_ms_ratio")
    assert ratio is not None
    assert ratio > 4


def test_its_verdict_stays_the_same() -> None:
    sides = [f"{EXAMPLE}:baseline", f"{EXAMPLE}:guided"]
    done = benchctl("compare", *sides, "--json")
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["verdict"] == "regression"
