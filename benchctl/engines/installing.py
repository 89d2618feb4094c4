"""Installation of engines: each into a Python environment of its own, where ``environment`` looks for it.

An environment is created, filled by pip as the engine's recipe says, checked, and stamped with its content. As long
as the stamp says what is wanted, a second installation does nothing.
"""

import fcntl
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from benchctl.engines.engine import Device, Recipe, engine_for
from benchctl.engines.environment import engines_directory, installed_versions
from benchctl.errors import EngineUnavailableError, UsageError
from benchctl.profile.engine_table import ENGINES

_DEVICES: Final[dict[str, Device]] = {"cpu": "cpu", "cuda": "cuda"}
DEVICE_VARIABLE: Final = "BENCHCTL_ENGINES_DEVICE"
INSTALLABLE: Final = tuple(
    kind for kind, spec in ENGINES.items() if spec.installed_by == f"benchctl engines install {kind}"
)
"""Engines with a recipe, the preferred first. Others may run in the environment of one of them."""


def device_here(named: str | None = None) -> Device:
    """The named kind of device, else that of $BENCHCTL_ENGINES_DEVICE, else the one that this machine has.

    Raises UsageError for a name that is neither cpu nor cuda.
    """
    device = named or os.environ.get(DEVICE_VARIABLE)
    if device:
        if device not in _DEVICES:
            source = "--device" if named else DEVICE_VARIABLE
            raise UsageError(f"{source} is {device!r}; write cpu or cuda, or leave it out")
        return _DEVICES[device]
    program = shutil.which("nvidia-smi")
    has_gpu = (
        program is not None and not subprocess.run((program, "-L"), capture_output=True, check=False).returncode
    )
    return "cuda" if has_gpu else "cpu"


def recipe_for(kind: str, device: Device) -> Recipe:
    """The recipe of an engine. Raises UsageError for an engine without one, EngineUnavailableError for a device
    on which it cannot be installed.
    """
    recipe = engine_for(kind).recipe(device) if kind in ENGINES else None
    if recipe is None:
        by_hand = ENGINES[kind].installed_by if kind in ENGINES else None
        remedy = f"install it by hand: {by_hand}" if by_hand else f"choose one of {', '.join(INSTALLABLE)}"
        raise UsageError(f"no recipe installs {kind!r}; {remedy}")
    return recipe


def install_engine(
    recipe: Recipe,
    announce: Callable[[str], None],
    *,
    python: Path | None = None,
    is_forced: bool = False,
    is_quiet: bool = False,
) -> Path:
    """Make the environment of an engine as its recipe says, unless it is there; returns its interpreter.

    ``python`` creates the environment, by default the interpreter that runs benchctl. ``announce`` takes lines for
    the user, beside which pip shows what it does, unless ``is_quiet``. Raises EngineUnavailableError where pip
    fails or what was installed does not work; their own words, on the screen, say why.
    """
    directory = engines_directory() / recipe.kind
    program, stamp = directory / "bin" / "python", directory / ".installed"
    with _locked(directory):
        is_there = os.access(program, os.X_OK) and not is_forced
        if is_there and stamp.is_file() and stamp.read_text(encoding="utf-8").strip() == recipe.content:
            announce(f"{recipe.kind}: installed in {directory} ({recipe.content})")
            return program
        if not is_there or stamp.exists():  # other versions than these: begin anew
            _create_environment(recipe.kind, directory, python or Path(sys.executable))
        if _has_packages(recipe, program):
            announce(f"{recipe.kind}: found in {directory} ({recipe.content})")
        else:
            announce(f"{recipe.kind}: installing into {directory} ({recipe.content}); {recipe.cost}")
            _pip(recipe, program, "install", "--upgrade", "pip", is_quiet=is_quiet)
            _pip(recipe, program, "install", *recipe.pins, is_quiet=is_quiet)
            if recipe.unwanted:
                _pip(recipe, program, "uninstall", "-y", *recipe.unwanted, is_quiet=is_quiet)
        if recipe.finish:
            _run(program, "-c", *recipe.finish, problem=f"{recipe.kind}: {directory} could not be completed")
        announce(f"{recipe.kind}: checking")
        _run(
            program, "-c", recipe.proof, problem=f"{recipe.kind}: what was installed into {directory} does not work"
        )
        stamp.write_text(f"{recipe.content}\n", encoding="utf-8")
    announce(f"{recipe.kind}: ready")
    return program


def _has_packages(recipe: Recipe, program: Path) -> bool:
    """True for an environment with exactly the pinned versions and without the unwanted packages."""
    versions = dict(re.sub(r"\[.*\]", "", pin).split("==") for pin in recipe.pins)
    installed_versions.cache_clear()
    installed = installed_versions(program, (*versions, *recipe.unwanted))
    installed_versions.cache_clear()
    return {name: version.partition("+")[0] for name, version in installed.items()} == versions


def _create_environment(kind: str, directory: Path, python: Path) -> None:
    problem = f"{kind}: {python} cannot create the environment {directory}; name another: --python /path/to/python"
    try:
        _run(python, "-m", "venv", "--clear", str(directory), problem=problem)
    except EngineUnavailableError:
        shutil.rmtree(directory, ignore_errors=True)
        raise


def _pip(recipe: Recipe, program: Path, command: str, *words: str, is_quiet: bool) -> None:
    quiet = ("--quiet",) if is_quiet else ()
    problem = (
        f"{recipe.kind}: pip cannot {command} {' '.join(recipe.pins)}; where an index of your own has the "
        "packages, name it in PIP_INDEX_URL"
    )
    # A question of pip's, such as that for a password, would stop an installation that nobody looks at.
    options = ("--no-input", "--disable-pip-version-check", *quiet)
    _run(program, "-m", "pip", command, *options, *words, problem=problem, env=recipe.build_env)


def _run(python: Path, *words: str, problem: str, env: Mapping[str, str] | None = None) -> None:
    """Run an interpreter without the modules of ours. Raises EngineUnavailableError(problem) where it fails."""
    environment = {**os.environ, **(env or {})}
    environment.pop("PYTHONPATH", None)
    try:
        returncode = subprocess.run((str(python), *words), env=environment, check=False).returncode
    except OSError as error:
        raise EngineUnavailableError(
            f"{python} cannot be started ({error.strerror}); name an interpreter, such as --python /usr/bin/python3"
        ) from error
    if returncode:
        raise EngineUnavailableError(f"{problem}; its words are above")


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Let two installations of one engine wait for each other."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with (directory.parent / f".{directory.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
