"""Files that the user names: read within bounds, decoded, and refused in one line where they are not as expected.

A reader adds the remedy, and raises the kind of error that its files deserve:

    try:
        document = read_json(path)
    except UnreadableError as error:
        raise UsageError(f"{error}; name a model's own config.json") from error

Files inside a directory of unknown origin are opened by ``files`` instead.
"""

import csv
import json
import os
import re
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, Final

from benchctl.errors import UsageError
from benchctl.untrusted.decoding import DECODING_ERRORS, decoding_problem
from benchctl.untrusted.limits import DOCUMENT_BYTES, LINE_BYTES, LOG_BYTES

MOST_DIGITS: Final = 300
"""Digits of a whole number, which fits into a double."""
_SURROGATE: Final = re.compile(r"\\u[dD][89a-fA-F]")
_BOM: Final = b"\xef\xbb\xbf"
_MEGA: Final = 1 << 20


class UnreadableError(UsageError):
    """A file is not what it should be. The text names place and problem; its reader adds the remedy."""


def read_bytes(path: Path, max_bytes: int = DOCUMENT_BYTES) -> bytes:
    """The whole content. Raises UnreadableError where it cannot be read, or is over ``max_bytes``."""
    try:
        with path.open("rb") as file:
            content = b"".join(_pieces(file, max_bytes + 1))
    except OSError as error:
        raise _cannot_be_read(path, error) from error
    if len(content) > max_bytes:
        raise UnreadableError(f"{path}: larger than {max_bytes // _MEGA} MiB, the limit for it")
    return content


def _pieces(file: BinaryIO, num_bytes: int) -> Iterator[bytes]:
    """At most so many bytes; a regular file in one piece, for which no more memory is taken than it needs."""
    status = os.fstat(file.fileno())
    size = status.st_size + 1 if stat.S_ISREG(status.st_mode) else _MEGA
    while piece := file.read(min(size, num_bytes)):
        yield piece
        num_bytes -= len(piece)


def read_text(path: Path, max_bytes: int = DOCUMENT_BYTES) -> str:
    """The whole content as UTF-8 without a byte order mark. Raises UnreadableError."""
    return utf8_text(read_bytes(path, max_bytes), path)


def utf8_text(content: bytes, where: object) -> str:
    """``content`` as text without a byte order mark. Raises UnreadableError that names ``where``."""
    try:
        return content.removeprefix(_BOM).decode()
    except UnicodeDecodeError as error:
        raise UnreadableError(f"{where}: cannot be read: {decoding_problem(error)}") from error


def read_json(path: Path, max_bytes: int = DOCUMENT_BYTES) -> Any:
    """The JSON document in a file, as ``json_value`` reads it. Raises UnreadableError."""
    return json_value(read_text(path, max_bytes), path)


def json_value(text: str, where: object) -> Any:
    """JSON as Python writes it, with NaN and Infinity; every number is in the range of a double or infinite.

    Raises UnreadableError that names ``where``, also for half a pair of surrogates, which no output can show.
    """
    try:
        value = json.loads(text, parse_int=_whole_number)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except DECODING_ERRORS as error:
        raise UnreadableError(f"{where}: cannot be read as JSON: {decoding_problem(error)}") from error
    return value


def _whole_number(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"a number has {len(digits)} digits")
    return int(digits)


def read_lines(path: Path, max_bytes: int = LOG_BYTES) -> Iterator[tuple[int, bytes]]:
    """The lines of a file, one at a time, with their numbers from 1 and their ends.

    Raises UnreadableError where the file cannot be read, a line is over ``LINE_BYTES``, or all over ``max_bytes``.
    """
    num_bytes = 0
    try:
        with path.open("rb") as file:
            for number in count(1):
                line = file.readline(LINE_BYTES + 1)
                if not line:
                    return
                num_bytes += len(line)
                if len(line) > LINE_BYTES:
                    raise UnreadableError(f"{path}:{number}: the line is longer than {LINE_BYTES // _MEGA} MiB")
                if num_bytes > max_bytes:
                    raise UnreadableError(
                        f"{path}:{number}: the file is larger than {max_bytes // _MEGA} MiB, the limit for it"
                    )
                yield number, line
    except OSError as error:
        raise _cannot_be_read(path, error) from error


def read_csv(path: Path, max_bytes: int = LOG_BYTES) -> Iterator[tuple[int, list[str]]]:
    """The rows of a CSV file of UTF-8 text, one at a time, each with the number of its last line; empty lines are
    left out. Raises UnreadableError as ``read_lines`` does, and for what is not CSV.
    """
    csv.field_size_limit(min(LINE_BYTES, sys.maxsize))
    rows = csv.reader(_text_lines(path, max_bytes), strict=True)
    while True:
        try:
            row = next(rows, None)
        except csv.Error as error:
            raise UnreadableError(f"{path}:{rows.line_num}: cannot be read as CSV: {error}") from error
        if row is None:
            return
        if row:
            yield rows.line_num, row


def read_csv_records(path: Path, max_bytes: int = LOG_BYTES) -> Iterator[tuple[int, dict[str, str]]]:
    """The rows below the header by name of column, with their line numbers; see ``read_csv`` and ``whole_rows``."""
    rows = read_csv(path, max_bytes)
    _, names = next(rows, (1, []))
    for number, row in whole_rows(rows, names, path):
        yield number, dict(zip(names, row, strict=True))


def whole_rows(
    rows: Iterable[tuple[int, list[str]]], names: Sequence[str], path: Path
) -> Iterator[tuple[int, list[str]]]:
    """The rows with a value for each name, an empty text where they are shorter.

    Raises UnreadableError for a row with more values than names.
    """
    for number, row in rows:
        if len(row) > len(names):
            raise UnreadableError(f"{path}:{number}: {len(row)} values under {len(names)} names")
        yield number, [*row, *[""] * (len(names) - len(row))]


def _text_lines(path: Path, max_bytes: int) -> Iterator[str]:
    for number, line in read_lines(path, max_bytes):
        yield utf8_text(line, f"{path}:{number}")


def _cannot_be_read(path: Path, error: OSError) -> UnreadableError:
    return UnreadableError(f"{path}: cannot be read: {error.strerror or error}")
