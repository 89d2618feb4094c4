"""The files of an archive of unknown origin, written into a new folder within bounds.

Only regular files and folders are taken, none outside the folder and none twice; sizes, numbers and the ratio to
the compressed bytes are bounded. Owners, modes and times of the archive are not kept: files are new here, so that
their content is compared with its digests, and not their times.
"""

import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final, NoReturn, cast

from benchctl.errors import RecordError, UsageError
from benchctl.records.archive.compression import STREAM_ERRORS, compression_of_content, decompressing, suffix_of
from benchctl.records.archive.contents import is_safe, stays
from benchctl.untrusted.decoding import decoding_problem
from benchctl.untrusted.limits import (
    ARCHIVE_BYTES,
    ARCHIVE_DEPTH,
    ARCHIVE_ENTRIES,
    ARCHIVE_HEADER_BYTES,
    ARCHIVE_RATIO,
    ARCHIVE_RATIO_FREE_BYTES,
    VALUE_CHARS,
)
from benchctl.untrusted.text import visible_line

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
