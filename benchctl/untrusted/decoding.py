"""The errors by which decoders report input that is not what it should be."""

import csv
import struct
import zlib
from typing import Final

import msgspec

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


def decoding_problem(error: Exception) -> str:
    """One line on ``error`` for a message that names the file."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return f"it is not UTF-8 text (byte {error.start}: {error.reason})"
    return next(iter(str(error).splitlines()), "") or type(error).__name__
