"""The result directories under a root, newest first.

Anything else, and whatever cannot be read, is an entry that says so: a listing never fails because of other files.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchctl.errors import InvalidDataError, UsageError
from benchctl.formats import first_of
from benchctl.records.claim import current_manifest
from benchctl.records.directory import ResultDirectory, RunDirectory, open_results
from benchctl.records.integrity.verification import verify_directory
from benchctl.untrusted.files import is_there


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One directory. ``problem`` says why nothing else is readable of it."""

    path: Path
    created_at: str | None = None
    profile: str | None = None
    engine: str | None = None
    state: str | None = None
    label: str | None = None
    num_done: int | None = None
    num_planned: int | None = None
    problem: str | None = None
    altered: str | None = None
    """The files that were altered since they were measured."""

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {name: str(self.path) if name == "path" else getattr(self, name) for name in self.__slots__}


def list_directories(root: Path) -> tuple[Entry, ...]:
    """Result directories in ``root`` and one level below it, newest first, unreadable ones last.

    Raises UsageError when ``root`` is not a directory.
    """
    if not root.is_dir():
        raise UsageError(
            f"{root} is not a directory; name the one that holds results, or measure with 'benchctl run'"
        )
    entries = [_entry(path) for path in _candidates(root)]
    readable = sorted(
        (entry for entry in entries if entry.problem is None),
        key=lambda entry: (entry.created_at or "", str(entry.path)),
        reverse=True,
    )
    return (*readable, *(entry for entry in entries if entry.problem is not None))


def _candidates(root: Path) -> Iterator[Path]:
    """The root itself when it is a result directory, else its children or their children."""
    if _is_result(root):
        yield root
        return
    for child in _directories(root):
        below = [] if _is_result(child) else _directories(child)
        if below and any(_is_result(path) for path in below):
            yield from below
        else:
            yield child


def _is_result(path: Path) -> bool:
    return is_there(path / "manifest.json", within=path)


def _directories(path: Path) -> list[Path]:
    try:
        children = [child for child in path.iterdir() if child.is_dir() and not child.name.startswith(".")]
    except PermissionError:
        return []
    return sorted(child for child in children if not child.is_symlink())  # ``latest`` links to one of the others


def _entry(path: Path) -> Entry:
    if not _is_result(path):
        return Entry(path=path, problem="not a result directory")
    try:
        results = open_results(path)
        manifest = current_manifest(results)
        num_done, num_planned = _count_runs(results)
        altered = list(dict.fromkeys(alteration.file for alteration in verify_directory(path).alterations))
    except InvalidDataError as error:
        return Entry(path=path, problem=str(error))
    return Entry(
        path=path,
        created_at=manifest.created_at,
        profile=manifest.profile,
        engine=manifest.engine,
        state=manifest.state,
        label=manifest.label,
        num_done=num_done,
        num_planned=num_planned,
        altered="altered: " + first_of(altered, 2) if altered else None,
    )


def _count_runs(results: ResultDirectory) -> tuple[int, int]:
    """Runs done and runs planned. A run whose record cannot be read is not done."""
    runs = tuple(results.run(planned.run_id) for planned in results.due_plan().runs)
    return sum(map(_is_done, runs)), len(runs)


def _is_done(run: RunDirectory) -> bool:
    try:
        return run.read().state == "done"
    except InvalidDataError:
        return False
