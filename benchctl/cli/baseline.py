"""A result directory that is kept as the baseline of later ones, as a gate for continuous integration needs it."""

import shutil
from pathlib import Path

from benchctl.errors import InvalidDataError, UsageError, as_usage_error
from benchctl.records.directory import open_results


def has_baseline(baseline: Path) -> bool:
    """True where a baseline was kept. Raises UsageError for a directory that is something else."""
    if (baseline / "manifest.json").is_file():
        return True
    if baseline.exists():
        raise UsageError(f"--baseline {baseline}: holds no results; name another, or remove it")
    return False


def keep_baseline(results: Path, baseline: Path) -> None:
    """Copy ``results`` to ``baseline``; a copy that breaks off leaves what was kept before.

    Raises InvalidDataError where the experiment is not done, UsageError where nothing can be written.
    """
    state = open_results(results).manifest().state
    if state != "done":
        raise InvalidDataError(f"{results} is {state}, so that it cannot be a baseline; measure it again")
    new = baseline.with_name(f"{baseline.name}.new")
    try:
        shutil.rmtree(new, ignore_errors=True)
        shutil.copytree(results, new, symlinks=True)
        shutil.rmtree(baseline, ignore_errors=True)
        new.rename(baseline)
    except OSError as error:
        raise as_usage_error(error, baseline, remedy="name another --baseline") from error
