"""The wheel of this checkout, and an environment in which nothing but it and what it asks for is installed."""

import os
import subprocess
import sys
import tempfile
import venv
from functools import cache
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).parents[2]


@cache
def _place(name: str) -> "tempfile.TemporaryDirectory[str]":
    """A directory that this process keeps to its end."""
    return tempfile.TemporaryDirectory(prefix=f"benchctl-{name}-")


@cache
def wheel() -> Path:
    """Built by the backend itself, which needs no network and leaves the checkout as it is."""
    into = _place("wheel").name
    argv = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", into]
    built = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    (path,) = Path(into).glob("*.whl")
    return path


@cache
def unpacked() -> Path:
    """A directory of modules with the wheel in it, as an installation lays it out."""
    into = Path(_place("unpacked").name)
    with ZipFile(wheel()) as archive:
        archive.extractall(into)
    return into


@cache
def installed() -> Path:
    """A new environment after ``pip install`` of the wheel, without extras and without pip itself.

    Packages come from pip's index or its cache.
    """
    environment = Path(_place("installed").name)
    venv.create(environment, with_pip=False, symlinks=True)
    argv = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(environment / "bin" / "python"),
        "install",
        "--quiet",
        "--no-compile",
        str(wheel()),
    ]
    done = subprocess.run(argv, cwd=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return environment


def site_packages(environment: Path) -> Path:
    (path,) = environment.glob("lib/python*/site-packages")
    return path


def run_installed(cwd: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """``benchctl ARGUMENTS`` of that environment, with no module of this checkout or of the tests in reach."""
    environment = installed()
    hidden = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    env["PATH"] = f"{environment / 'bin'}{os.pathsep}{env['PATH']}"
    argv = [str(environment / "bin" / "benchctl"), *arguments]
    return subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False)
