"""Digests of files, hashed no more often than needed.

A file that has the size and the time of change of a digest is trusted to have its content. Digests come from the
records of the run and from earlier verifications, which are kept in ``.verified.json`` if the directory can be
written: a copied directory has new times, and is hashed once.
"""

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from benchctl.records.integrity.digests import digest_of
from benchctl.records.jsonl import write_json_atomic
from benchctl.records.run import FileDigest

STAMPS_FILE: Final = ".verified.json"
_WORTH_KEEPING_BYTES: Final = 1 << 20
"""Fewer bytes are hashed faster than the file of digests is written."""
_NUM_HASHING: Final = min(4, os.cpu_count() or 1)


class FileHasher:
    """Hashes the files of a directory, which are named by their paths below it.

    With ``is_fresh`` no earlier digest is trusted: every file is read.
    """

    def __init__(self, directory: Path, *, is_fresh: bool) -> None:
        self._directory = directory
        self._earlier = {} if is_fresh else _read_stamps(directory)
        self._hashed_now: dict[str, FileDigest] = {}
        self._is_fresh = is_fresh
        self.hashed_bytes = 0

    def size_bytes(self, name: str) -> int | None:
        """Size of a file; None without one."""
        return _stamp(self._directory / name)[0]

    def digests(self, recorded: Iterable[tuple[str, FileDigest | None]]) -> dict[str, FileDigest | None]:
        """Digests of the files as they are now, by name; None for a file that cannot be read.

        ``recorded`` are names, each with its recorded digest or None.
        """
        current: dict[str, FileDigest | None] = {}
        unhashed = []
        for name, digest in recorded:
            stamp = _stamp(self._directory / name)
            earlier = (digest, self._earlier.get(name), self._hashed_now.get(name))
            trusted = [held for held in earlier if held and stamp == (held.size_bytes, held.mtime_ns)]
            if trusted and not (self._is_fresh and name not in self._hashed_now):
                current[name] = trusted[-1]
            else:
                unhashed.append(name)
        return current | self._hash(unhashed)

    def write_stamps(self) -> None:
        """Keep the digests for the next verification, if they were much work and the directory can be written."""
        if self.hashed_bytes >= _WORTH_KEEPING_BYTES:
            with suppress(OSError):
                write_json_atomic(self._directory / STAMPS_FILE, self._earlier | self._hashed_now)

    def _hash(self, names: Sequence[str]) -> dict[str, FileDigest | None]:
        """Digests by name; threads share the work, because hashing releases the interpreter."""
        paths = [self._directory / name for name in names]
        if len(paths) < 2:
            hashed = [_readable_digest(path) for path in paths]
        else:
            with ThreadPoolExecutor(max_workers=_NUM_HASHING) as pool:
                hashed = list(pool.map(_readable_digest, paths))
        digests = dict(zip(names, hashed, strict=True))
        self._hashed_now |= {name: digest for name, digest in digests.items() if digest is not None}
        self.hashed_bytes += sum(digest.size_bytes for digest in hashed if digest is not None)
        return digests


def _read_stamps(directory: Path) -> dict[str, FileDigest]:
    try:
        return msgspec.json.decode((directory / STAMPS_FILE).read_bytes(), type=dict[str, FileDigest])
    except (OSError, msgspec.MsgspecError):
        return {}


def _stamp(path: Path) -> tuple[int | None, int | None]:
    """Size in bytes and time of change in nanoseconds; None without a file."""
    try:
        stat = path.stat()
    except OSError:
        return None, None
    return stat.st_size, stat.st_mtime_ns


def _readable_digest(path: Path) -> FileDigest | None:
    try:
        return digest_of(path)
    except OSError:
        return None
