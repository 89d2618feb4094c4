"""The Python interface: the names that ``import benchctl`` offers, and what they return."""

import subprocess
import sys
from pathlib import Path

import pytest

import benchctl
from benchctl.errors import InvalidDataError, ProfileError, RecordError, UsageError

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "results" / "example"


def test_a_result_directory_is_read_with_everything_that_follows_from_it() -> None:
    experiment = benchctl.load_results(EXAMPLE)
    assert len(experiment.runs) == 12
    assert [row.cell for row in experiment.sweep] == [{"top_k": 5}]
    assert not experiment.damage


def test_a_comparison_has_the_verdict_of_the_command_line() -> None:
    sides = [f"{EXAMPLE}:baseline", f"{EXAMPLE}:guided"]
    comparison = benchctl.compare(*sides, metrics=["step_ms"])
    command = [sys.executable, "-m", "benchctl", "compare", *sides, "--metrics", "step_ms"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == comparison.exit_code == 1
    assert ended.stdout.startswith(comparison.verdict)


def test_the_threshold_decides() -> None:
    sides = [f"{EXAMPLE}:baseline", f"{EXAMPLE}:guided"]
    assert benchctl.compare(*sides, metrics=["step_ms"], threshold=0.01).verdict == "regression"
    assert benchctl.compare(*sides, metrics=["num_steps"], threshold=0.5).exit_code == 0


def test_a_profile_is_loaded_by_name_and_validated() -> None:
    profile = benchctl.load_profile("topk-sweep", blocks=12)
    assert isinstance(profile, benchctl.Profile)
    assert profile.blocks == 12
    with pytest.raises(ProfileError, match="no-such-profile"):
        benchctl.load_profile("no-such-profile")


def test_errors_are_those_of_the_command_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        benchctl.load_results(tmp_path)
    with pytest.raises(UsageError):
        benchctl.compare(tmp_path, EXAMPLE)
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(RecordError):
        benchctl.load_results(tmp_path)
    with pytest.raises(InvalidDataError):
        benchctl.compare(tmp_path, EXAMPLE)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        benchctl.no_such_name  # noqa: B018  # looking it up is what is tested


def test_importing_the_package_brings_no_numerical_library() -> None:
    code = "import benchctl, sys; print(sorted({'numpy', 'scipy', 'pydantic'} & set(sys.modules)))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"


def test_every_stable_name_is_documented() -> None:
    page = (ROOT / "docs" / "tasks" / "move-results.md").read_text(encoding="utf-8")
    for name in set(benchctl.__all__) - {"__version__"}:
        assert f"benchctl.{name}" in page, name
