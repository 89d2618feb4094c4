"""An engine's environment: created, filled by pip, checked, and stamped with its content.

As long as the stamp says what is wanted, a second installation does nothing.
"""

import fcntl
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from benchctl.engines.environment import engines_directory, installed_versions
from benchctl.engines.installing.recipes import Recipe
from benchctl.errors import EngineUnavailableError

_STAMP: Final = ".installed"
_STDERR_FD: Final = 2


def install_engine(
    recipe: Recipe, announce: Callable[[str], None], *, python: Path | None = None, is_forced: bool = False
) -> Path:
    """Make the environment of an engine as its recipe says, unless it is there; returns its interpreter.

    ``python`` creates the environment, by default the interpreter that runs benchctl. Pip's messages go to our own
    streams. Raises EngineUnavailableError where pip fails or what was installed does not work.
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
            _create_environment(recipe.kind, directory, python or Path(sys.executable))
        _fill(recipe, program, announce)
        announce(f"{recipe.kind}: checking")
        if _run(program, "-c", recipe.proof).returncode:
            raise EngineUnavailableError(
                f"{recipe.kind}: what was installed into {directory} does not work; the message above says why"
            )
        stamp.write_text(f"{recipe.content}\n", encoding="utf-8")
    announce(f"{recipe.kind}: ready")
    return program


def _fill(recipe: Recipe, program: Path, announce: Callable[[str], None]) -> None:
    """Install the packages of the recipe, unless the environment has exactly these."""
    directory = program.parent.parent
    if _has_packages(recipe, program):
        announce(f"{recipe.kind}: found in {directory} ({recipe.content})")
    else:
        announce(f"{recipe.kind}: installing into {directory} ({recipe.content}); {recipe.cost}")
        _pip(recipe, program, "install", "--upgrade", "pip")
        _pip(recipe, program, "install", *recipe.pins)
        if recipe.unwanted:
            _pip(recipe, program, "uninstall", "-y", *recipe.unwanted)
    if recipe.finish and _run(program, "-c", *recipe.finish).returncode:
        raise EngineUnavailableError(
            f"{recipe.kind}: {directory} could not be completed; the message above says why"
        )


def _has_packages(recipe: Recipe, program: Path) -> bool:
    """True for an environment with exactly the pinned versions and without the unwanted packages."""
    versions = dict(re.sub(r"\[.*\]", "", pin).split("==") for pin in recipe.pins)
    installed_versions.cache_clear()
    installed = installed_versions(program, (*versions, *recipe.unwanted))
    installed_versions.cache_clear()
    return {name: version.partition("+")[0] for name, version in installed.items()} == versions


def _create_environment(kind: str, directory: Path, python: Path) -> None:
    created = _run(python, "-m", "venv", "--clear", str(directory))
    if created.returncode:
        shutil.rmtree(directory, ignore_errors=True)
        raise EngineUnavailableError(
            f"{kind}: {python} cannot create the environment {directory}; the message above says why. Name another "
            "interpreter: --python /path/to/python"
        )


def _pip(recipe: Recipe, program: Path, *words: str) -> None:
    argv: Sequence[str] = ("-m", "pip", words[0], "-qq", "--disable-pip-version-check", *words[1:])
    done = _run(program, *argv, env={**os.environ, **recipe.build_env})
    if done.returncode:
        raise EngineUnavailableError(
            f"{recipe.kind}: pip cannot install {' '.join(recipe.pins)}; its message above says why. Where an "
            "index of your own has the packages, name it in PIP_INDEX_URL"
        )


def _run(python: Path, *words: str, env: dict[str, str] | None = None) -> "subprocess.CompletedProcess[bytes]":
    """Run an interpreter without the modules of ours; its output goes where ours goes."""
    environment = {name: value for name, value in (env or os.environ).items() if name != "PYTHONPATH"}
    try:
        return subprocess.run((str(python), *words), env=environment, check=False, stdout=_STDERR_FD)
    except OSError as error:
        raise EngineUnavailableError(
            f"{python} cannot be started ({error.strerror}); name an interpreter, such as --python /usr/bin/python3"
        ) from error


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Let two installations of one engine wait for each other."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with (directory.parent / f".{directory.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
