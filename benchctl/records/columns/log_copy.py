"""The copy of a long log as arrays: a safetensors file beside it that later readers take instead of the lines.

The log stays the measurement. A copy counts only while the log has the SHA-256 that the copy names and the arrays
have theirs, and may be deleted.
"""

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from benchctl.errors import RecordError
from benchctl.records.columns.tensor_file import Numbers, tensor_bytes, tensors_of
from benchctl.records.jsonl import write_bytes_atomic
from benchctl.records.run import FileDigest
from benchctl.untrusted.decoding import DECODING_ERRORS
from benchctl.untrusted.files import open_file, read_file
from benchctl.untrusted.limits import LOG_BYTES

_UNUSABLE: Final[tuple[type[Exception], ...]] = (OSError, RecordError, *DECODING_ERRORS)


def copy_path(log: Path) -> Path:
    """Path of the copy of a log such as ``steps.jsonl``."""
    return log.with_suffix(".safetensors")


def read_copy(log: Path, *, version: str, recorded: FileDigest | None, within: Path) -> dict[str, Numbers] | None:
    """The arrays of the copy; None without one of this version and of the log's present content.

    ``recorded``: digest of the log when its run ended; trusted if the log still has that size and time.
    """
    try:
        tensors, metadata = tensors_of(read_file(copy_path(log), within=within, max_bytes=LOG_BYTES))
        log_sha256 = _sha256(log, recorded, within)
        is_current = metadata.get("version") == version and metadata.get(_key(log)) == log_sha256
    except _UNUSABLE:  # a copy that cannot be read: the log can
        return None
    return tensors if is_current else None


def copy_bytes(log: Path, tensors: Mapping[str, Numbers], *, version: str, log_sha256: str) -> bytes:
    """The content of a copy of the log with this SHA-256."""
    return tensor_bytes(tensors, {"version": version, _key(log): log_sha256})


def write_copy(log: Path, content: bytes, *, within: Path) -> None:
    """Put a copy beside its log, unless the directory cannot be written: no reader depends on it."""
    with suppress(OSError, RecordError):
        write_bytes_atomic(copy_path(log), content, within=within)


def _key(log: Path) -> str:
    return f"{log.stem}_sha256"


def _sha256(path: Path, recorded: FileDigest | None, within: Path) -> str:
    with open_file(path, within=within) as file:
        status = os.fstat(file.fileno())
        if recorded is not None and (status.st_size, status.st_mtime_ns) == (
            recorded.size_bytes,
            recorded.mtime_ns,
        ):
            return recorded.sha256
        return hashlib.file_digest(file, "sha256").hexdigest()
