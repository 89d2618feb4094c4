"""Measurements of this machine that are on file: a file for each, in a folder for each key.

Durations of runs, from which plans estimate their own.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, TypeVar

import msgspec
import platformdirs

from benchctl.errors import InvalidDataError, UsageError
from benchctl.records.files import encode
from benchctl.records.schema import Amount, Count, Record
from benchctl.untrusted.reading import DECODING_ERRORS, UnreadableError, read_lines

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


STORE_VARIABLE: Final = "BENCHCTL_DURATIONS_DIR"
_MOST_LINES: Final = 2000
"""Limit of a file, which is then cut to the newest half."""


class RunDuration(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The duration of one run, and its conditions. Times are in seconds."""

    measured_at: str
    host: str
    gpus: tuple[str, ...] = ()
    engine: str
    model: str
    server_sha256: str
    """SHA-256 of the options of the run's server."""
    settings_sha256: str
    """SHA-256 of all settings of the run's requests and server."""
    overhead_s: Amount
    """Everything but the load: the server's start, warm-up and end, and reading its records."""
    token_s: Amount
    """Time from one token of a sequence to the next, prompts included, from the duration of the load."""
    num_sequences: Count
    """Largest number of answers in progress at once."""


def durations_directory() -> Path:
    """``BENCHCTL_DURATIONS_DIR``, or ``durations`` below the user's directory for state."""
    directory = os.environ.get(STORE_VARIABLE)
    return (
        Path(directory).expanduser() if directory else Path(platformdirs.user_state_dir("benchctl")) / "durations"
    )


def store_duration(store: Path, duration: RunDuration) -> None:
    """Append a duration; a store that cannot be written only makes later estimates worse."""
    path = store / f"{duration.engine}.jsonl"
    with suppress(OSError):
        store.mkdir(parents=True, exist_ok=True)
        if path.is_file() and len(lines := path.read_bytes().splitlines(keepends=True)) > _MOST_LINES:
            partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
            partial.write_bytes(b"".join(lines[-_MOST_LINES // 2 :]))
            partial.replace(path)
        with path.open("ab") as file:
            file.write(encode(duration) + b"\n")


def stored_durations(store: Path, engine: str) -> tuple[RunDuration, ...]:
    """The durations of one engine in the order of measurement; damaged lines are left out."""
    durations: list[RunDuration] = []
    with suppress(UnreadableError):
        for _, line in read_lines(store / f"{engine}.jsonl"):
            with suppress(*DECODING_ERRORS):
                durations.append(msgspec.json.decode(line, type=RunDuration))
    return tuple(durations)
