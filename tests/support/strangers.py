"""Result directories of a stranger: entries that lead elsewhere, and a check that nothing elsewhere was touched."""

import os
import shutil
import signal
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Final

SECRET: Final = "what only its owner may read"
"""Content of every file outside."""


def surround(root: Path) -> None:
    """Put beside a result directory what it must not lead to: files, a directory, a FIFO."""
    outside = root.parent / "outside"
    (outside / "folder").mkdir(parents=True)
    (outside / "file").write_text(SECRET)
    (outside / "folder" / "server.log").write_text(SECRET)
    os.mkfifo(outside / "pipe")
    shutil.copytree(root, outside / "copy")


def _linked(target: str) -> Callable[[Path, Path], None]:
    return lambda path, root: path.symlink_to(root.parent / "outside" / target)


def _socket(path: Path, _root: Path) -> None:
    with chdir(path.parent), socket.socket(socket.AF_UNIX) as bound:  # the path may be too long for a socket
        bound.bind(path.name)


KINDS: Final[dict[str, Callable[[Path, Path], None]]] = {
    "a link to a file like it": lambda path, root: path.symlink_to(
        root.parent / "outside" / "copy" / path.relative_to(root)
    ),
    "a link to another file": _linked("file"),
    "a link to a folder": _linked("folder"),
    "a link to a FIFO": _linked("pipe"),
    "a link to nothing": _linked("nothing"),
    "a link to itself": lambda path, _: path.symlink_to(path.name),
    "a link to a device": lambda path, _: path.symlink_to("/dev/zero"),
    "a FIFO": lambda path, _: os.mkfifo(path),
    "a socket": _socket,
    "a directory": lambda path, _: path.mkdir(),
}
"""What a stranger may put in the place of an entry, by what it is."""


def replace_entry(root: Path, name: str, kind: str) -> None:
    """Put an entry of that kind in the place of ``root / name``."""
    path = root / name
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    KINDS[kind](path, root)


def tree_of(directory: Path, without: Path) -> list[tuple[str, int, int, bytes]]:
    """Every entry below a directory, but those below ``without``: its name, mode, time of change and content."""
    entries = []
    for folder, folders, files in os.walk(directory):
        folders[:] = sorted(name for name in folders if Path(folder) / name != without)
        for path in (Path(folder) / name for name in sorted([*folders, *files])):
            status = path.lstat()
            content = path.read_bytes() if stat.S_ISREG(status.st_mode) else b""
            changed_ns = status.st_mtime_ns if path != directory else 0
            entries.append((str(path), status.st_mode, changed_ns, content))
    return entries


def files_with(directory: Path, text: str) -> list[Path]:
    """The regular files below a directory, without links, that hold ``text``."""
    paths = (Path(folder) / name for folder, _, names in os.walk(directory) for name in names)
    return [path for path in paths if stat.S_ISREG(path.lstat().st_mode) and text.encode() in path.read_bytes()]


class TookTooLongError(BaseException):
    """The time is up; no reader takes it for an error of its file."""


@contextmanager
def within_seconds(limit_s: float) -> Iterator[None]:
    """Raise TookTooLongError inside once the time is up, also where a system call waits."""

    def end(*_: object) -> None:
        raise TookTooLongError(f"not done in {limit_s:g} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
