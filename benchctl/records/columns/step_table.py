"""The table of a long step log in a file next to it: later readers need not parse the log again.

The table is a copy. It counts only while the log has the SHA-256 that the table names, and may be deleted.
"""

import hashlib
import io
from pathlib import Path
from typing import Final

import polars as pl

from benchctl.records.jsonl import write_bytes_atomic

TABLE_FROM_BYTES: Final = 1 << 20
"""Shorter logs are read nearly as fast as their tables."""
_VERSION: Final = "1"
"""Version of the table that ``records/columns/step_log.py`` makes; tables of another one are not read."""


def table_path(step_log: Path) -> Path:
    """Path of the table of ``steps.jsonl``."""
    return step_log.with_suffix(".parquet")


def write_table(step_log: Path, table: pl.DataFrame) -> None:
    """Write the table of a log that was read to its end. Raises OSError when it cannot be written."""
    content = io.BytesIO()
    table.write_parquet(content, metadata={"version": _VERSION, "log_sha256": _sha256(step_log)})
    write_bytes_atomic(table_path(step_log), content.getvalue())


def read_table(step_log: Path) -> pl.DataFrame | None:
    """The table of a log; None without one of its present content."""
    path = table_path(step_log)
    if not path.is_file():
        return None
    try:
        metadata = pl.read_parquet_metadata(path)
        if metadata.get("version") != _VERSION or metadata.get("log_sha256") != _sha256(step_log):
            return None
        return pl.read_parquet(path)
    except (OSError, pl.exceptions.PolarsError):  # a copy that cannot be read: the log can
        return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
