"""Fetching a dataset file: resumable, checked against its pinned sha256, put in place in one step.

What has come is kept beside the target as ``<filename>.partial``; the next attempt asks for the rest.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import httpx

from benchctl.errors import DatasetError
from benchctl.workload.datasets.files import DATA_DIRECTORY_VARIABLE, DatasetFile, file_state, sha256_of

Progress: TypeAlias = Callable[[int], None]
"""Told the number of bytes that are there, after each piece."""

_TIMEOUT = httpx.Timeout(30.0, connect=10.0)


def fetch_dataset(file: DatasetFile, directory: Path, on_progress: Progress) -> Path:
    """Fetch a file into the data directory unless it is there; return its path.

    A damaged file is replaced. Raises DatasetError when it cannot be had whole, naming the way out.
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
            f"{file.name} could not be fetched from {file.url}: {reason}. What has come is kept; run "
            f"'benchctl data fetch {file.name}' again to go on, or, without a network, copy the file to {target}"
        ) from error
    except OSError as error:
        raise DatasetError(
            f"{target} cannot be written: {error.strerror}; make room or set {DATA_DIRECTORY_VARIABLE} to another "
            "directory"
        ) from error
    return target


def _download(file: DatasetFile, partial: Path, on_progress: Progress) -> None:
    """Append the rest of the file to ``partial``, from its beginning where the server cannot resume."""
    have = _size(partial)
    # Compressed transfer would make the offsets of a resumed download meaningless.
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    with httpx.stream("GET", file.url, headers=headers, timeout=_TIMEOUT, follow_redirects=True) as response:
        if response.status_code == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
            partial.unlink()  # it is longer than the file there, so that no attempt could ever go on from it
        response.raise_for_status()
        resumes = response.status_code == httpx.codes.PARTIAL_CONTENT
        if not resumes:
            have = 0
        with partial.open("ab" if resumes else "wb") as stream:
            for piece in response.iter_raw():
                stream.write(piece)
                have += len(piece)
                on_progress(have)
                if have > file.size_bytes:
                    break
            stream.flush()
            os.fsync(stream.fileno())


def _check(file: DatasetFile, partial: Path) -> None:
    """Refuse what is not the pinned content: a beginning is kept for the next attempt, all else is removed."""
    size = _size(partial)
    if size < file.size_bytes:
        raise DatasetError(
            f"{file.url} ended after {size} of {file.size_bytes} bytes. What has come is kept; run "
            f"'benchctl data fetch {file.name}' again to go on"
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
