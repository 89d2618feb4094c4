"""Files of unknown origin: opened without following links out of a directory, and read within bounds.

Files that are written into a directory of unknown origin: never through a link that a stranger put there.
Files that are found in a directory of unknown origin: each a regular file of it, and found in bounded time.
"""

import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, Final, TypeAlias

from benchctl.errors import BenchctlError, RecordError
from benchctl.untrusted.limits import DOCUMENT_BYTES, LINE_BYTES, LOG_BYTES, SEARCHED_ENTRIES

_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_FOLDER: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC
_KINDS: Final = {
    "a link": stat.S_ISLNK,
    "a file": stat.S_ISREG,
    "a directory": stat.S_ISDIR,
    "a FIFO": stat.S_ISFIFO,
    "a socket": stat.S_ISSOCK,
}
_NO_FILE: Final = {errno.ELOOP, errno.ENXIO, errno.ENOTDIR}
"""Errors of ``openat`` at a link, at a socket or a FIFO, and at anything else where a directory must be."""


class OutsideError(RecordError):
    """An entry of a directory leads out of it, or is not a regular file."""


@contextmanager
def opened_folder(path: Path, *, within: Path) -> Iterator[int]:
    """A handle of the directory ``path``, which is ``within`` or below it.

    Raises OutsideError when an entry on the way is a link, ``..`` or no directory; OSError as ``open`` does.
    """
    names = path.parts[len(within.parts) :]  # ``relative_to`` takes as long as all the rest
    if ".." in names or path.parts[: len(within.parts)] != within.parts:
        raise OutsideError(f"{path} leads out of {within}; remove the entry")
    folder, num_left = os.open(within, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), len(names)
    try:
        for name in names:
            num_left -= 1
            folder, left = _open_at(name, _FOLDER, folder, path, num_left), folder
            os.close(left)
        yield folder
    finally:
        os.close(folder)


def open_entry(path: Path, flags: int, folder: int) -> int:
    """Open the entry ``path`` of the open directory that holds it. Raises OutsideError as ``open_file`` does."""
    return _open_at(path.name, flags, folder, path)


def _open_at(name: str, flags: int, folder: int, path: Path, num_below: int = 0) -> int:
    """Open an entry of an open directory; ``path`` is the entry, or so many levels below it."""
    try:
        return os.open(name, flags, 0o666, dir_fd=folder)
    except OSError as error:
        entry = path.parents[num_below - 1] if num_below else path
        if error.errno in _NO_FILE:
            mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
            raise irregular(entry, mode, "directory" if flags & os.O_DIRECTORY else "file") from error
        raise OSError(error.errno, error.strerror, str(path)) from error


def irregular(path: Path, mode: int, expected: str = "file") -> OutsideError:
    """The refusal of an entry by its mode, where a ``file`` or a ``directory`` is expected."""
    kind = next((kind for kind, is_kind in _KINDS.items() if is_kind(mode)), "a device")
    return OutsideError(
        f"{path} is {kind}, not a {expected} of this directory; put a copy of the {expected} in its place"
    )


def open_file(path: Path, *, within: Path, max_bytes: int = LOG_BYTES) -> BufferedReader:
    """Open a regular file for reading without leaving the directory ``within``, which holds ``path``.

    Raises OutsideError when an entry on the way is a link, ``..`` or no regular file, RecordError when the file is
    over ``max_bytes``, OSError as ``open`` does.
    """
    with opened_folder(path.parent, within=within) as folder:
        handle = open_entry(path, _FILE, folder)
    status = os.fstat(handle)
    is_regular = stat.S_ISREG(status.st_mode)
    if not is_regular or status.st_size > max_bytes:
        os.close(handle)
        raise _oversized(path, status.st_size, max_bytes) if is_regular else irregular(path, status.st_mode)
    return os.fdopen(handle, "rb")


def read_file(path: Path, *, within: Path, max_bytes: int = DOCUMENT_BYTES) -> bytes:
    """The content of a file as ``open_file`` opens it."""
    with open_file(path, within=within, max_bytes=max_bytes) as file:
        return file.read()  # a bound here would be allocated at once


def read_head(path: Path, num_bytes: int) -> bytes:
    """The first bytes of a regular file that the user named, which may be a link; empty for anything else.

    Raises OSError as ``open`` does.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO would block
    with os.fdopen(handle, "rb") as file:
        return file.read(num_bytes) if stat.S_ISREG(os.fstat(handle).st_mode) else b""


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
        raise irregular(path, status.st_mode)
    return status


def is_there(path: Path, *, within: Path) -> bool:
    """True where ``path`` is an entry of any kind; anything but a regular file is refused once it is opened.

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


