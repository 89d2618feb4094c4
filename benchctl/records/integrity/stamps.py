"""What files hold, hashed no oftener than needed.

A file whose size and time of change are those of a known digest is believed to hold what that digest says. Known
are the digests that were recorded when it was written, and those of earlier looks, which lie in ``.verified.json``
where the directory can be written: a copy has new times, and is hashed once.
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
"""Less is hashed again sooner than the file of stamps is written."""
_NUM_HASHING: Final = min(4, os.cpu_count() or 1)


class FileLook:
    """One look at the files of a directory, which are named by their paths below it.

    With ``is_fresh`` nothing is believed: every file is read.
    """

    def __init__(self, directory: Path, *, is_fresh: bool) -> None:
        self._directory = directory
        self._known = {} if is_fresh else _read_stamps(directory)
        self._found: dict[str, FileDigest] = {}
        self._is_fresh = is_fresh
        self.hashed_bytes = 0

    def size_bytes(self, name: str) -> int | None:
        """None for what is not there."""
        return _stamp(self._directory / name)[0]

    def digests(self, recorded: Iterable[tuple[str, FileDigest | None]]) -> dict[str, FileDigest | None]:
        """Digests of what the files hold now, by name; None for a file that cannot be read.

        ``recorded`` are names, each with the digest that was recorded for it where there is one.
        """
        held: dict[str, FileDigest | None] = {}
        unknown = []
        for name, digest in recorded:
            stamp = _stamp(self._directory / name)
            earlier = (digest, self._known.get(name), self._found.get(name))
            believed = [known for known in earlier if known is not None and stamp == _stamp_of(known)]
            if believed and not (self._is_fresh and name not in self._found):
                held[name] = believed[-1]
            else:
                unknown.append(name)
        return held | self._hashed(unknown)

    def keep(self) -> None:
        """Spare the next look the work of this one, where the directory can be written and it was much."""
        if self.hashed_bytes >= _WORTH_KEEPING_BYTES:
            with suppress(OSError):
                write_json_atomic(self._directory / STAMPS_FILE, self._known | self._found)

    def _hashed(self, names: Sequence[str]) -> dict[str, FileDigest | None]:
        """Hashing leaves the interpreter to other threads, so that they share the work."""
        paths = [self._directory / name for name in names]
        if len(paths) < 2:
            hashed = [_readable_digest(path) for path in paths]
        else:
            with ThreadPoolExecutor(max_workers=_NUM_HASHING) as pool:
                hashed = list(pool.map(_readable_digest, paths))
        held = dict(zip(names, hashed, strict=True))
        self._found |= {name: digest for name, digest in held.items() if digest is not None}
        self.hashed_bytes += sum(digest.size_bytes for digest in hashed if digest is not None)
        return held


def _read_stamps(directory: Path) -> dict[str, FileDigest]:
    try:
        return msgspec.json.decode((directory / STAMPS_FILE).read_bytes(), type=dict[str, FileDigest])
    except (OSError, msgspec.MsgspecError):
        return {}


def _stamp(path: Path) -> tuple[int | None, int | None]:
    """Size in bytes and time of change in nanoseconds; None for what is not there."""
    try:
        stat = path.stat()
    except OSError:
        return None, None
    return stat.st_size, stat.st_mtime_ns


def _stamp_of(digest: FileDigest) -> tuple[int | None, int | None]:
    return digest.size_bytes, digest.mtime_ns


def _readable_digest(path: Path) -> FileDigest | None:
    try:
        return digest_of(path)
    except OSError:
        return None
