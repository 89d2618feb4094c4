"""Builds of two commits of an engine, each in a git worktree of its own.

benchctl knows no way to build an engine: the commands are the user's, and what they make is measured.
"""

import shlex
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchctl.errors import UsageError
from benchctl.measure.machine import git_output


def checkout_of(repository: Path, commit: str) -> Path:
    """The worktree of a commit below ``builds``, made where it is missing. Raises UsageError where git cannot."""
    sha = git_output(repository, "rev-parse", "--verify", f"{commit}^{{commit}}")
    if sha is None:
        raise UsageError(
            f"--value {commit}: git finds no such commit in --repo {repository}; "
            + ("name a branch, tag or commit of a clone of the engine" if shutil.which("git") else "install git")
        )
    checkout = Path("builds") / f"{repository.resolve().name}-{sha[:12]}"
    if git_output(checkout, "rev-parse", "HEAD") != sha:
        _run(("git", "worktree", "add", "-qf", "--detach", str(checkout.absolute()), sha.strip()), repository)
    return checkout


def make_build(checkout: Path, commands: Iterable[Sequence[str]], program: str) -> Path:
    """The ``program`` in a checkout, where the commands have been run; the user sees their own words.

    Raises UsageError where one fails, or where they do not make the program.
    """
    for command in commands:
        _run(command, checkout)
    if not (checkout / program).exists():
        raise UsageError(
            f"{checkout} has no {program}; give the commands that make it there, such as --build 'cmake -B build' "
            "--build 'cmake --build build', or name with --program what they make"
        )
    return checkout / program


def _run(command: Sequence[str], directory: Path) -> None:
    if subprocess.run(("/usr/bin/env", *command), cwd=directory, check=False).returncode:
        raise UsageError(
            f"{shlex.join(command)} in {directory} failed, as its own words above say: correct --build, or "
            "name another commit"
        )
