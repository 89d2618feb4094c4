"""Files that the user names: read within bounds, decoded, refused in one line where they are not as expected."""

import csv
import json
import re
import struct
import sys
import zlib
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml

from benchctl.errors import UsageError
from benchctl.untrusted import DOCUMENT_BYTES, LINE_BYTES, LOG_BYTES, PROFILE_BYTES, VALUE_CHARS
from benchctl.untrusted.text import visible_line

DECODING_ERRORS: Final[tuple[type[Exception], ...]] = (
    ValueError,  # with UnicodeDecodeError, json.JSONDecodeError and Python's limit of digits
    RecursionError,
    OverflowError,
    EOFError,
    msgspec.MsgspecError,
    csv.Error,
    struct.error,
    zlib.error,
)
"""Caught around a decoder alone: around more, they would hide mistakes of ours.
Readers of YAML add ``yaml.YAMLError``."""


_PATTERN: Final = re.compile(r"Expected `str` matching regex '.*'(?= - at )")
_FIELD: Final = re.compile(r" - at `\$\.([\w.\[\]]+)`")


def decoding_problem(error: Exception) -> str:
    """One line on ``error`` for a message that names the file."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return f"it is not UTF-8 text (byte {error.start}: {error.reason})"
    problem = next(iter(str(error).splitlines()), "") or type(error).__name__
    return _PATTERN.sub("it names no file of the directory", problem)


def field_problem(error: Exception, document: Mapping[str, object]) -> str:
    """``decoding_problem``, with the value of the field that does not fit its type or its law."""
    problem = decoding_problem(error)
    field = _FIELD.search(problem)
    if field is None:
        return problem
    value: Any = document
    try:
        for step in re.findall(r"\w+", field[1]):
            value = value[int(step)] if isinstance(value, list) else value[step]
    except (LookupError, TypeError, ValueError):  # a key that is no word
        return problem
    name, text = field[1].removesuffix("[...]"), json.dumps(value, ensure_ascii=False)
    return f"{name} is {visible_line(text, VALUE_CHARS)}: {problem}"


MOST_DIGITS: Final = 300
"""Digits of a whole number, which fits into a double."""
_SURROGATE: Final = re.compile(r"\\u[dD][89a-fA-F]")
_BOM: Final = b"\xef\xbb\xbf"
_MEGA: Final = 1 << 20


class UnreadableError(UsageError):
    """A file is not what it should be. The text names place and problem; its reader adds the remedy."""


def read_bytes(path: Path, max_bytes: int = DOCUMENT_BYTES) -> bytes:
    """The whole content. Raises UnreadableError where it cannot be read, or is over ``max_bytes``."""
    content = bytearray()
    try:
        with path.open("rb") as file:
            while len(content) <= max_bytes and (piece := file.read(_MEGA)):
                content += piece
    except OSError as error:
        raise _cannot_be_read(path, error) from error
    if len(content) > max_bytes:
        raise UnreadableError(f"{path}: larger than {max_bytes // _MEGA} MiB, the limit for it")
    return bytes(content)


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
            for number, line in enumerate(iter(partial(file.readline, LINE_BYTES + 1), b""), start=1):
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
    """The rows of a CSV file of UTF-8 text, one at a time, each with the number of its last line: the header, then
    rows with a value for each of its names, an empty text where they are shorter. Empty lines are left out.

    Raises UnreadableError as ``read_lines`` does, for what is not CSV, and for a row with more values than names.
    """
    csv.field_size_limit(min(LINE_BYTES, sys.maxsize))
    lines = (utf8_text(line, f"{path}:{number}") for number, line in read_lines(path, max_bytes))
    rows = csv.reader(lines, strict=True)
    names: list[str] = []
    try:
        for row in rows:
            names = names or row
            if len(row) > len(names):
                raise UnreadableError(f"{path}:{rows.line_num}: {len(row)} values under {len(names)} names")
            if row:
                yield rows.line_num, [*row, *[""] * (len(names) - len(row))]
    except csv.Error as error:
        raise UnreadableError(f"{path}:{rows.line_num}: cannot be read as CSV: {error}") from error


def read_csv_records(path: Path, max_bytes: int = LOG_BYTES) -> Iterator[tuple[int, dict[str, str]]]:
    """The rows of ``read_csv`` below the header by name of column, with their line numbers."""
    rows = read_csv(path, max_bytes)
    _, names = next(rows, (1, []))
    for number, row in rows:
        yield number, dict(zip(names, row, strict=True))


def _cannot_be_read(path: Path, error: OSError) -> UnreadableError:
    return UnreadableError(f"{path}: cannot be read: {error.strerror or error}")


_MOST_NODES: Final = 100_000
"""Values of a document with its aliases written out: ten lines can be a billion of them."""
_YAML_ERRORS: Final[tuple[type[Exception], ...]] = (*DECODING_ERRORS, yaml.YAMLError, AttributeError, LookupError)
"""PyYAML raises the last two for a tag whose text is not of it, such as ``!!int ""``."""


def read_yaml(path: Path, max_bytes: int = PROFILE_BYTES) -> tuple[Any, yaml.Node | None]:
    """The document in a file, in plain values, and its node with lines and columns; None for an empty file.

    Raises UnreadableError where it cannot be read, is over ``max_bytes``, or grows too large by its aliases.
    """
    text = read_text(path, max_bytes)
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None, None
        _check_size(node)
        document: Any = loader.construct_document(node)
    except _YAML_ERRORS as error:
        problem = " ".join(str(error).split()) if isinstance(error, yaml.YAMLError) else decoding_problem(error)
        raise UnreadableError(f"{path}: cannot be read as YAML: {problem}") from error
    return document, node


def _check_size(root: yaml.Node) -> None:
    """Raise ValueError for a node with itself or too many in it, aliases written out, and for a number too long."""
    sizes: dict[int, int | None] = {}

    def size(node: yaml.Node) -> int:
        if isinstance(node, yaml.ScalarNode):
            if node.tag.endswith(":int") and len(node.value) > MOST_DIGITS:
                raise ValueError(f"a number has {len(node.value)} digits")
            return 1
        if id(node) not in sizes:
            sizes[id(node)] = None
            parts = chain.from_iterable(node.value) if isinstance(node, yaml.MappingNode) else node.value
            sizes[id(node)] = 1 + sum(map(size, parts))
        if (num_nodes := sizes[id(node)]) is None:
            raise ValueError("an alias stands inside of what it repeats")
        return num_nodes

    if (num_nodes := size(root)) > _MOST_NODES:
        raise ValueError(f"it has {num_nodes:,} values with its aliases written out, the limit is {_MOST_NODES:,}")
