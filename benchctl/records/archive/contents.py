"""The files of a result directory that travel: everything but secrets, copies and what a process is writing."""

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from benchctl.errors import RecordError
from benchctl.records.files import is_name
from benchctl.untrusted.files import opened_folder
from benchctl.untrusted.limits import ARCHIVE_DEPTH, ARCHIVE_ENTRIES

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
