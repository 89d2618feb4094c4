"""Rows of dataset files; each error names file, line and remedy."""

from pathlib import Path
from typing import Final, TypeVar

import msgspec

from benchctl.errors import DatasetError

R = TypeVar("R")
_FETCH_AGAIN: Final = (
    "the file is damaged or of another format: fetch it again with 'benchctl data fetch', or correct workload.path"
)


def read_bytes(path: Path) -> bytes:
    """The whole file; DatasetError where it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise DatasetError(
            f"{path} cannot be read: {error.strerror}; correct workload.path, or fetch the file with "
            "'benchctl data fetch'"
        ) from error


def read_jsonl_rows(path: Path, kind: type[R], remedy: str = _FETCH_AGAIN) -> list[tuple[int, R]]:
    """All rows of a JSON Lines file with their line numbers; blank lines are skipped.

    All rows are read, however few are needed, to notice damage anywhere in the file.
    """
    decoder = msgspec.json.Decoder(kind)
    rows: list[tuple[int, R]] = []
    for number, line in enumerate(read_bytes(path).split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            rows.append((number, decoder.decode(line)))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            beginning = line[:60].decode(errors="replace")
            raise damaged_row(path, number, f"{error}; the line begins {beginning!r}", remedy) from error
    return rows


def damaged_row(path: Path, number: int, problem: str, remedy: str = _FETCH_AGAIN) -> DatasetError:
    """The error for line ``number`` (from 1) of a dataset file."""
    return DatasetError(f"{path}:{number}: {problem}; {remedy}")
