"""A long ``steps.jsonl``, read into a compact table from which columns, and on demand records, are made.

polars reads a block of lines several times as fast as records are made of them. It misreads no value, but it
silently leaves out a field outside its schema, a key that comes twice, and a null. Each value of a line has one
colon before it, so a block with as many colons as values was read whole. Any other block is read again by the
reader of records, which also reports damage.

The table of a long log is stored next to it: later readers need not parse the log again. It counts only while the
log has the SHA-256 that the table names, and may be deleted.
"""

import hashlib
import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, Final, TypeVar, get_args

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl

from benchctl.errors import RecordError
from benchctl.records.columns.step_columns import (
    ACCEPTED_BY_POSITION,
    OPTIONAL,
    PHASES,
    Flags,
    Floats,
    Integers,
    StepColumns,
    StepsOfFile,
    by_position,
)
from benchctl.records.jsonl import decode_lines, write_bytes_atomic
from benchctl.records.step import Clock, StepRecord

A = TypeVar("A", bound=npt.NDArray[Any])

TABLE_FROM_BYTES: Final = 1 << 20
"""Shorter logs are read nearly as fast as their tables."""
_VERSION: Final = "2"
"""Version of the table; those of another one are not read."""
_WITHOUT_POSITIONS: Final = "1"
"""Version without acceptance by position: read where nothing was drafted."""
_CLOCKS: Final[tuple[Clock, ...]] = get_args(Clock)
_WORDS: Final = {"clock": pl.Enum(_CLOCKS), "phase": pl.Enum(PHASES)}
_REQUIRED: Final = ("step", "start_ns", "dur_ns", "clock", "phase", "num_seqs")
_ALWAYS: Final = (*_REQUIRED, "is_warmup")
_SECTIONS: Final = "sections_ns"
_SECTION_PREFIX: Final = f"{_SECTIONS}."
_POSITION_PREFIX: Final = f"{ACCEPTED_BY_POSITION}."
_SECTIONS_OF_LINE: Final = re.compile(rb'"sections_ns"\s*:\s*(\{[^{}]*\})')


class StepLog(StepsOfFile):
    """The readable steps of a file, held as tables."""

    def __init__(self, path: Path, table: pl.DataFrame, *, is_whole: bool = True) -> None:
        super().__init__(path)
        self._is_whole = is_whole
        self._tables = {is_warmup: table.filter(is_warmup=is_warmup) for is_warmup in (False, True)}

    def __len__(self) -> int:
        return sum(table.height for table in self._tables.values())

    def write_table(self, *, from_bytes: int = TABLE_FROM_BYTES) -> None:
        """Write the table of a whole log of at least ``from_bytes``. Raises OSError when it cannot be written."""
        if self._is_whole and self._path.stat().st_size >= from_bytes:
            write_table(self._path, pl.concat(self._tables.values()))

    def columns(self, *, is_warmup: bool = False) -> StepColumns:
        """The steps of the load, or those of the warm-up."""
        steps = self._tables[is_warmup]
        present = {column.name for column in steps.iter_columns() if column.null_count() < steps.height}
        sections = sorted(
            name.removeprefix(_SECTION_PREFIX) for name in present if name.startswith(_SECTION_PREFIX)
        )
        return StepColumns(
            start_ns=_integers(steps["start_ns"]),
            dur_ns=_integers(steps["dur_ns"]),
            num_seqs=_integers(steps["num_seqs"]),
            phase=steps["phase"].to_physical().cast(pl.UInt8).to_numpy(),
            clocks=tuple(sorted(steps["clock"].unique().to_list())),
            optionals=_Widened(
                [name for name in OPTIONAL if name in present], lambda name: steps[name].cast(pl.Float64).to_numpy()
            ),
            section_ns=_Widened(sections, lambda name: _integers(steps[_SECTION_PREFIX + name])),
            has_section=_Widened(sections, lambda name: _is_known(steps[_SECTION_PREFIX + name])),
            accepted_by_position=by_position([_floats(steps[name]) for name in _position_names(present)]),
        )


