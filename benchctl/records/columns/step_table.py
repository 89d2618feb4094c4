"""The table of a long step log, kept beside it: the log is read once, and not each time that it is compared.

The log stays what was measured and the table is a copy: it counts only while the log has the SHA-256 that the
table names, and nothing is lost with it.
"""

import hashlib
import io
from pathlib import Path
from typing import Final

import polars as pl

from benchctl.records.jsonl import write_bytes_atomic

KEPT_FROM_BYTES: Final = 1 << 20
"""Shorter logs are read nearly as fast as their tables."""
_VERSION: Final = "1"
"""Of what ``records/columns/step_log.py`` makes of a log; another one's tables are not read."""


def table_path(step_log: Path) -> Path:
    """Where the table of ``steps.jsonl`` is kept."""
    return step_log.with_suffix(".parquet")


def keep_table(step_log: Path, table: pl.DataFrame) -> None:
    """Write the table of a log that was read to its end. OSError where it cannot be written."""
    content = io.BytesIO()
    table.write_parquet(content, metadata={"version": _VERSION, "log_sha256": _sha256(step_log)})
    write_bytes_atomic(table_path(step_log), content.getvalue())


def kept_table(step_log: Path) -> pl.DataFrame | None:
    """The table of a log; None where none is kept of the log as it is now."""
    path = table_path(step_log)
    if not path.is_file():
        return None
    try:
        named = pl.read_parquet_metadata(path)
        if named.get("version") != _VERSION or named.get("log_sha256") != _sha256(step_log):
            return None
        return pl.read_parquet(path)
    except (OSError, pl.exceptions.PolarsError):  # a copy that cannot be read: the log can
        return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
