"""Attempts at one run: what an earlier one left is moved aside, never mixed and never deleted."""

import re

from benchctl.errors import BenchctlError
from benchctl.records.directory import RunDirectory


def begin_attempt(directory: RunDirectory) -> int:
    """Make room for a new attempt; returns its number, from 1.

    The files of the previous one move into ``attempt-<n>/`` inside the run's directory.
    """
    directory.path.mkdir(parents=True, exist_ok=True)
    entries = sorted(directory.path.iterdir())
    kept = [int(found[1]) for entry in entries if (found := re.fullmatch(r"attempt-(\d+)", entry.name))]
    files = [entry for entry in entries if not re.fullmatch(r"attempt-\d+", entry.name)]
    newest = max(kept, default=0)
    if not files:
        return newest + 1
    number = max(_recorded_attempt(directory), newest + 1)
    aside = directory.path / f"attempt-{number}"
    aside.mkdir()
    for entry in files:
        entry.rename(aside / entry.name)
    return number + 1


def _recorded_attempt(directory: RunDirectory) -> int:
    """The attempt that ``run.json`` speaks of; 0 where it is missing or damaged."""
    try:
        return directory.read().attempt
    except BenchctlError:
        return 0
