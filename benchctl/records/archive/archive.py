"""The files of a result directory that travel: everything but secrets, copies and what a process is writing.

The files of an archive of unknown origin, written into a new folder within bounds.
Archives opened as result directories: unpacked once into the user's cache, found again by their content.
"""

import hashlib
import os
import shutil
import stat
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import IO, Final, NoReturn, cast

import msgspec
import platformdirs

from benchctl.errors import RecordError, UsageError
from benchctl.records.archive.compression import STREAM_ERRORS, compression_of_content, decompressing, suffix_of
from benchctl.records.files import is_name
from benchctl.untrusted.files import open_file, opened_folder, read_file
from benchctl.untrusted.limits import (
    ARCHIVE_BYTES,
    ARCHIVE_DEPTH,
    ARCHIVE_ENTRIES,
    ARCHIVE_HEADER_BYTES,
    ARCHIVE_RATIO,
    ARCHIVE_RATIO_FREE_BYTES,
    VALUE_CHARS,
)
from benchctl.untrusted.reading import DECODING_ERRORS, decoding_problem
from benchctl.untrusted.text import visible_line

LEFT_OUT: Final = (
    ".*",  # stamps of earlier verifications, and files that are being written
    "*.partial",
    "*.tmp",
    "server.raw.log",  # with secrets
    "requests.safetensors",  # copies of long logs that their first reader makes
    "steps.safetensors",
    "*.pkl",  # of a job array: opening one runs what it says
    "*.tar",
    "*.tar.gz",
    "*.tgz",
    "*.tar.zst",
)
"""Patterns of names of files and folders that stay where they are; rsync reads them in the same way."""


@dataclass(frozen=True, slots=True)
class Contents:
    """The files of a directory that travel, and entries that cannot, which are neither files nor folders."""

    files: tuple[str, ...]
    """Paths below the directory with slashes, sorted."""
    size_bytes: int
    irregular: tuple[str, ...]


def stays(name: str) -> bool:
    """True for the name of a file or folder that is left where it is."""
    return any(fnmatchcase(name, pattern) for pattern in LEFT_OUT)


def is_safe(part: str) -> bool:
    """True for one component of a path that is unpacked everywhere."""
    return is_name(part) and part.isprintable()


def contents_of(directory: Path) -> Contents:
    """The files of a result directory that travel. Raises RecordError where there are too many, or too deep."""
    files, irregular, size_bytes = list[str](), list[str](), 0
    for name, status in _entries(directory):
        if stat.S_ISREG(status.st_mode) and all(map(is_safe, name.split("/"))):
            files.append(name)
            size_bytes += status.st_size
        else:
            irregular.append(name)
        if len(files) + len(irregular) > ARCHIVE_ENTRIES:
            raise RecordError(
                f"{directory} has more than {ARCHIVE_ENTRIES:,} files, which no result directory has; remove what "
                "is not of the experiment"
            )
    return Contents(tuple(sorted(files)), size_bytes, tuple(sorted(irregular)))


def _entries(directory: Path) -> Iterator[tuple[str, os.stat_result]]:
    folders = [""]
    while folders:
        above = folders.pop()
        with opened_folder(directory / above, within=directory) as handle, os.scandir(handle) as entries:
            entries_here = [
                (entry.name, entry.stat(follow_symlinks=False)) for entry in entries if not stays(entry.name)
            ]
        for name, status in entries_here:
            path = f"{above}/{name}" if above else name
            if not stat.S_ISDIR(status.st_mode):
                yield path, status
            elif path.count("/") + 2 > ARCHIVE_DEPTH:
                raise RecordError(
                    f"{directory / path} lies deeper than {ARCHIVE_DEPTH} folders, which nothing of a result "
                    "directory does; move it elsewhere"
                )
            else:
                folders.append(path)


_DAMAGE: Final[tuple[type[Exception], ...]] = (tarfile.TarError, *STREAM_ERRORS)
_PIECE_BYTES: Final = 1 << 20
_AHEAD_BYTES: Final = 1 << 18
"""Piece in which ``tarfile`` reads a stream."""
_BLOCK_BYTES: Final = tarfile.BLOCKSIZE
_END_BYTES: Final = 2 * _BLOCK_BYTES
"""Zeros behind the last file of every archive, by which a whole one is known."""
_DIGITS: Final = 20


