"""Where engines are looked for: the named interpreter, the installed environment, our own."""

import sys
from pathlib import Path

import pytest

from benchctl.engines.environment import engines_directory, installed_versions, interpreter_for
from benchctl.errors import EngineUnavailableError

HERE = Path(sys.executable)


@pytest.fixture(autouse=True)
def no_engines(tmp_path, monkeypatch):
    monkeypatch.setenv("BENCHCTL_ENGINES_DIR", str(tmp_path / "engines"))
    installed_versions.cache_clear()


def make_environment(directory: Path) -> Path:
    """An interpreter at another place that has what ours has."""
    python = directory / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{HERE}" "$@"\n')
    python.chmod(0o755)
    return python


def test_the_named_interpreter_comes_first_then_the_installed_environment_then_our_own(tmp_path):
    installed = make_environment(engines_directory() / "pytest-engine")
    named = make_environment(tmp_path / "mine")
    assert interpreter_for("pytest-engine", str(named), ["pytest"]) == named
    assert interpreter_for("pytest-engine", None, ["absent-package", "pytest"]) == installed
    assert interpreter_for("other-engine", None, ["pytest"]) == HERE


@pytest.mark.parametrize(
    ("named", "problem"),
    [
        (None, "neither .*abacus nor .* run 'benchctl engines install abacus'"),
        ("/no/such/python", "engine.python is '/no/such/python', which cannot be executed"),
        (str(HERE.parent), "which cannot be executed"),
        (sys.executable, "which has no absent-package; install it there"),
    ],
)
def test_an_engine_that_is_nowhere_or_not_where_it_was_named_is_told_with_what_brings_it(named, problem):
    with pytest.raises(EngineUnavailableError, match=problem):
        interpreter_for("abacus", named, ["absent-package"])


def test_versions_are_asked_of_the_environment_itself(tmp_path, monkeypatch):
    assert installed_versions(HERE, ("pytest", "absent-package")) == {"pytest": pytest.__version__}
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    assert installed_versions(broken, ("pytest",)) == {}
    # What a shell puts on the path of modules does not count.
    information = tmp_path / "ghost-1.0.dist-info" / "METADATA"
    information.parent.mkdir()
    information.write_text("Metadata-Version: 2.1\nName: ghost\nVersion: 1.0\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert installed_versions(HERE, ("ghost",)) == {}
