"""An engine's environment: created, filled by pip, checked, and stamped with its content.

As long as the stamp says what is wanted, a second installation does nothing.
"""

import fcntl
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from benchctl.engines.environment import engines_directory, installed_versions
from benchctl.engines.installing.recipes import Recipe
from benchctl.engines.installing.watched import ProgramError, Progress, run_watched
from benchctl.errors import EngineUnavailableError

_STAMP: Final = ".installed"


def install_engine(
    recipe: Recipe,
    announce: Callable[[str], None],
    *,
    on_progress: Progress = lambda _phase: None,
    python: Path | None = None,
    is_forced: bool = False,
) -> Path:
    """Make the environment of an engine as its recipe says, unless it is there; returns its interpreter.

    ``python`` creates the environment, by default the interpreter that runs benchctl. ``announce`` takes lines for
    the user, ``on_progress`` what is being done, about once a second. Raises EngineUnavailableError where pip fails
    or what was installed does not work; its ``log_tail`` has the last lines of the program that failed.
    """
    directory = engines_directory() / recipe.kind
    program, stamp = directory / "bin" / "python", directory / _STAMP
    with _locked(directory):
        is_there = os.access(program, os.X_OK)
        if (
            is_there
            and not is_forced
            and stamp.is_file()
            and stamp.read_text(encoding="utf-8").strip() == recipe.content
        ):
            announce(f"{recipe.kind}: installed in {directory} ({recipe.content})")
            return program
        if not is_there or is_forced or stamp.exists():  # other versions than these: begin anew
            _create_environment(recipe.kind, directory, python or Path(sys.executable), on_progress)
        _fill(recipe, program, announce, on_progress)
        announce(f"{recipe.kind}: checking")
        problem = f"{recipe.kind}: what was installed into {directory} does not work; its last words say why"
        _run(program, "-c", recipe.proof, phase="checking", problem=problem, on_progress=on_progress)
        stamp.write_text(f"{recipe.content}\n", encoding="utf-8")
    announce(f"{recipe.kind}: ready")
    return program


def _fill(recipe: Recipe, program: Path, announce: Callable[[str], None], on_progress: Progress) -> None:
    """Install the packages of the recipe, unless the environment has exactly these."""
    directory = program.parent.parent
    if _has_packages(recipe, program):
        announce(f"{recipe.kind}: found in {directory} ({recipe.content})")
    else:
        announce(f"{recipe.kind}: installing into {directory} ({recipe.content}); {recipe.cost}")
        _pip(recipe, program, on_progress, "install", "--upgrade", "pip")
        _pip(recipe, program, on_progress, "install", *recipe.pins)
        if recipe.unwanted:
            _pip(recipe, program, on_progress, "uninstall", "-y", *recipe.unwanted)
    if recipe.finish:
        problem = f"{recipe.kind}: {directory} could not be completed; its last words say why"
        _run(program, "-c", *recipe.finish, phase="completing", problem=problem, on_progress=on_progress)


def _has_packages(recipe: Recipe, program: Path) -> bool:
    """True for an environment with exactly the pinned versions and without the unwanted packages."""
    versions = dict(re.sub(r"\[.*\]", "", pin).split("==") for pin in recipe.pins)
    installed_versions.cache_clear()
    installed = installed_versions(program, (*versions, *recipe.unwanted))
    installed_versions.cache_clear()
    return {name: version.partition("+")[0] for name, version in installed.items()} == versions


def _create_environment(kind: str, directory: Path, python: Path, on_progress: Progress) -> None:
    problem = (
        f"{kind}: {python} cannot create the environment {directory}; its last words say why. Name another "
        "interpreter: --python /path/to/python"
    )
    words = ("-m", "venv", "--clear", str(directory))
    try:
        _run(python, *words, phase="creating the environment", problem=problem, on_progress=on_progress)
    except EngineUnavailableError:
        shutil.rmtree(directory, ignore_errors=True)
        raise


def _pip(recipe: Recipe, program: Path, on_progress: Progress, *words: str) -> None:
    problem = (
        f"{recipe.kind}: pip cannot install {' '.join(recipe.pins)}; its last words say why. Where an index of "
        "your own has the packages, name it in PIP_INDEX_URL"
    )
    # A question of pip's, such as that for a password, would not be seen.
    argv = ("-m", "pip", words[0], "--no-input", "--disable-pip-version-check", *words[1:])
    env = {**os.environ, **recipe.build_env}
    _run(program, *argv, phase=f"pip {words[0]}", problem=problem, on_progress=on_progress, env=env)


def _run(
    python: Path,
    *words: str,
    phase: str,
    problem: str,
    on_progress: Progress,
    env: Mapping[str, str] | None = None,
) -> None:
    """Run an interpreter without the modules of ours. Raises EngineUnavailableError(problem) where it fails."""
    environment = {name: value for name, value in (env or os.environ).items() if name != "PYTHONPATH"}
    try:
        run_watched((str(python), *words), environment, phase, on_progress)
    except OSError as error:
        raise EngineUnavailableError(
            f"{python} cannot be started ({error.strerror}); name an interpreter, such as --python /usr/bin/python3"
        ) from error
    except ProgramError as error:
        failure = EngineUnavailableError(problem)
        failure.log_title, failure.log_tail = "last words", error.tail
        raise failure from error


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Let two installations of one engine wait for each other."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with (directory.parent / f".{directory.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
