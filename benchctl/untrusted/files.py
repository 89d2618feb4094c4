"""Files of unknown origin: opened without following links out of a directory, and read within bounds.

A path below ``within`` is walked from that directory component by component by ``openat`` with ``O_NOFOLLOW``, so
that neither a link nor ``..`` leads out of it, and only a regular file is opened: a FIFO or a device would block.
The directory ``within`` itself is named by the user and may be a link.
"""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO, Final

from benchctl.errors import RecordError
from benchctl.untrusted.limits import DOCUMENT_BYTES

_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_FOLDER: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC


class OutsideError(RecordError):
    """An entry of a directory leads out of it, or is no regular file."""


def open_file(path: Path, *, within: Path) -> BinaryIO:
    """Open a regular file for reading without leaving the directory ``within``, which holds ``path``.

    Raises OutsideError when an entry on the way is a link, ``..`` or no regular file; OSError as ``open`` does.
    """
    parts = path.relative_to(within).parts
    if not parts or ".." in parts:
        raise OutsideError(f"{path} leads out of {within}; remove the entry")
    folder = os.open(within, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts[:-1]:
            folder, left = _open_at(folder, part, _FOLDER, path), folder
            os.close(left)
        handle = _open_at(folder, parts[-1], _FILE, path)
    finally:
        os.close(folder)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OutsideError(f"{path} is no regular file; remove the entry, or copy the directory again")
    return os.fdopen(handle, "rb")


def read_file(path: Path, *, within: Path, max_bytes: int = DOCUMENT_BYTES) -> bytes:
    """The content of a file as ``open_file`` opens it. Raises RecordError as well when it is over ``max_bytes``."""
    with open_file(path, within=within) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise RecordError(f"{path} is larger than {max_bytes / 1e6:.0f} MB, which no such file is; remove it")
    return content


def _open_at(folder: int, name: str, flags: int, path: Path) -> int:
    try:
        return os.open(name, flags, dir_fd=folder)
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.ENXIO} or (error.errno == errno.ENOTDIR and _is_link(name, folder)):
            raise OutsideError(
                f"{path}: {name} is a link or no regular file, and entries of a result directory are neither; "
                "put a copy of the file in its place"
            ) from error
        raise OSError(error.errno, error.strerror, str(path)) from error


def _is_link(name: str, folder: int) -> bool:
    return stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