def unpack(archive: Path, file: IO[bytes], folder: Path) -> None:
    """Write the files of ``archive``, which is open as ``file``, into the new folder ``folder``.

    Raises UsageError for a file that is not an archive, RecordError for one that is damaged, cut short, too large
    or holds what no result directory does; OSError as writing does.
    """
    compression = compression_of_content(archive)
    if compression is None:
        if suffix_of(archive) is None:
            raise UsageError(f"{archive} is not an archive: name a .tar.zst, .tar.gz or .tar of a result directory")
        refuse(archive, "does not begin as an archive does: it is damaged")
    source = _Source(archive, file, decompressing(file, compression))
    end = 0
    written = _Written(archive, folder)
    with _opened(source) as members:
        for member in _members(members, source):
            source.grant(max(member.size, 0) + _BLOCK_BYTES)
            end = written.take(members, member)
    source.require_end(end)


def refuse(archive: Path, problem: str) -> NoReturn:
    """Raise RecordError about an archive, with the remedy."""
    raise RecordError(f"{archive} {problem}; copy or export it again")


def _opened(source: "_Source") -> tarfile.TarFile:
    try:
        return tarfile.open(fileobj=cast("IO[bytes]", source), mode="r|", bufsize=_AHEAD_BYTES, errors="strict")
    except _DAMAGE as error:
        refuse(source.archive, f"is damaged: {decoding_problem(error)}")


def _members(members: tarfile.TarFile, source: "_Source") -> Iterator[tarfile.TarInfo]:
    while True:
        source.grant(ARCHIVE_HEADER_BYTES)
        try:
            member = members.next()
        except _DAMAGE as error:
            refuse(source.archive, f"is damaged: {decoding_problem(error)}")
        if member is None:
            return
        yield member


class _Source:
    """The bytes of an archive as ``tarfile`` asks for them, no more than was granted and than the bounds allow."""

    def __init__(self, archive: Path, file: IO[bytes], stream: IO[bytes]) -> None:
        self.archive, self._file, self._stream = archive, file, stream
        self._num_read = self._end_of_data = 0
        self._limit = ARCHIVE_HEADER_BYTES

    def grant(self, num_bytes: int) -> None:
        """Allow so many bytes from here on: a header alone, or a file."""
        self._limit = self._num_read + num_bytes

    def read(self, size: int) -> bytes:
        data = self._read(size)
        if self._num_read > self._limit + _AHEAD_BYTES:
            refuse(self.archive, f"is damaged: a header has more than {ARCHIVE_HEADER_BYTES:,} bytes")
        return data

    def require_end(self, end: int) -> None:
        """Read the rest. Raises RecordError unless it is the end of an archive whose last file ends at ``end``."""
        while self._read(_PIECE_BYTES):
            pass
        if self._end_of_data > end:
            refuse(self.archive, f"is damaged behind byte {end:,} of its files")
        if self._num_read < end + _END_BYTES:
            refuse(self.archive, "was cut short: its end is missing")

    def _read(self, size: int) -> bytes:
        try:
            data = self._stream.read(size)
        except STREAM_ERRORS as error:
            is_short = isinstance(error, EOFError)
            refuse(self.archive, "was cut short" if is_short else f"is damaged: {decoding_problem(error)}")
        content = data.rstrip(b"\0")
        if content:
            self._end_of_data = self._num_read + len(content)
        self._num_read += len(data)
        if self._num_read > ARCHIVE_RATIO_FREE_BYTES and self._num_read > ARCHIVE_RATIO * self._file.tell():
            refuse(
                self.archive,
                f"unpacks to more than {ARCHIVE_RATIO} times its size, which no result directory does",
            )
        return data


