"""Contents that no reader expects: each is refused with the name of its file, and none ends in a traceback."""

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Final

from benchctl.errors import BenchctlError

NESTING: Final = 100_000
"""Levels of lists or mappings in the contents that are nested."""

HOSTILE: Final[dict[str, bytes]] = {
    "empty": b"",
    "one line feed": b"\n",
    "NUL": b"\0" * 64,
    "invalid UTF-8": b'{"schema_version": "\xff\xfe"}\n',
    "a byte order mark": b"\xef\xbb\xbf",
    "nested lists": b"[" * NESTING,
    "nested lists that end": b"[" * NESTING + b"]" * NESTING,
    "nested mappings": b'{"a":' * NESTING,
    "nested below a key": b'{"schema_version": ' + b"[" * NESTING + b"]" * NESTING + b"}",
    "a whole number of 5,000 digits": b'{"schema_version": ' + b"9" * 5_000 + b"}",
    "a whole number of 400 digits": b'{"schema_version": ' + b"9" * 400 + b"}",
    "NaN": b"NaN",
    "NaN under a key": b'{"schema_version": NaN}',
    "beyond a double": b'{"schema_version": 1e999}',
    "cut short": b'{"schema_version": 3, "runs": [{"ind',
    "a list": b"[1, 2, 3]",
    "a text": b'"text"',
    "a number": b"17",
    "null": b"null",
    "half a pair of surrogates": b'{"schema_version": "\\ud800"}',
    "UTF-16": '{"schema_version": 3}'.encode("utf-16"),
    "a program": b"\x7fELF\x02\x01\x01" + bytes(range(256)) * 4,
    "gzip": gzip.compress(b'{"schema_version": 3}' * 10, mtime=0),
}
"""Contents by what they are."""

WRONG_VALUES: Final = (None, True, -1, 1.5, 10**30, float("inf"), "text", "", [], [[]], {}, {"a": [None]})
"""A value of every type that JSON has, and impossible ones, to be put in the place of honest ones."""


def write_hostile(path: Path, name: str) -> Path:
    """Write the content of that name; returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(HOSTILE[name])
    return path


def refusal_of(read: Callable[[], object]) -> str:
    """The message with which a reader refuses its file; empty where it returns. Other exceptions pass."""
    try:
        read()
    except BenchctlError as error:
        return str(error)
    return ""