class _Widened(Mapping[str, A]):
    """Columns by name, each made on access: few readers need all of them."""

    def __init__(self, names: Sequence[str], widen: Callable[[str], A]) -> None:
        self._names = dict.fromkeys(names)
        self._widen = widen

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __getitem__(self, name: str) -> A:
        if name not in self._names:
            raise KeyError(name)
        return self._widen(name)


def read_step_log(path: Path, *, block_bytes: int) -> tuple[StepLog, RecordError | None]:
    """The steps of a file up to its first damaged line, and the error of that line."""
    stored_table = read_table(path)
    if stored_table is not None:
        return StepLog(path, stored_table), None
    tables: list[pl.DataFrame] = []
    damage = None
    for first_byte, lines in _blocks(path, block_bytes):
        table = _quickly_read(lines)
        if table is None:
            records, damage = _read_as_records(path, first_byte, lines, block_bytes)
            table = _table_of_records(records)
        tables.append(table)
        if damage is not None:
            break
    table = pl.concat(tables or [_table_of_records(())], how="diagonal_relaxed", rechunk=True)
    return StepLog(path, table, is_whole=damage is None), damage


def _blocks(path: Path, block_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Whole lines, with the offset of their first byte."""
    if not path.stat().st_size:  # which cannot be mapped
        return
    with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as content:
        start = 0
        while start < len(content):
            end = content.find(b"\n", min(start + block_bytes, len(content))) + 1 or len(content)
            yield start, content[start:end]
            start = end


def _quickly_read(lines: bytes) -> pl.DataFrame | None:
    """The table of a block; None unless polars certainly reads every value of it."""
    outer_lines = lines[: lines.find(b"\n") + 1] + lines[lines.rfind(b"\n", 0, -1) + 1 :]
    names = _section_names(outer_lines)
    table = _parse(lines, names)
    if table is None and not names.issuperset(all_names := _section_names(lines)):
        table = _parse(lines, all_names)
    return table


def _section_names(lines: bytes) -> set[str]:
    try:
        return {name for sections in _SECTIONS_OF_LINE.findall(lines) for name in msgspec.json.decode(sections)}
    except msgspec.DecodeError:  # the reader of records reports it
        return set()


def _parse(lines: bytes, names: Iterable[str]) -> pl.DataFrame | None:
    try:
        read = pl.read_ndjson(lines, schema=_schema(names))
        sections, positions = _sections_of(read), _positions_of(read)
        if any(read[name].null_count() for name in _REQUIRED) or positions is None:
            return None
        num_values = sum(column.count() for column in (*read.iter_columns(), *sections))
        return _compact(read, sections, positions) if num_values == _num_colons(lines) else None
    except pl.exceptions.PolarsError:  # also for a clock or a phase that does not exist
        return None


def _num_colons(lines: bytes) -> int:
    return int(np.count_nonzero(np.frombuffer(lines, dtype=np.uint8) == ord(":")))


def _table_of_records(records: Sequence[StepRecord]) -> pl.DataFrame:
    names = sorted({name for record in records for name in record.sections_ns})
    read = pl.DataFrame([msgspec.structs.asdict(record) for record in records], schema=_schema(names))
    return _compact(read, _sections_of(read), _positions_of(read) or [])


def _schema(names: Iterable[str]) -> dict[str, pl.DataType]:
    kinds: dict[str, pl.DataType] = {
        field.name: pl.Boolean() if bool in (field.type, *get_args(field.type)) else pl.Int64()
        for field in msgspec.structs.fields(StepRecord)
    }
    return kinds | {
        "clock": pl.String(),
        "phase": pl.String(),
        _SECTIONS: pl.Struct(dict.fromkeys(sorted(names), pl.Int64())),
        ACCEPTED_BY_POSITION: pl.List(pl.Int64()),
    }


def _sections_of(read: pl.DataFrame) -> list[pl.Series]:
    sections = read[_SECTIONS].struct.unnest()
    return [column.alias(_SECTION_PREFIX + column.name) for column in sections.iter_columns()]


def _positions_of(read: pl.DataFrame) -> list[pl.Series] | None:
    """A column for each position of a draft; None when a list has a null."""
    accepted = read[ACCEPTED_BY_POSITION]
    if not accepted.count():
        return []
    lengths = accepted.drop_nulls().list.len().to_numpy()
    positions = [accepted.list.get(index, null_on_oob=True) for index in range(int(lengths.max()))]
    if sum(column.count() for column in positions) != lengths.sum():
        return None
    return [column.alias(f"{_POSITION_PREFIX}{index}") for index, column in enumerate(positions, 1)]


def _position_names(names: Iterable[str]) -> list[str]:
    positions = [name for name in names if name.startswith(_POSITION_PREFIX)]
    return sorted(positions, key=lambda name: int(name.removeprefix(_POSITION_PREFIX)))


def _compact(read: pl.DataFrame, sections: list[pl.Series], positions: list[pl.Series]) -> pl.DataFrame:
    """The table that columns are made from, each number in as few bytes as the largest of its column needs."""
    table = read.drop(_SECTIONS, ACCEPTED_BY_POSITION).hstack([*sections, *positions])
    words = table.with_columns(pl.col("is_warmup").fill_null(value=False)).cast(_WORDS).drop("step")  # type: ignore[arg-type]
    columns = [column for column in words.iter_columns() if column.name in _ALWAYS or column.count()]
    return pl.DataFrame([c.shrink_dtype() if c.dtype == pl.Int64 else c for c in columns])


def _read_as_records(
    path: Path, first_byte: int, lines: bytes, block_bytes: int
) -> tuple[list[StepRecord], RecordError | None]:
    records: list[StepRecord] = []
    first_line = 1 + sum(before.count(b"\n") for start, before in _blocks(path, block_bytes) if start < first_byte)
    try:
        records.extend(decode_lines(io.BytesIO(lines), path, StepRecord, first_line))
    except RecordError as error:
        return records, error
    return records, None


def _integers(column: pl.Series) -> Integers:
    return (column.fill_null(0) if column.null_count() else column).cast(pl.Int64).to_numpy()


def _floats(column: pl.Series) -> Floats:
    return column.cast(pl.Float64).fill_null(np.nan).to_numpy()


def _is_known(column: pl.Series) -> Flags:
    return column.is_not_null().to_numpy() if column.null_count() else np.ones(len(column), dtype=np.bool_)


def table_path(step_log: Path) -> Path:
    """Path of the table of ``steps.jsonl``."""
    return step_log.with_suffix(".parquet")


def write_table(step_log: Path, table: pl.DataFrame) -> None:
    """Write the table of a log that was read to its end. Raises OSError when it cannot be written."""
    content = io.BytesIO()
    table.write_parquet(content, metadata={"version": _VERSION, "log_sha256": _sha256_of_file(step_log)})
    write_bytes_atomic(table_path(step_log), content.getvalue())


def read_table(step_log: Path) -> pl.DataFrame | None:
    """The table of a log; None without one of its present content."""
    path = table_path(step_log)
    if not path.is_file():
        return None
    try:
        metadata = pl.read_parquet_metadata(path)
        version = metadata.get("version")
        if version not in (_VERSION, _WITHOUT_POSITIONS) or metadata.get("log_sha256") != _sha256_of_file(step_log):
            return None
        table = pl.read_parquet(path)
    except (OSError, pl.exceptions.PolarsError):  # a copy that cannot be read: the log can
        return None
    return table if version == _VERSION or "draft_tokens" not in table.columns else None


def _sha256_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
