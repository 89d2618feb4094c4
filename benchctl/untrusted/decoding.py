"""The errors by which decoders report input that is not what it should be."""

import csv
import json
import re
import struct
import zlib
from collections.abc import Mapping
from typing import Final

import msgspec

from benchctl.untrusted.limits import VALUE_CHARS
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


_FIELD: Final = re.compile(r" - at `\$\.(\w+)")


def decoding_problem(error: Exception) -> str:
    """One line on ``error`` for a message that names the file."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return f"it is not UTF-8 text (byte {error.start}: {error.reason})"
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def field_problem(error: Exception, document: Mapping[str, object]) -> str:
    """``decoding_problem``, with the value of the field that does not fit its type or its law."""
    problem = decoding_problem(error)
    field = _FIELD.search(problem)
    if field is None or field[1] not in document:
        return problem
    value = document[field[1]]
    return f"{field[1]} is {visible_line(json.dumps(value, ensure_ascii=False), VALUE_CHARS)}: {problem}"
