"""Dataset files: their addresses, their locations on this machine, and the check that they are the pinned ones.

The data directory is $BENCHCTL_DATA_DIR, or the user's cache directory; a file is stored there as
``<folder>/<filename>``. Addresses name a revision, so their content never changes.
"""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

import platformdirs

from benchctl.errors import DatasetError
from benchctl.workload.datasets.prompt import SourceFile

DATA_DIRECTORY_VARIABLE: Final = "BENCHCTL_DATA_DIR"
FileState: TypeAlias = Literal["present", "missing", "damaged"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetFile:
    """One published file, pinned by its sha256."""

    name: str
    """As ``workload.dataset`` names it."""
    label: str
    """The source that a request set made from it records."""
    folder: str
    filename: str
    url: str
    sha256: str
    size_bytes: int
    licence: str
    source_page: str

    def path_in(self, directory: Path) -> Path:
        """Its location in a data directory."""
        return directory / self.folder / self.filename


def data_directory() -> Path:
    """$BENCHCTL_DATA_DIR, or ``data`` in the user's cache directory of benchctl."""
    directory = os.environ.get(DATA_DIRECTORY_VARIABLE)
    return Path(directory).expanduser() if directory else Path(platformdirs.user_cache_dir("benchctl")) / "data"


def in_data_directory(path: str) -> Path:
    """A path as it is if it exists, else the one of that name below the data directory."""
    direct = Path(path).expanduser()
    return direct if direct.exists() else data_directory() / direct


def sha256_of(path: Path) -> str:
    """Hex sha256 of a file's content. Raises DatasetError when it cannot be read."""
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise DatasetError(
            f"{path} cannot be read: {error.strerror}; correct the path or its permissions"
        ) from error


def file_state(file: DatasetFile, directory: Path, *, full: bool) -> FileState:
    """The state of a file, judged by its size, or with ``full`` by its sha256."""
    path = file.path_in(directory)
    if not path.is_file():
        return "missing"
    is_whole = sha256_of(path) == file.sha256 if full else path.stat().st_size == file.size_bytes
    return "present" if is_whole else "damaged"


def find_source(file: DatasetFile, explicit: str | None, directory: Path) -> SourceFile | None:
    """The file that a workload reads: ``explicit`` if it is set, else the pinned one of the data directory.

    None when the data directory lacks it. An explicit file may have any content; unless it is the pinned one,
    its dataset is named after its hash. Raises DatasetError for an explicit path that does not exist, and for a
    file of the data directory that is not the pinned one.
    """
    path = Path(explicit).expanduser() if explicit is not None else file.path_in(directory)
    if not path.is_file():
        if explicit is None:
            return None
        raise DatasetError(
            f"workload.path is {explicit}, which is not a file; correct it, or leave it out to use the data "
            "directory"
        )
    digest = sha256_of(path)
    if digest == file.sha256:
        return SourceFile(path=path, kind=file.name, dataset=file.label)
    if explicit is None:
        raise DatasetError(
            f"{path} is not the pinned file of {file.name}: its sha256 is {digest}, expected {file.sha256}. Run "
            f"'benchctl data fetch {file.name}' to replace it, or name it in workload.path to use it as it is"
        )
    return SourceFile(path=path, kind=file.name, dataset=f"{file.name}/sha256-{digest[:16]}")
