"""A result directory as one file: the same bytes for the same directory, wherever and whenever it is written."""

import os
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import IO, Final

from benchctl.errors import RecordError, UsageError
from benchctl.records.archive.archive import Contents, is_safe
from benchctl.records.archive.compression import Compression, compressing
from benchctl.records.directory import ResultDirectory
from benchctl.untrusted.files import open_file

_FILE_MODE: Final = 0o644
_LATEST_S: Final = (1 << 33) - 1
"""The latest time that a plain header holds."""


def write_archive(
    results: ResultDirectory,
    contents: Contents,
    output: Path,
    compression: Compression,
    on_bytes: Callable[[int], object] = lambda _num: None,
) -> None:
    """Write ``contents`` of a directory into one archive, below a folder with the name of the directory.

    A name of its folder that could not be unpacked everywhere is replaced by ``results``. Names are sorted;
    there are no users, and one mode for all files. The time of each file is that at which the
    experiment began: times of files differ between copies of a directory, and no reader needs them. ``on_bytes``
    is told of each piece that was read. Raises RecordError for a file that is cut while it is read, UsageError
    where ``output`` cannot be written.
    """
    name, mtime_s = results.path.resolve().name, _began_s(results)
    name = name if is_safe(name) else "results"
    with (
        _replaced(output) as file,
        compressing(file, compression) as stream,
        tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as archive,
    ):
        for member in contents.files:
            _add(archive, results.path, member, f"{name}/{member}", mtime_s, on_bytes)


def _add(
    archive: tarfile.TarFile, root: Path, member: str, name: str, mtime_s: int, on_bytes: Callable[[int], object]
) -> None:
    with open_file(root / member, within=root) as source:
        info = tarfile.TarInfo(name)
        info.size, info.mtime, info.mode = os.fstat(source.fileno()).st_size, mtime_s, _FILE_MODE
        archive.addfile(info, _Told(source, root / member, info.size, on_bytes))


class _Told:
    """A file whose first ``size_bytes`` are read; a log may grow meanwhile, and no file may shrink."""

    def __init__(self, file: IO[bytes], path: Path, size_bytes: int, on_bytes: Callable[[int], object]) -> None:
        self._file, self._path, self._left_bytes, self._on_bytes = file, path, size_bytes, on_bytes

    def read(self, size: int = -1, /) -> bytes:
        num_bytes = self._left_bytes if size < 0 else min(size, self._left_bytes)
        data = self._file.read(num_bytes)
        if len(data) < num_bytes:
            raise RecordError(f"{self._path} became shorter while it was read; export the directory again")
        self._left_bytes -= len(data)
        self._on_bytes(len(data))
        return data


def _began_s(results: ResultDirectory) -> int:
    """Seconds since 1970 at which the experiment was created; 0 where its manifest has no such time."""
    try:
        seconds = datetime.fromisoformat(results.manifest().created_at).timestamp()
    except (ValueError, OverflowError):
        return 0
    return min(max(int(seconds), 0), _LATEST_S)


@contextmanager
def _replaced(path: Path) -> Iterator[IO[bytes]]:
    """A new file that takes the name ``path`` once it is whole and on disk; else nothing is left of it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}; choose another file") from error
    finally:
        with suppress(OSError):
            partial.unlink()
