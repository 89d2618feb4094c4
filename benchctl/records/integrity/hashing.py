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

from benchctl.errors import RecordError
from benchctl.records.files import read_if_there
from benchctl.records.integrity.digests import digest_of
from benchctl.records.jsonl import write_json_atomic
from benchctl.records.run import FileDigest
from benchctl.untrusted.decoding import DECODING_ERRORS
from benchctl.untrusted.files import OutsideError, is_there, stats_in

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
        self._earlier = {} if is_fresh else read_stamps(directory, STAMPS_FILE)
        self._hashed_now: dict[str, FileDigest] = {}
        self._is_fresh = is_fresh
        self._stats: dict[str, dict[str, os.stat_result]] = {}
        self.hashed_bytes = 0

    def size_bytes(self, name: str) -> int | None:
        """Size of a file; None without one."""
        return self._stamp(name)[0]

    def is_there(self, name: str) -> bool:
        """True where there is an entry of any kind."""
        try:
            return is_there(self._directory / name, within=self._directory)
        except OutsideError:
            return True

    def digests(self, recorded: Iterable[tuple[str, FileDigest | None]]) -> dict[str, FileDigest | None]:
        """Digests of the files as they are now, by name; None for a file that cannot be read.

        ``recorded`` are names, each with its recorded digest or None.
        """
        current: dict[str, FileDigest | None] = {}
        unhashed = []
        for name, digest in recorded:
            stamp = self._stamp(name)
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
            with suppress(OSError, RecordError):
                write_json_atomic(
                    self._directory / STAMPS_FILE, self._earlier | self._hashed_now, within=self._directory
                )

    def _hash(self, names: Sequence[str]) -> dict[str, FileDigest | None]:
        """Digests by name; threads share the work, because hashing releases the interpreter."""
        if len(names) < 2:
            hashed = [self._readable_digest(name) for name in names]
        else:
            with ThreadPoolExecutor(max_workers=_NUM_HASHING) as pool:
                hashed = list(pool.map(self._readable_digest, names))
        digests = dict(zip(names, hashed, strict=True))
        self._hashed_now |= {name: digest for name, digest in digests.items() if digest is not None}
        self.hashed_bytes += sum(digest.size_bytes for digest in hashed if digest is not None)
        return digests

    def _stamp(self, name: str) -> tuple[int | None, int | None]:
        """Size in bytes and time of change in nanoseconds, when first asked; None without a regular file."""
        folder, _, file = name.rpartition("/")
        if folder not in self._stats:
            try:
                self._stats[folder] = stats_in(self._directory / folder, within=self._directory)
            except (OSError, OutsideError):
                self._stats[folder] = {}
        status = self._stats[folder].get(file)
        return (None, None) if status is None else (status.st_size, status.st_mtime_ns)

    def _readable_digest(self, name: str) -> FileDigest | None:
        try:
            return digest_of(self._directory / name, within=self._directory)
        except (OSError, RecordError):
            return None


def read_stamps(directory: Path, name: str) -> dict[str, FileDigest]:
    """The digests in a file of nothing else; empty without one, or where it cannot be read."""
    try:
        content = read_if_there(directory / name, within=directory) or b"{}"
        return msgspec.json.decode(content, type=dict[str, FileDigest])
    except RecordError:
        return {}
    except DECODING_ERRORS:
        return {}
