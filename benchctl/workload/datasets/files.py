"""Dataset files: their addresses, their locations on this machine, and the check that they are the pinned ones.

The data directory is $BENCHCTL_DATA_DIR, or the user's cache directory; a file is stored there as
``<folder>/<filename>``. Addresses name a revision, so their content never changes.
"""

import hashlib
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal, TypeAlias

import platformdirs

from benchctl.errors import DatasetError
from benchctl.profile.files import profile_directories
from benchctl.workload.datasets.prompt import SourceFile

DATA_DIRECTORY_VARIABLE: Final = "BENCHCTL_DATA_DIR"
_REMEDIES: Final = {
    "llm-mock-served.jsonl": "the commands under 'The cache' in docs/tasks/llm-mock.md make it in this directory"
}
"""The remedy for files that a profile of benchctl names and does not bring."""
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
    if explicit is not None:
        source = own_file(file.name, explicit, "correct it, or leave it out to use the data directory")
        is_pinned = sha256_of(source.path) == file.sha256
        return replace(source, dataset=file.label) if is_pinned else source
    path = file.path_in(directory)
    if not path.is_file():
        return None
    digest = sha256_of(path)
    if digest != file.sha256:
        raise DatasetError(
            f"{path} is not the pinned file of {file.name}: its sha256 is {digest}, expected {file.sha256}. Run "
            f"'benchctl data fetch {file.name}' to replace it, or name it in workload.path to use it as it is"
        )
    return SourceFile(path=path, kind=file.name, dataset=file.label)


def own_file(kind: str, path_text: str, remedy: str = "correct it") -> SourceFile:
    """A file of the user's, called after its sha256: at its path, else among the profiles that use it.

    Raises DatasetError where there is none.
    """
    direct = Path(path_text).expanduser()
    beside = (directory / direct for directory in profile_directories())
    path = next((path for path in (direct, *beside) if path.is_file()), None)
    if path is None:
        problem = "a directory" if direct.is_dir() else "not a file"
        remedy = _REMEDIES.get(direct.name, remedy)
        raise DatasetError(f"workload.path is {path_text}, which is {problem}; {remedy}")
    return SourceFile(path=path, kind=kind, dataset=f"{kind}/sha256-{sha256_of(path)[:16]}")
