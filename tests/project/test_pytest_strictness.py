"""The configuration of pytest is strict: what is misspelt fails, and so does a test that passes unexpectedly."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONFIGURATION = ROOT / "pyproject.toml"


def pytest_in(directory, *options, configuration=CONFIGURATION):
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", configuration, *options]
    command = [*argv, "--rootdir", directory, directory]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_an_unknown_marker_a_repeated_parameter_and_an_unexpected_pass_are_errors(tmp_path):
    for name, decorator, parameter in (
        ("marker", "mark.slwo", ""),
        ("repeated", 'mark.parametrize("x", [1, 1])', "x"),
        ("xfail", "mark.xfail", ""),
    ):
        source = f"import pytest\n\n@pytest.{decorator}\ndef test({parameter}):\n    pass\n"
        (tmp_path / f"test_{name}.py").write_text(source)
    finished = pytest_in(tmp_path, "--continue-on-collection-errors")
    assert "1 failed, 2 errors" in finished.stdout
    for message in ("'slwo' not found in `markers`", "Duplicate parametrization IDs", "[XPASS(strict)]"):
        assert message in finished.stdout


def test_an_unknown_key_of_the_configuration_is_an_error(tmp_path):
    changed = CONFIGURATION.read_text().replace("strict_config = true\n", 'strict_config = true\nmarkres = ["x"]\n')
    (tmp_path / "pyproject.toml").write_text(changed)
    finished = pytest_in(tmp_path, configuration=tmp_path / "pyproject.toml")
    assert finished.returncode == 4
    assert "Unknown config option: markres" in finished.stderr


@pytest.mark.slow
def test_every_process_collects_the_same_tests_at_whatever_time():
    # Tests that differ between two workers end the whole run; a parameter made from the clock or a set differs.
    def collected(seed: str) -> list[str]:
        argv = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "-q", "tests"]
        environment = os.environ | {"PYTHONHASHSEED": seed}
        finished = subprocess.run(
            argv, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert finished.returncode == 0, finished.stdout[-2000:]
        return [line for line in finished.stdout.splitlines() if "::" in line]

    first, second = collected("1"), collected("2")
    assert len(first) > 1000
    assert first == second
