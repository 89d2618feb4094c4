"""A long ``steps.jsonl``, read into a compact table from which columns, and on demand records, are made.

The first reader of a long log leaves a copy of the table beside it: later readers need not decode the lines again.
"""

import hashlib
import io
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Final, overload

from benchctl.errors import RecordError
from benchctl.records.columns.columns import (
    StepColumns,
    StepTable,
    checked_table,
    columns_of,
    copy_bytes,
    joined,
    read_copy,
    table_of,
    write_copy,
)
from benchctl.records.files import damaged_line, decode_lines, decode_whole, open_log, read_jsonl
from benchctl.records.record import FileDigest
from benchctl.records.schema import StepRecord
from benchctl.untrusted.files import lines_of, stat_file
from benchctl.untrusted.limits import LINE_BYTES

COPY_FROM_BYTES: Final = 1 << 20
"""Shorter logs are read nearly as fast as their copies."""
_MOST_COLUMNS: Final = 1 << 10
"""Sections and other values of the steps of a log: each is a column of all its steps."""
_VERSION: Final = "3"
"""Version of the copy; those of another one are not read."""


class StepLog(Sequence[StepRecord]):
    """The readable steps of a log, held as a table. Access to a record reads the file from its beginning."""

    def __init__(self, path: Path, table: StepTable, within: Path, log_sha256: str | None = None) -> None:
        self._path = path
        self._within = within
        self._table = table
        self._log_sha256 = log_sha256

    def __len__(self) -> int:
        return len(self._table)

    def __iter__(self) -> Iterator[StepRecord]:
        return islice(read_jsonl(self._path, StepRecord, within=self._within), len(self))

    @overload
    def __getitem__(self, index: int) -> StepRecord: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[StepRecord, ...]: ...
    def __getitem__(self, index: int | slice) -> StepRecord | tuple[StepRecord, ...]:
        return tuple(self)[index]

    def columns(self, *, is_warmup: bool = False) -> StepColumns:
        """The steps of the load, or those of the warm-up."""
        return columns_of(self._table, is_warmup=is_warmup)

    def write_copy(self) -> None:
        """Put a copy beside a long log of which every line was decoded."""
        if self._log_sha256 is None or stat_file(self._path, within=self._within).st_size < COPY_FROM_BYTES:
            return
        content = copy_bytes(self._path, self._table.arrays, version=_VERSION, log_sha256=self._log_sha256)
        write_copy(self._path, content, within=self._within)


def read_step_log(
    path: Path, *, block_bytes: int, within: Path | None = None, recorded: FileDigest | None = None
) -> tuple[StepLog, RecordError | None]:
    """The steps of a file up to its first damaged line, and the error of that line.

    No link leads to the file from ``within``, by default its folder. ``recorded``: digest of the log when its run
    ended; trusted if the log still has that size and time. Raises RecordError where the file cannot be opened.
    """
    root = within or path.parent
    arrays = read_copy(path, version=_VERSION, recorded=recorded, within=root)
    if arrays is not None:
        with suppress(ValueError):  # arrays that no log has: the lines count
            return StepLog(path, checked_table(arrays), root), None
    tables, digest, damage = list[StepTable](), hashlib.sha256(), None
    num_lines, names = 0, set[str]()
    with open_log(path, within=root) or io.BytesIO() as file:
        while damage is None and (lines := file.read(block_bytes) + file.readline(LINE_BYTES)):
            digest.update(lines)
            records = decode_whole(lines, StepRecord)
            if records is None:
                records, damage = _decode_singly(lines, path, first_line=num_lines + 1)
                num_lines += lines.count(b"\n")
            else:
                num_lines += len(records)
            tables.append(table_of(records))
            names.update(tables[-1].names)
            if len(names) > _MOST_COLUMNS:
                damage = damaged_line(path, num_lines, f"the steps so far have {len(names)} different sections")
    return StepLog(path, joined(tables), root, digest.hexdigest() if damage is None else None), damage


def _decode_singly(lines: bytes, path: Path, first_line: int) -> tuple[list[StepRecord], RecordError | None]:
    """The records of a block up to its first damaged line, and the error of that line."""
    records: list[StepRecord] = []
    try:
        records.extend(decode_lines(lines_of(io.BytesIO(lines), path, first_line), path, StepRecord, first_line))
    except RecordError as error:
        return records, error
    return records, None
