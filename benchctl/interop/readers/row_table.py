"""Tables as CSV or JSON Lines: columns by name, each with a value for every row, None where there is none."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from benchctl.errors import UsageError
from benchctl.untrusted import ROWS_BYTES
from benchctl.untrusted.reading import (
    DECODING_ERRORS,
    UnreadableError,
    decoding_problem,
    read_csv,
    read_lines,
)

_WORDS = {"true": 1.0, "false": 0.0}


@dataclass(frozen=True, slots=True)
class RowTable:
    """Columns of equal lengths. Values of a CSV file are text."""

    columns: Mapping[str, Sequence[Any]]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def groups(self, names: Sequence[str]) -> Iterator["RowTable"]:
        """The rows with equal values in these columns, a table for each, in the order of their first rows."""
        indices: dict[tuple[str, ...], list[int]] = {}
        for index, values in enumerate(zip(*(self.columns[name] for name in names), strict=True)):
            indices.setdefault(tuple(map(str, values)), []).append(index)
        for rows in indices.values():
            yield RowTable({name: [values[row] for row in rows] for name, values in self.columns.items()})

    def numbers(self, name: str) -> npt.NDArray[np.float64]:
        """A column as numbers, NaN where it has none; yes is 1 and no is 0."""
        return np.fromiter(map(_number, self.columns[name]), np.float64, len(self))


def _number(value: Any) -> float:
    try:
        return _WORDS[value.lower()] if isinstance(value, str) and value.lower() in _WORDS else float(value)
    except (TypeError, ValueError, OverflowError):
        return np.nan


def read_rows(path: Path) -> RowTable:
    """The table of a ``.csv`` file, or of JSON Lines. Raises UsageError with the line that is none of its rows."""
    try:
        return _read_csv(path) if path.suffix == ".csv" else _read_json_lines(path)
    except UnreadableError as error:
        raise UsageError(f"{error}; correct the row: a table is a CSV or JSON Lines file") from error


def _read_csv(path: Path) -> RowTable:
    rows = read_csv(path, ROWS_BYTES)
    _, names = next(rows, (1, []))
    values = [[value or None for value in row] for _, row in rows]
    columns: dict[str, Sequence[str | None]] = {}
    for index, name in enumerate(names):
        columns.setdefault(name, [row[index] for row in values])
    return RowTable(columns)


def _read_json_lines(path: Path) -> RowTable:
    rows = []
    decoder = msgspec.json.Decoder(dict[str, Any])
    for number, line in read_lines(path, ROWS_BYTES):
        try:
            if line.strip():
                rows.append(decoder.decode(line))
        except DECODING_ERRORS as error:
            raise UnreadableError(f"{path}:{number}: no row of a table: {decoding_problem(error)}") from error
    names = dict.fromkeys(name for row in rows for name in row)
    return RowTable({name: [row.get(name) for row in rows] for name in names})
