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


def test_the_named_interpreter_comes_before_everything(tmp_path):
    make_environment(engines_directory() / "pytest-engine")
    named = make_environment(tmp_path / "mine")
    assert interpreter_for("pytest-engine", str(named), ["pytest"]) == named


def test_an_installed_environment_comes_before_our_own():
    installed = make_environment(engines_directory() / "pytest-engine")
    assert interpreter_for("pytest-engine", None, ["absent-package", "pytest"]) == installed
    assert interpreter_for("other-engine", None, ["pytest"]) == HERE


def test_an_engine_that_is_nowhere_is_told_with_what_brings_it():
    with pytest.raises(
        EngineUnavailableError, match=r"neither .*abacus nor .* run 'benchctl engines install abacus'"
    ):
        interpreter_for("abacus", None, ["absent-package"])


@pytest.mark.parametrize(
    ("named", "problem"),
    [
        ("/no/such/python", "cannot be executed"),
        (str(HERE.parent), "cannot be executed"),
        (sys.executable, "has no absent-package; install it there"),
    ],
)
def test_a_named_interpreter_without_the_engine_is_refused(named, problem):
    with pytest.raises(EngineUnavailableError, match=f"engine.python is '{named}', which {problem}"):
        interpreter_for("abacus", named, ["absent-package"])


def test_versions_are_asked_of_the_environment_itself():
    assert installed_versions(HERE, ("pytest", "absent-package")) == {"pytest": pytest.__version__}


def test_an_interpreter_that_does_not_work_has_nothing(tmp_path):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    assert installed_versions(broken, ("pytest",)) == {}


def test_what_a_shell_puts_on_the_path_of_modules_does_not_count(tmp_path, monkeypatch):
    information = tmp_path / "ghost-1.0.dist-info" / "METADATA"
    information.parent.mkdir()
    information.write_text("Metadata-Version: 2.1\nName: ghost\nVersion: 1.0\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert installed_versions(HERE, ("ghost",)) == {}
