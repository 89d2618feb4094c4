"""Files of unknown origin: opened without following links out of a directory, and read within bounds.

A path below ``within`` is walked from that directory component by component by ``openat`` with ``O_NOFOLLOW``, so
that neither a link nor ``..`` leads out of it, and only a regular file is opened: a FIFO or a device would block.
The directory ``within`` itself is named by the user and may be a link. ``writing`` holds the counterparts that
write.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, Final

from benchctl.errors import RecordError
from benchctl.untrusted.limits import DOCUMENT_BYTES, LINE_BYTES, LOG_BYTES

_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_FOLDER: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC
_NO_FILE: Final = {errno.ELOOP, errno.ENXIO, errno.ENOTDIR}
"""Errors of ``openat`` at a link, at a socket or a FIFO, and at what is no directory where one is needed."""


class OutsideError(RecordError):
    """An entry of a directory leads out of it, or is no regular file."""


@contextmanager
def opened_folder(path: Path, *, within: Path) -> Iterator[int]:
    """A handle of the directory ``path``, which is ``within`` or below it.

    Raises OutsideError when an entry on the way is a link, ``..`` or no directory; OSError as ``open`` does.
    """
    parts = path.relative_to(within).parts
    if ".." in parts:
        raise OutsideError(f"{path} leads out of {within}; remove the entry")
    folder = os.open(within, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts:
            folder, left = open_entry(part, _FOLDER, folder, path), folder
            os.close(left)
        yield folder
    finally:
        os.close(folder)


def open_entry(name: str, flags: int, folder: int, path: Path) -> int:
    """Open one entry of an open folder; ``path`` is for messages. Raises OutsideError as ``open_file`` does."""
    try:
        return os.open(name, flags, 0o666, dir_fd=folder)
    except OSError as error:
        if error.errno in _NO_FILE:
            raise OutsideError(
                f"{path}: {name} is a link or no regular file, and entries of a result directory are neither; "
                "put a copy of the file in its place"
            ) from error
        raise OSError(error.errno, error.strerror, str(path)) from error


def open_file(path: Path, *, within: Path, max_bytes: int = LOG_BYTES) -> BufferedReader:
    """Open a regular file for reading without leaving the directory ``within``, which holds ``path``.

    Raises OutsideError when an entry on the way is a link, ``..`` or no regular file, RecordError when the file is
    over ``max_bytes``, OSError as ``open`` does.
    """
    with opened_folder(path.parent, within=within) as folder:
        handle = open_entry(path.name, _FILE, folder, path)
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode) or status.st_size > max_bytes:
        os.close(handle)
        raise _irregular(path) if not stat.S_ISREG(status.st_mode) else _oversized(path, status.st_size, max_bytes)
    return os.fdopen(handle, "rb")


def read_file(path: Path, *, within: Path, max_bytes: int = DOCUMENT_BYTES) -> bytes:
    """The content of a file as ``open_file`` opens it."""
    with open_file(path, within=within, max_bytes=max_bytes) as file:
        return file.read()  # a bound here would be allocated at once


def lines_of(file: BinaryIO, path: Path, first_line: int = 1) -> Iterator[bytes]:
    """The lines of an open file, with their line feeds. Raises RecordError at a line over ``LINE_BYTES``, which is
    not read to its end.
    """
    number = first_line
    while line := file.readline(LINE_BYTES + 1):
        if len(line) > LINE_BYTES:
            raise RecordError(
                f"{path}:{number}: the line is longer than {LINE_BYTES / 1e6:.0f} MB, which no record is; "
                "restore the file from a copy"
            )
        yield line
        number += 1


def stat_file(path: Path, *, within: Path) -> os.stat_result:
    """Size and times of a regular file. Raises as ``open_file`` does."""
    with opened_folder(path.parent, within=within) as folder:
        status = os.stat(path.name, dir_fd=folder, follow_symlinks=False)
    if not stat.S_ISREG(status.st_mode):
        raise _irregular(path)
    return status


def is_there(path: Path, *, within: Path) -> bool:
    """True where ``path`` is an entry of any kind; what is no regular file is refused once it is opened.

    Raises OutsideError when a folder on the way is none.
    """
    try:
        with opened_folder(path.parent, within=within) as folder:
            os.stat(path.name, dir_fd=folder, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def is_file(path: Path, *, within: Path) -> bool:
    """True where ``path`` is a regular file to which no link leads from ``within``."""
    try:
        stat_file(path, within=within)
    except (OSError, OutsideError):
        return False
    return True


def entry_names(folder: Path, *, within: Path, files_only: bool = False) -> list[str]:
    """Sorted names of the entries of a folder, or of its regular files alone. Raises as ``opened_folder`` does."""
    with opened_folder(folder, within=within) as handle, os.scandir(handle) as entries:
        return sorted(entry.name for entry in entries if not files_only or entry.is_file(follow_symlinks=False))


def _irregular(path: Path) -> OutsideError:
    return OutsideError(f"{path} is no regular file; remove the entry, or copy the directory again")


def _oversized(path: Path, size_bytes: int, max_bytes: int) -> RecordError:
    return RecordError(
        f"{path} has {size_bytes / 1e6:.1f} MB, and no such file is larger than {max_bytes / 1e6:.0f} MB; "
        "restore it from a copy, or remove it"
    )
