"""Rows of dataset files; each error names file, line and remedy."""

from pathlib import Path
from typing import Annotated, Final, TypeAlias, TypeVar

import msgspec

from benchctl.errors import DatasetError
from benchctl.untrusted import PROMPT_TOKENS, ROWS_BYTES
from benchctl.untrusted.reading import DECODING_ERRORS, UnreadableError, decoding_problem, read_bytes, read_lines

Length: TypeAlias = Annotated[int, msgspec.Meta(le=PROMPT_TOKENS)]
"""Tokens of a prompt or an output; those below 1 have messages of their own."""
TimestampMs: TypeAlias = Annotated[float, msgspec.Meta(ge=-4e12, le=4e12)]
"""Milliseconds, from a beginning of the file's own or since 1970 until 2096: differences fit into 64 bits of ns."""
ArrivalNs: TypeAlias = Annotated[int, msgspec.Meta(le=1 << 62)]
R = TypeVar("R")
_FETCH_AGAIN: Final = (
    "the file is damaged or of another format: fetch it again with 'benchctl data fetch', or correct workload.path"
)


def read_file(path: Path) -> bytes:
    """The whole file; DatasetError where it cannot be read or is too large."""
    try:
        return read_bytes(path, ROWS_BYTES)
    except UnreadableError as error:
        raise unreadable(error) from error


def unreadable(error: UnreadableError) -> DatasetError:
    """The error for a dataset file that cannot be read."""
    return DatasetError(f"{error}; {_FETCH_AGAIN}")


def read_jsonl_rows(path: Path, kind: type[R], remedy: str = _FETCH_AGAIN) -> list[tuple[int, R]]:
    """All rows of a JSON Lines file with their line numbers; blank lines are skipped.

    All rows are read, however few are needed, to notice damage anywhere in the file.
    """
    decoder = msgspec.json.Decoder(kind)
    rows: list[tuple[int, R]] = []
    try:
        for number, line in read_lines(path, ROWS_BYTES):
            if not line.strip():
                continue
            try:
                rows.append((number, decoder.decode(line)))
            except DECODING_ERRORS as error:
                beginning = line[:60].rstrip(b"\r\n").decode(errors="replace")
                problem = f"{decoding_problem(error)}; the line begins {beginning!r}"
                raise damaged_row(path, number, problem, remedy) from error
    except UnreadableError as error:
        raise unreadable(error) from error
    return rows


def damaged_row(path: Path, number: int, problem: str, remedy: str = _FETCH_AGAIN) -> DatasetError:
    """The error for line ``number`` (from 1) of a dataset file."""
    return DatasetError(f"{path}:{number}: {problem}; {remedy}")
