"""Fetching a dataset file by a library, checked against its pinned sha256 and put in place in one step.

Files of the Hugging Face Hub come by ``huggingface_hub`` where it is installed, which resumes a broken download;
others, and without it all, by ``pooch``. Both take proxies from the environment.
"""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Protocol

import pooch

from benchctl.errors import DatasetError
from benchctl.workload.datasets.base import DATA_DIRECTORY_VARIABLE, DatasetFile, file_state, sha256_of
from benchctl.workload.datasets.hub import hub_file

_TIMEOUT_S: Final = (10.0, 30.0)
"""To connect, and between two pieces."""
_OF_HUB: Final = re.compile(r"https://huggingface\.co/datasets/([^/]+/[^/]+)/resolve/([0-9a-f]{40})/(.+)")


class Progress(Protocol):
    """A progress bar as tqdm's."""

    total: Any

    def update(self, num_bytes: int, /) -> object:
        """Count bytes that have come."""

    def reset(self) -> object:
        """Begin again at 0."""

    def close(self) -> object:
        """End it."""


def fetch_dataset(file: DatasetFile, directory: Path, progress: Progress) -> Path:
    """Fetch a file into the data directory unless it is there; return its path.

    A damaged file is replaced. Raises DatasetError, with the remedy, when it cannot be fetched whole.
    """
    target = file.path_in(directory)
    if file_state(file, directory, full=True) == "present":
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if (address := _OF_HUB.fullmatch(file.url)) and find_spec("huggingface_hub"):
            _check(file, hub_file(address[1], address[3], address[2], target.parent))
        else:
            _retrieve(file, target, progress)
    except OSError as error:
        if error.strerror is None:  # of the network: a request that failed has no error number
            raise _not_fetched(file, target, str(error) or type(error).__name__) from error
        raise DatasetError(
            f"{target} cannot be written: {error.strerror}; make room or set {DATA_DIRECTORY_VARIABLE} to another "
            "directory"
        ) from error
    return target


def _retrieve(file: DatasetFile, target: Path, progress: Progress) -> None:
    pooch.get_logger().setLevel("WARNING")  # it would print addresses and hashes
    try:
        pooch.retrieve(
            file.url,
            known_hash=f"sha256:{file.sha256}",
            fname=target.name,
            path=target.parent,
            downloader=pooch.HTTPDownloader(progressbar=progress, timeout=_TIMEOUT_S),
        )
    except ValueError as error:  # another sha256
        raise _not_fetched(file, target, str(error)) from error


def _check(file: DatasetFile, path: Path) -> None:
    """Raise DatasetError, and keep nothing, for other content than the pinned one."""
    if (digest := sha256_of(path)) != file.sha256:
        path.unlink()
        raise _not_fetched(file, path, f"its sha256 is {digest}, expected {file.sha256}; nothing was kept")


def _not_fetched(file: DatasetFile, target: Path, problem: str) -> DatasetError:
    reason = problem.partition("\n")[0]
    return DatasetError(
        f"{file.name} could not be fetched from {file.url}: {reason}. Run 'benchctl data fetch {file.name}' again, "
        f"or copy the file, which {file.source_page} describes, to {target}"
    )
