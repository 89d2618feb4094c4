"""Attempts at a run: what an earlier one left is moved aside, never mixed with the new one and never deleted."""

import re
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

from benchctl.errors import BenchctlError
from benchctl.records.directory import RunDirectory
from benchctl.untrusted.files import entry_names, make_folder, move_entry

_EARLIER_ATTEMPT: Final = re.compile(r"attempt-(\d+)")


def begin_attempt(directory: RunDirectory) -> int:
    """Make room for a new attempt; returns its number, from 1.

    The files of the previous one move into ``attempt-<n>/`` inside the run's directory.
    """
    path, root = directory.path, directory.root
    make_folder(path, within=root)
    number, files = _attempts_in(directory, entry_names(path, within=root))
    if not files:
        return number
    aside = path / f"attempt-{number}"
    make_folder(aside, within=root)
    for name in files:
        move_entry(path / name, aside / name, within=root)
    return number + 1


def _attempts_in(directory: RunDirectory, names: Iterable[str]) -> tuple[int, list[str]]:
    """The number of the attempt whose files are there, or of the next one, and its files."""
    matches = [(name, _EARLIER_ATTEMPT.fullmatch(name)) for name in names]
    files = [name for name, match in matches if match is None]
    newest = max((int(match[1]) for _, match in matches if match is not None), default=0)
    number = newest + 1
    if files:
        with suppress(BenchctlError):  # ``run.json`` is missing or damaged
            number = max(directory.read().attempt, number)
    return number, files
