"""A store of measurements: one file for each, in a folder for each key.

    <store>/<key>/<when>-<hash>.json

The newest measurement of a key counts; older ones stay as history. What a key is, and which of its measurements
counts where that is not the newest, is up to the kind of measurement.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import platformdirs

from benchctl.errors import InvalidDataError, UsageError
from benchctl.records.jsonl import encode
from benchctl.records.record import Record

RecordT = TypeVar("RecordT", bound=Record)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile(Generic[RecordT]):
    """One file of a store. ``content`` is None if it cannot be read; ``problem`` then says why."""

    path: Path
    content: RecordT | None
    problem: str | None = None

    @property
    def key(self) -> str:
        """Name of its key."""
        return self.path.parent.name

    @property
    def name(self) -> str:
        """``key/when-hash``, which differs from those of its history."""
        return f"{self.key}/{self.path.stem}"


def store_directory(variable: str, name: str) -> Path:
    """The directory that an environment variable names, or ``name`` below the data directory of the user."""
    directory = os.environ.get(variable)
    return Path(directory).expanduser() if directory else Path(platformdirs.user_data_dir("benchctl")) / name


def key_name(words: Iterable[str], identity: object) -> str:
    """``word-word-hash8``: readable, and unique by the hash of ``identity``."""
    readable = "-".join(re.sub(r"[^A-Za-z0-9._-]+", "_", word)[:40] for word in words)
    return f"{readable}-{hashlib.sha256(encode(identity)).hexdigest()[:8]}"


def path_of(store: Path, key: str, content: Record, measured_at: str) -> Path:
    """The file of a measurement; the same one again is the same file."""
    when = re.sub(r"[^0-9TZ]", "", measured_at)
    return store / key / f"{when}-{hashlib.sha256(encode(content)).hexdigest()[:8]}.json"


def file_measurement(path: Path, write: Callable[[Path], None], *, what: str, variable: str) -> Path:
    """Write a file of a store. Raises UsageError when it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)
    except OSError as error:
        raise UsageError(
            f"{path}: the {what} cannot be stored ({error.strerror}); correct its permissions, or set {variable} "
            "to a directory that can be written"
        ) from error
    return path


def stored_files(
    store: Path, read: Callable[[Path], RecordT], key: str | None = None
) -> tuple[StoredFile[RecordT], ...]:
    """Everything on file, or all of one key: keys by name, the newest measurement of each first."""
    names = sorted(path.name for path in store.glob("*") if path.is_dir()) if key is None else [key]
    paths = [path for name in names for path in sorted((store / name).glob("*.json"), reverse=True)]
    return tuple(_stored_file(path, read) for path in paths)


def _stored_file(path: Path, read: Callable[[Path], RecordT]) -> StoredFile[RecordT]:
    try:
        return StoredFile(path=path, content=read(path))
    except InvalidDataError as error:
        return StoredFile(path=path, content=None, problem=str(error))


def newest_of_each(entries: Iterable[StoredFile[RecordT]]) -> tuple[StoredFile[RecordT], ...]:
    """The measurements that count: the first of each key in the order of ``stored_files`` that can be read."""
    newest: dict[str, StoredFile[RecordT]] = {}
    for entry in entries:
        if entry.content is not None:
            newest.setdefault(entry.key, entry)
    return tuple(newest.values())


def find_files(
    entries: tuple[StoredFile[RecordT], ...], name: str, missing: str
) -> tuple[StoredFile[RecordT], ...]:
    """The measurements of ``name``: a key, one measurement of it, or the beginning of a single key.

    Raises UsageError when there is none, which ``missing`` says behind a "no", or when several keys begin so.
    """
    exact = tuple(entry for entry in entries if name in {entry.key, entry.name})
    matches = exact or tuple(entry for entry in entries if entry.name.startswith(name))
    keys = sorted({entry.key for entry in matches})
    if not matches:
        stored_keys = ", ".join(sorted({entry.key for entry in entries})) or "nothing is on file"
        raise UsageError(f"no {missing}; known keys: {stored_keys}")
    if len(keys) > 1:
        raise UsageError(f"{name!r} begins several keys: {', '.join(keys)}; write one of them out")
    return matches


def remove_files(entries: Iterable[StoredFile[RecordT]]) -> int:
    """Delete files of the store, and keys that hold no more; returns how many files."""
    removed = 0
    for entry in entries:
        entry.path.unlink(missing_ok=True)
        removed += 1
        if not any(entry.path.parent.glob("*.json")):
            shutil.rmtree(entry.path.parent, ignore_errors=True)
    return removed
