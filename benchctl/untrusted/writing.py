"""Files that are written into a directory of unknown origin: never through a link that a stranger put there.

As in ``files``, a path below ``within`` is walked by ``openat`` without links. A file is replaced by renaming a new
one, which replaces a link itself and not its target.
"""

import os
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final, TypeAlias

from benchctl.errors import BenchctlError
from benchctl.untrusted.files import irregular, open_entry, opened_folder

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