class _Written:
    """The files of an archive that were written so far."""

    def __init__(self, archive: Path, folder: Path) -> None:
        self._archive, self._folder = archive, folder
        self._num_entries = self._size_bytes = 0

    def take(self, members: tarfile.TarFile, member: tarfile.TarInfo) -> int:
        """Write one entry; returns the byte of the archive at which it ends."""
        label = visible_line(member.name, VALUE_CHARS)
        is_folder, size = member.type == tarfile.DIRTYPE, member.size
        if not is_folder and (member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.sparse is not None):
            refuse(self._archive, f"holds {label!r}, which is a link or no regular file")
        self._count(label, 0 if is_folder else size)
        parts = self._parts(member.name, label)
        path = None if any(map(stays, parts)) else self._folder.joinpath(*parts)
        try:
            if not is_folder:
                self._write(members, member, path)
            elif path is not None:
                path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError, IsADirectoryError):
            refuse(self._archive, f"holds {label!r} twice")
        return member.offset_data + (0 if is_folder else -(-size // _BLOCK_BYTES) * _BLOCK_BYTES)

    def _count(self, label: str, size_bytes: int) -> None:
        self._num_entries += 1
        self._size_bytes += size_bytes
        if size_bytes < 0:
            refuse(self._archive, f"is damaged: {label!r} has a size below 0")
        if self._num_entries > ARCHIVE_ENTRIES:
            refuse(self._archive, f"holds more than {ARCHIVE_ENTRIES:,} entries, and no result directory does")
        if self._size_bytes > ARCHIVE_BYTES:
            size = str(self._size_bytes)[:_DIGITS]
            refuse(self._archive, f"unpacks to {size} bytes, and at most {ARCHIVE_BYTES:,} are taken")

    def _parts(self, name: str, label: str) -> tuple[str, ...]:
        parts = tuple(part for part in name.removesuffix("/").split("/") if part != ".")
        if name.startswith("/") or len(parts) > ARCHIVE_DEPTH or not all(map(is_safe, parts)):
            refuse(self._archive, f"holds {label!r}, which is not a path inside of it")
        return parts

    def _write(self, members: tarfile.TarFile, member: tarfile.TarInfo, path: Path | None) -> None:
        """Write a file new, or read over one that is not wanted."""
        content = members.extractfile(member)
        if path is None:
            while content is not None and self._piece(content):
                pass
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:
            while content is not None and (data := self._piece(content)):
                file.write(data)

    def _piece(self, content: IO[bytes]) -> bytes:
        try:
            return content.read(_PIECE_BYTES)
        except tarfile.TarError:
            refuse(self._archive, "was cut short")


_VARIABLE: Final = "BENCHCTL_ARCHIVES_DIR"
_MARKER: Final = "complete.json"
_PARTIAL: Final = ".partial"
_DAY_S: Final = 86_400.0
_KEPT_S: Final = 30 * _DAY_S
_KEPT_BYTES: Final = 20 << 30
"""Archives that were opened within a day stay beyond this size."""
_PARTS: Final = ("manifest.json", "plan.json", "runs")
"""Any of these tells a result directory, whole or not."""


class _Opened(msgspec.Struct, frozen=True):
    name: str
    size_bytes: int


def is_archive(path: Path) -> bool:
    """True for a regular file that is an archive by its name or its first bytes."""
    try:
        return path.is_file() and (suffix_of(path) is not None or compression_of_content(path) is not None)
    except (OSError, ValueError):
        return False


def opened_directory(path: Path) -> Path:
    """The directory ``path`` itself, or that of the archive ``path`` in the cache.

    Raises RecordError for a damaged archive, UsageError for one of something else, and where it cannot be unpacked.
    """
    if not is_archive(path):
        return path
    status = path.stat()
    return _opened_once(path.resolve(), status.st_ino, status.st_size, status.st_mtime_ns)


def require_directory(path: Path, purpose: str) -> None:
    """Raise UsageError for an archive, whose files stay as they are, where ``purpose`` would write."""
    if is_archive(path):
        raise UsageError(
            f"{path} is an archive, and {purpose}; make a directory of it with 'benchctl import archive "
            f"{path}', and name that"
        )


def derived_directory(path: Path, name: str) -> Path | None:
    """The folder beside the archive ``path`` for what is derived from it, such as ``x-report``; None for a
    directory, which takes it itself.
    """
    return path.with_name(f"{_stem(path)}-{name}") if is_archive(path) else None


def unpack_results(archive: Path, folder: Path) -> Path:
    """Unpack an archive into the new folder ``folder``; returns the result directory in it, ``folder`` or below."""
    with open_file(archive.resolve(), within=archive.resolve().parent, max_bytes=ARCHIVE_BYTES) as file:
        unpack(archive, file, folder)
    return _result_directory(archive, folder)


def archives_directory() -> Path:
    """The cache of opened archives."""
    named = os.environ.get(_VARIABLE)
    return Path(named).expanduser() if named else platformdirs.user_cache_path("benchctl") / "archives"


@lru_cache(maxsize=16)
def _opened_once(archive: Path, _inode: int, _size_bytes: int, _mtime_ns: int) -> Path:
    with open_file(archive, within=archive.parent, max_bytes=ARCHIVE_BYTES) as file:
        cache = archives_directory()
        entry = cache / hashlib.file_digest(file, "sha256").hexdigest()
        if (opened := _complete(entry)) is not None:
            return opened
        file.seek(0)
        with _writing_into(cache):
            _unpack_into(entry, archive, file)
            _prune(cache)
    opened = _complete(entry)
    if opened is None:
        raise UsageError(f"{entry} disappeared while the archive was opened; open it again")
    return opened


def _complete(entry: Path) -> Path | None:
    """The directory of an opened archive, whose use is noted; None where it is not there."""
    marker = entry / _MARKER
    with suppress(OSError, RecordError, *DECODING_ERRORS):
        opened = msgspec.json.decode(read_file(marker, within=entry), type=_Opened)
        if is_name(opened.name) and (entry / opened.name).is_dir():
            with suppress(OSError):
                os.utime(marker)
            return entry / opened.name
    return None


def _unpack_into(entry: Path, archive: Path, file: IO[bytes]) -> None:
    cache = entry.parent
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(
        prefix=f".{entry.name[:12]}-", suffix=_PARTIAL, dir=cache, ignore_cleanup_errors=True
    ) as made:
        content, whole = Path(made) / "content", Path(made) / "whole"
        content.mkdir()
        whole.mkdir()
        unpack(archive, file, content)
        results = _result_directory(archive, content)
        name = _stem(archive) if results == content else results.name
        results.rename(whole / name)
        size_bytes = sum(path.stat().st_size for path in whole.rglob("*"))
        (whole / _MARKER).write_bytes(msgspec.json.encode(_Opened(name, size_bytes)))
        _give_name(whole, entry)


def _give_name(whole: Path, entry: Path) -> None:
    """Give a complete folder its name, unless another process was faster; one that is not complete goes."""
    if _complete(entry) is not None:
        return
    try:
        whole.rename(entry)
    except OSError:
        if _complete(entry) is None:
            _remove(entry)
            whole.rename(entry)


def _result_directory(archive: Path, folder: Path) -> Path:
    """The one result directory that was unpacked: ``folder`` itself or a folder in it."""
    if _is_result(folder):
        return folder
    present = sorted(path for path in folder.iterdir() if _is_result(path))
    if not present:
        raise UsageError(f"{archive} is not an archive of a result directory: it holds no manifest.json")
    if len(present) > 1:
        names = ", ".join(path.name for path in present[:3])
        raise UsageError(f"{archive} holds {len(present)} result directories ({names}); unpack it, and name one")
    if present[0].name == _MARKER:
        refuse(archive, f"holds a directory called {_MARKER}")
    return present[0]


def _is_result(folder: Path) -> bool:
    return folder.is_dir() and any((folder / part).exists() for part in _PARTS)


def _stem(path: Path) -> str:
    name = path.name.removesuffix(path.name[-len(suffix) :]) if (suffix := suffix_of(path)) else path.name
    return name.lstrip(".") if is_name(name.lstrip(".")) and name != _MARKER else "results"


@contextmanager
def _writing_into(cache: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"{cache}: the archive cannot be unpacked there ({error.strerror or error}); name another directory in "
            f"{_VARIABLE}, or free some space"
        ) from error


def _prune(cache: Path) -> None:
    """Remove archives that were not opened for a month, the oldest beyond some size, and what a crash left."""
    now_s, total_bytes = time.time(), 0
    entries = sorted(((_used_s(path), path) for path in cache.iterdir() if path.is_dir()), reverse=True)
    for used_s, path in entries:
        is_recent = now_s - used_s < _DAY_S
        if not path.name.endswith(_PARTIAL):
            total_bytes += _size_bytes(path)
            is_recent = is_recent or (now_s - used_s < _KEPT_S and total_bytes <= _KEPT_BYTES)
        if not is_recent:
            _remove(path)


def _remove(path: Path) -> None:
    """Remove a folder under another name, so that nobody finds it while it is going."""
    going = path if path.name.endswith(_PARTIAL) else path.with_name(f".{path.name[:12]}-{os.getpid()}{_PARTIAL}")
    with suppress(OSError):
        path.rename(going)
    shutil.rmtree(going, ignore_errors=True)


def _used_s(path: Path) -> float:
    """Wall time of the last use of an opened archive, or of the last change of another folder."""
    for held in (path / _MARKER, path):
        with suppress(OSError):
            return held.stat().st_mtime
    return 0.0


def _size_bytes(path: Path) -> int:
    with suppress(OSError, RecordError, *DECODING_ERRORS):
        return msgspec.json.decode(read_file(path / _MARKER, within=path), type=_Opened).size_bytes
    return 0
