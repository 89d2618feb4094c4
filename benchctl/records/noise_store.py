"""The noise on file: results of A/A experiments on this machine, by server and model.

    <store>/<key>/<when>-<hash>.json

The store belongs to the user. A new result directory gets a copy of the noise that applies to it (``noise.json``),
and readers of results never use the store. The newest measurement of a key counts; older ones stay as history.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import platformdirs

from benchctl.errors import RecordError, UsageError
from benchctl.records.jsonl import encode
from benchctl.records.noise import NoiseFloor, read_noise, write_noise

STORE_VARIABLE: Final = "BENCHCTL_NOISE_DIR"


def noise_directory() -> Path:
    """``BENCHCTL_NOISE_DIR``, or ``noise`` below the data directory of the user."""
    directory = os.environ.get(STORE_VARIABLE)
    return Path(directory).expanduser() if directory else Path(platformdirs.user_data_dir("benchctl")) / "noise"


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseKey:
    """The source of noise: a server with its options and model, on a machine with its devices."""

    host: str
    gpus: tuple[str, ...]
    engine: str
    engine_sha256: str
    model: str

    @property
    def name(self) -> str:
        """``host-engine-model-hash8``: readable, and by its hash unique."""
        identity = encode((self.host, self.gpus, self.engine, self.engine_sha256, self.model))
        words = (self.host, self.engine, Path(self.model).name)
        readable = "-".join(re.sub(r"[^A-Za-z0-9._-]+", "_", word)[:40] for word in words)
        return f"{readable}-{hashlib.sha256(identity).hexdigest()[:8]}"


def key_of(noise: NoiseFloor) -> NoiseKey:
    """The key under which a measurement is filed."""
    return NoiseKey(
        host=noise.host, gpus=noise.gpus, engine=noise.engine, engine_sha256=noise.engine_sha256, model=noise.model
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredNoise:
    """One file of the store. ``noise`` is None if it cannot be read; ``problem`` then says why."""

    path: Path
    noise: NoiseFloor | None
    problem: str | None = None

    @property
    def key(self) -> str:
        """Name of its key."""
        return self.path.parent.name

    @property
    def name(self) -> str:
        """``key/when-hash``, which differs from those of its history."""
        return f"{self.key}/{self.path.stem}"


def store_noise(store: Path, noise: NoiseFloor) -> Path:
    """File a measurement; the same one again is the same file. Raises UsageError when it cannot be written."""
    when = re.sub(r"[^0-9TZ]", "", noise.measured_at)
    path = store / key_of(noise).name / f"{when}-{hashlib.sha256(encode(noise)).hexdigest()[:8]}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_noise(path, noise)
    except OSError as error:
        raise UsageError(
            f"{path}: the noise cannot be stored ({error.strerror}); correct its permissions, or set "
            f"{STORE_VARIABLE} to a directory that can be written"
        ) from error
    return path


def stored_noise(store: Path, key: NoiseKey | None = None) -> tuple[StoredNoise, ...]:
    """Everything on file, or all of one key: keys by name, the newest measurement of each first."""
    stored_keys = sorted(path.name for path in store.glob("*") if path.is_dir())
    names = stored_keys if key is None else [key.name]
    return tuple(_read(path) for name in names for path in sorted((store / name).glob("*.json"), reverse=True))


def newest_of_each(entries: Iterable[StoredNoise]) -> tuple[StoredNoise, ...]:
    """The measurements that count: the first of each key in the order of ``stored_noise`` that can be read."""
    newest: dict[str, StoredNoise] = {}
    for entry in entries:
        if entry.noise is not None:
            newest.setdefault(entry.key, entry)
    return tuple(newest.values())


def find_noise(store: Path, name: str) -> tuple[StoredNoise, ...]:
    """The measurements of ``name``: a key, one measurement of it, or the beginning of a single key.

    Raises UsageError when there is none, or when several keys begin so.
    """
    entries = stored_noise(store)
    exact = tuple(entry for entry in entries if name in {entry.key, entry.name})
    matches = exact or tuple(entry for entry in entries if entry.name.startswith(name))
    keys = sorted({entry.key for entry in matches})
    if not matches:
        stored_keys = ", ".join(sorted({entry.key for entry in entries})) or "nothing is on file"
        raise UsageError(f"no noise is filed under {name!r} in {store}; known keys: {stored_keys}")
    if len(keys) > 1:
        raise UsageError(f"{name!r} begins several keys: {', '.join(keys)}; write one of them out")
    return matches


def remove_noise(entries: Iterable[StoredNoise]) -> int:
    """Delete files of the store, and keys that hold no more; returns how many files."""
    removed = 0
    for entry in entries:
        entry.path.unlink(missing_ok=True)
        removed += 1
        if not any(entry.path.parent.glob("*.json")):
            shutil.rmtree(entry.path.parent, ignore_errors=True)
    return removed


def _read(path: Path) -> StoredNoise:
    try:
        return StoredNoise(path=path, noise=read_noise(path))
    except RecordError as error:
        return StoredNoise(path=path, noise=None, problem=str(error))