def _oversized(path: Path, size_bytes: int, max_bytes: int) -> RecordError:
    return RecordError(
        f"{path} has {size_bytes / 1e6:.1f} MB, and no such file is larger than {max_bytes / 1e6:.0f} MB; "
        "restore it from a copy, or remove it"
    )


Fence: TypeAlias = Callable[[], None]
"""Called at the last moment before a file appears, with its folder open; raises where it must not any more."""
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_APPENDED: Final = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def make_folder(path: Path, *, within: Path) -> None:
    """Create a directory, with those above it; one that exists stays.

    Raises OutsideError when an entry on the way is a link or no directory, OSError as ``mkdir`` does.
    """
    within.mkdir(parents=True, exist_ok=True)
    above = within
    for name in path.relative_to(within).parts:
        with opened_folder(above, within=within) as folder, suppress(FileExistsError):
            os.mkdir(name, dir_fd=folder)
        above /= name
    with opened_folder(path, within=within):
        pass  # what existed is a directory


def replace_file(
    path: Path, content: bytes, *, within: Path, fence: Fence | None = None, has_rivals: bool = False
) -> None:
    """Replace a file in one step with ``content``, on disk before the name changes.

    ``fence`` may refuse at the last moment; by then the folder is open, so that what passes it goes into the folder
    of that moment and not into one that took its name since. ``has_rivals`` where other processes may replace the
    same file at the same time. Raises OutsideError when a folder on the way is a link, OSError naming ``path`` as
    ``write`` and ``rename`` do, and what ``fence`` raises.
    """
    # Another process may be about to replace the same file: neither takes the other's part for one left by a crash.
    is_alone = fence is None and not has_rivals
    partial = f".{path.name}.partial" if is_alone else f".{path.name}.{secrets.token_hex(4)}.partial"
    with opened_folder(path.parent, within=within) as folder:
        try:
            with suppress(FileNotFoundError):  # left by a crash, or a stranger's link
                os.unlink(partial, dir_fd=folder)
            with os.fdopen(os.open(partial, _NEW, 0o666, dir_fd=folder), "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            if fence is not None:
                fence()
            os.replace(partial, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError as error:
            with suppress(OSError):
                os.unlink(partial, dir_fd=folder)
            raise OSError(error.errno, error.strerror, str(path)) from error
        except BenchctlError:  # the fence refuses
            with suppress(OSError):
                os.unlink(partial, dir_fd=folder)
            raise


def open_to_append(path: Path, *, within: Path, fence: Fence | None = None) -> BinaryIO:
    """Open a regular file at its end, or a new one; ``fence`` as for ``replace_file``.

    Raises OutsideError and OSError as ``open_file`` does.
    """
    with opened_folder(path.parent, within=within) as folder:
        if fence is not None:
            fence()
        handle = open_entry(path, _APPENDED, folder)
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        raise irregular(path, mode)
    os.set_blocking(handle, True)  # not blocking was for a FIFO
    return os.fdopen(handle, "ab")


def move_entry(path: Path, target: Path, *, within: Path) -> None:
    """Give an entry another name within the directory; a link moves itself. Raises as ``replace_file`` does."""
    with opened_folder(path.parent, within=within) as source, opened_folder(target.parent, within=within) as folder:
        os.rename(path.name, target.name, src_dir_fd=source, dst_dir_fd=folder)


def files_below(directory: Path, name: str) -> list[Path]:
    """Paths of the files called ``name`` in a directory and all below it, in order. Links are not followed.

    Raises OutsideError where an entry of that name is not a regular file, RecordError where there are too many to
    search.
    """
    paths: list[Path] = []
    num_entries = 0
    for folder, folders, files in os.walk(directory):
        num_entries += len(folders) + len(files)
        if num_entries > SEARCHED_ENTRIES:
            raise RecordError(
                f"{directory} has more than {SEARCHED_ENTRIES:,} entries, too many to look for {name}; name the "
                "directory of the results itself"
            )
        if name in files or any(each == name and (Path(folder) / each).is_symlink() for each in folders):
            paths.append(Path(folder) / name)
    require_files(paths, within=directory)
    return sorted(paths)


def require_files(paths: Sequence[Path], *, within: Path) -> None:
    """Raise OutsideError at the first path that is there and no regular file of the directory ``within``."""
    for path in paths:
        try:
            stat_file(path, within=within)
        except FileNotFoundError:
            continue
