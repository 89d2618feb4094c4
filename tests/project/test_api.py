"""The Python interface, over the result directory that is kept with the code: neither may change unnoticed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support import cli

import benchctl
from benchctl.errors import InvalidDataError, ProfileError, RecordError, UsageError

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "results" / "example"
SIDES = (f"{EXAMPLE}:baseline", f"{EXAMPLE}:guided")


def test_the_example_is_read_whole_with_everything_that_follows_from_it():
    experiment = benchctl.load_results(EXAMPLE)
    assert [run.record.state for run in experiment.runs] == ["done"] * 12
    assert [cell.label for cell in experiment.cells] == ["baseline", "guided top_k=5"]
    (row,) = experiment.sweep
    assert row.cell == {"top_k": 5}
    assert row.number("step_ms_ratio") > 4
    assert not experiment.damage


def test_a_comparison_has_the_verdict_of_the_command_line_and_the_threshold_decides():
    comparison = benchctl.compare(*SIDES, metrics=["step_ms"])
    ended = cli.benchctl("compare", *SIDES, "--metrics", "step_ms", "--json")
    assert ended.returncode == comparison.exit_code == 1
    assert json.loads(ended.stdout)["verdict"] == comparison.verdict == "regression"
    assert benchctl.compare(*SIDES, metrics=["num_steps"], threshold=0.5).exit_code == 0


def test_profiles_and_errors_are_those_of_the_command_line(tmp_path):
    for errors in ((UsageError, UsageError), (RecordError, InvalidDataError)):
        with pytest.raises(errors[0]):
            benchctl.load_results(tmp_path)
        with pytest.raises(errors[1]):
            benchctl.compare(tmp_path, EXAMPLE)
        (tmp_path / "plan.json").write_text("{}")
    assert benchctl.load_profile("topk-sweep", blocks=12).blocks == 12
    with pytest.raises(ProfileError, match="no-such-profile"):
        benchctl.load_profile("no-such-profile")
    with pytest.raises(AttributeError, match="no_such_name"):
        benchctl.no_such_name  # noqa: B018  # looking it up is what is tested


def test_importing_the_package_brings_no_numerical_library():
    code = "import benchctl, sys; print(sorted({'numpy', 'scipy', 'pydantic'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_every_stable_name_is_documented():
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "tasks").glob("*.md"))
    for name in set(benchctl.__all__) - {"__version__"}:
        assert f"benchctl.{name}" in pages, name
