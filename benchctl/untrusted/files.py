"""Files in a directory of unknown origin: opened, written and found without a link that leads out of it."""

import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, Final

from benchctl.errors import RecordError
from benchctl.untrusted import DOCUMENT_BYTES, LOG_BYTES, SEARCHED_ENTRIES

_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_APPENDED: Final = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
_KINDS: Final = {
    "a link": stat.S_ISLNK,
    "a file": stat.S_ISREG,
    "a directory": stat.S_ISDIR,
    "a FIFO": stat.S_ISFIFO,
    "a socket": stat.S_ISSOCK,
}


class OutsideError(RecordError):
    """An entry of a directory leads out of it, or is not a regular file."""


def inside(path: Path, within: Path) -> Path:
    """``path`` itself, an entry of the directory ``within`` or of one below it.

    Raises OutsideError when a folder on the way is a link, ``..`` or no directory; OSError where there is none.
    Not defended: a link that is put there afterwards.
    """
    names = path.parts[len(within.parts) :]  # ``relative_to`` takes as long as all the rest
    if ".." in names or path.parts[: len(within.parts)] != within.parts:
        raise OutsideError(f"{path} leads out of {within}; remove the entry")
    folder = within
    for name in names[:-1]:
        folder /= name
        mode = os.lstat(folder).st_mode
        if not stat.S_ISDIR(mode):
            raise irregular(folder, mode, "directory")
    return path


@contextmanager
def opened_folder(path: Path, *, within: Path) -> Iterator[int]:
    """A handle of the directory ``path``, which is ``within`` or below it; it stays the same where that is renamed.

    Raises as ``inside`` does.
    """
    inside(path / "entry", within)
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield handle
    finally:
        os.close(handle)


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
    size_bytes = stat_file(path, within=within).st_size
    if size_bytes > max_bytes:
        raise RecordError(
            f"{path} has {size_bytes / 1e6:.1f} MB, and no such file is larger than {max_bytes / 1e6:.0f} MB; "
            "restore it from a copy, or remove it"
        )
    return os.fdopen(os.open(path, _READ), "rb")


def read_file(path: Path, *, within: Path, max_bytes: int = DOCUMENT_BYTES) -> bytes:
    """The content of a file as ``open_file`` opens it."""
    with open_file(path, within=within, max_bytes=max_bytes) as file:
        return file.read()  # a bound here would be allocated at once


def stat_file(path: Path, *, within: Path) -> os.stat_result:
    """Size and times of a regular file. Raises as ``open_file`` does."""
    status = os.lstat(inside(path, within))
    if not stat.S_ISREG(status.st_mode):
        raise irregular(path, status.st_mode)
    return status


def is_there(path: Path, *, within: Path) -> bool:
    """True where ``path`` is an entry of any kind; anything but a regular file is refused once it is opened.

    Raises OutsideError when a folder on the way is none.
    """
    try:
        os.lstat(inside(path, within))
    except (FileNotFoundError, NotADirectoryError, UnicodeEncodeError):  # no file has a name that cannot be encoded
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
    inside(folder / "entry", within)
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if not files_only or entry.is_file(follow_symlinks=False))


def make_folder(path: Path, *, within: Path) -> None:
    """Create a directory, with those above it; one that exists stays.

    Raises OutsideError when an entry on the way is a link or no directory, OSError as ``mkdir`` does.
    """
    with suppress(FileNotFoundError):
        inside(path / "entry", within)  # what exists is a directory
    path.mkdir(parents=True, exist_ok=True)


def replace_file(path: Path, content: bytes, *, within: Path) -> None:
    """Replace a file in one step with ``content``, on disk before the name changes.

    Other processes may replace the same file meanwhile. Raises OutsideError when a folder on the way is a link,
    OSError naming ``path`` as ``write`` and ``rename`` do. A device is not replaced.
    """
    with suppress(OSError):  # such as of a file that is not there yet
        mode = path.lstat().st_mode
        if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
            raise irregular(path, mode)
    unnamed = f".{path.name}.{secrets.token_hex(4)}.partial"
    with opened_folder(path.parent, within=within) as folder:
        try:
            with os.fdopen(os.open(unnamed, _NEW, 0o666, dir_fd=folder), "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(unnamed, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error
        finally:
            with suppress(OSError):  # it has its name
                os.unlink(unnamed, dir_fd=folder)


def open_to_append(path: Path, *, within: Path) -> BinaryIO:
    """Open a regular file at its end, or a new one.

    Raises OutsideError and OSError as ``open_file`` does.
    """
    with opened_folder(path.parent, within=within) as folder:
        with suppress(FileNotFoundError):
            stat_file(path, within=within)
        try:
            return os.fdopen(os.open(path.name, _APPENDED, 0o666, dir_fd=folder), "ab")
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error


def move_entry(path: Path, target: Path, *, within: Path) -> None:
    """Give an entry another name within the directory; a link moves itself. Raises as ``replace_file`` does."""
    inside(path, within).rename(inside(target, within))


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
