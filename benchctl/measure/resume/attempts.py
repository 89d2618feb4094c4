"""Attempts at a run: what an earlier one left is moved aside, never mixed with the new one and never deleted."""

import re
import secrets
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

from benchctl.errors import BenchctlError
from benchctl.records.directory import RunDirectory
from benchctl.untrusted.files import entry_names, is_there, make_folder, move_entry

_EARLIER_ATTEMPT: Final = re.compile(r"attempt-(\d+)")


def begin_attempt(directory: RunDirectory) -> int:
    """Make room for a new attempt; returns its number, from 1.

    The files of the previous one move into ``attempt-<n>/`` inside the run's directory.
    """
    if directory.fence is not None:
        return _begin_in_new_folder(directory)
    path, root = directory.path, directory.root
    make_folder(path, within=root)
    number, files, _ = _attempts_in(directory, entry_names(path, within=root))
    if not files:
        return number
    aside = path / f"attempt-{number}"
    make_folder(aside, within=root)
    for name in files:
        move_entry(path / name, aside / name, within=root)
    return number + 1


def _begin_in_new_folder(directory: RunDirectory) -> int:
    """The same for a run that a process which lost its claim may still write to: what it has open or
    will open by a folder that it has open lies in the folder of the previous attempt, which goes aside as a whole.
    """
    path, root = directory.path, directory.root
    make_folder(path.parent, within=root)
    _bring_back(directory)
    if not is_there(path, within=root):
        directory.check()
        make_folder(path, within=root)
        return 1
    number, files, earlier = _attempts_in(directory, entry_names(path, within=root))
    if not files:
        return number
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    make_folder(fresh, within=root)
    directory.check()
    aside = fresh / f"attempt-{number}"
    move_entry(path, aside, within=root)
    move_entry(fresh, path, within=root)
    for name in earlier:
        move_entry(path / aside.name / name, path / name, within=root)
    return number + 1


def _bring_back(directory: RunDirectory) -> None:
    """Give the folder of a run its name again, where the process that moved an attempt aside was killed."""
    path, root = directory.path, directory.root
    if is_there(path, within=root):
        return
    for name in entry_names(path.parent, within=root):
        if name.startswith(f".{path.name}.") and entry_names(path.parent / name, within=root):
            directory.check()
            move_entry(path.parent / name, path, within=root)
            return


def _attempts_in(directory: RunDirectory, names: Iterable[str]) -> tuple[int, list[str], list[str]]:
    """The number of the attempt whose files are there, or of the next one; its files; earlier attempts."""
    matches = [(name, _EARLIER_ATTEMPT.fullmatch(name)) for name in names]
    files = [name for name, match in matches if match is None]
    earlier = [name for name, match in matches if match is not None]
    newest = max((int(match[1]) for _, match in matches if match is not None), default=0)
    number = newest + 1
    if files:
        with suppress(BenchctlError):  # ``run.json`` is missing or damaged
            number = max(directory.read().attempt, number)
    return number, files, earlier
