"""Fetching a dataset file: resumable, checked against its pinned sha256, put in place in one step.

A partial download is kept next to the target as ``<filename>.partial``; the next attempt continues it.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import httpx

from benchctl.errors import DatasetError
from benchctl.workload.datasets.files import DATA_DIRECTORY_VARIABLE, DatasetFile, file_state, sha256_of

Progress: TypeAlias = Callable[[int], None]
"""Takes the number of bytes fetched so far, after each piece."""

_TIMEOUT = httpx.Timeout(30.0, connect=10.0)


def fetch_dataset(file: DatasetFile, directory: Path, on_progress: Progress) -> Path:
    """Fetch a file into the data directory unless it is there; return its path.

    A damaged file is replaced. Raises DatasetError, with the remedy, when it cannot be fetched whole.
    """
    target = file.path_in(directory)
    if file_state(file, directory, full=True) == "present":
        return target
    partial = target.with_name(f"{target.name}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if _size(partial) < file.size_bytes:
            _download(file, partial, on_progress)
        _check(file, partial)
        partial.replace(target)
    except httpx.HTTPError as error:
        reason = (str(error) or type(error).__name__).partition("\n")[0]
        raise DatasetError(
            f"{file.name} could not be fetched from {file.url}: {reason}. The part fetched so far is kept; run "
            f"'benchctl data fetch {file.name}' again to continue, or, without a network, copy the file to {target}"
        ) from error
    except OSError as error:
        raise DatasetError(
            f"{target} cannot be written: {error.strerror}; make room or set {DATA_DIRECTORY_VARIABLE} to another "
            "directory"
        ) from error
    return target


def _download(file: DatasetFile, partial: Path, on_progress: Progress) -> None:
    """Append the rest of the file to ``partial``, from its beginning where the server cannot resume."""
    num_bytes = _size(partial)
    # Compressed transfer would make the offsets of a resumed download meaningless.
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={num_bytes}-"} if num_bytes else {})
    with httpx.stream("GET", file.url, headers=headers, timeout=_TIMEOUT, follow_redirects=True) as response:
        if response.status_code == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
            partial.unlink()  # longer than the published file: no attempt could continue it
        response.raise_for_status()
        resumes = response.status_code == httpx.codes.PARTIAL_CONTENT
        if not resumes:
            num_bytes = 0
        with partial.open("ab" if resumes else "wb") as stream:
            for piece in response.iter_raw():
                stream.write(piece)
                num_bytes += len(piece)
                on_progress(num_bytes)
                if num_bytes > file.size_bytes:
                    break
            stream.flush()
            os.fsync(stream.fileno())


def _check(file: DatasetFile, partial: Path) -> None:
    """Raise DatasetError for other content than the pinned one; a short file is kept for the next attempt."""
    size = _size(partial)
    if size < file.size_bytes:
        raise DatasetError(
            f"{file.url} ended after {size} of {file.size_bytes} bytes. The part fetched so far is kept; run "
            f"'benchctl data fetch {file.name}' again to continue"
        )
    digest = sha256_of(partial)
    if digest == file.sha256:
        return
    partial.unlink()
    raise DatasetError(
        f"{file.url} delivered {size} bytes with sha256 {digest}, expected {file.size_bytes} bytes with sha256 "
        f"{file.sha256}; nothing was kept. Run 'benchctl data fetch {file.name}' again, or get the file from "
        f"{file.source_page}"
    )


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0
