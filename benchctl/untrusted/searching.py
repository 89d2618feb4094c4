"""Files that are found in a directory of unknown origin: each a regular file of it, and found in bounded time."""

import os
from collections.abc import Sequence
from pathlib import Path

from benchctl.errors import RecordError
from benchctl.untrusted.files import stat_file
from benchctl.untrusted.limits import SEARCHED_ENTRIES


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
