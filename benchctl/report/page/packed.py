"""The rows of charts as columns, in which they take a fifth of the room; ``page.js`` makes rows of them again.

A column of numbers is an array of bytes in base64 (little-endian ``dtype``, NaN for what is missing), any other a
list of its distinct values and the index of each row.
"""

import base64
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_CODES: Final = (("u1", 2**8), ("u2", 2**16), ("i4", 2**31))


def packed(datasets: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Every data set by its columns."""
    result = {}
    for name, rows in datasets.items():
        columns = dict.fromkeys(column for row in rows for column in row)
        result[name] = {column: _column([row.get(column) for row in rows]) for column in columns}
    return result


def unpacked(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows again."""
    lists = {name: _values(column) for name, column in columns.items()}
    return [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]


def _column(values: Sequence[Any]) -> dict[str, Any]:
    if all(value is None or (isinstance(value, int | float) and not isinstance(value, bool)) for value in values):
        if all(isinstance(value, int) and 0 <= value < 2**31 for value in values):
            return _array(np.array(values), max(values, default=0))
        return _array(np.array([np.nan if value is None else value for value in values], dtype=np.float32), None)
    distinct = list({(type(value), value): value for value in values}.values())
    numbers = {(type(value), value): i for i, value in enumerate(distinct)}
    codes = np.array([numbers[type(value), value] for value in values])
    return {"values": distinct, **_array(codes, len(distinct))}


def _array(array: NDArray[Any], most: int | None) -> dict[str, str]:
    dtype = "f4" if most is None else next(code for code, end in _CODES if most < end)
    return {"dtype": dtype, "bdata": base64.b64encode(array.astype(f"<{dtype}").tobytes()).decode()}


def _values(column: Mapping[str, Any]) -> list[Any]:
    numbers = np.frombuffer(base64.b64decode(column["bdata"]), dtype=f"<{column['dtype']}").tolist()
    if "values" in column:
        return [column["values"][code] for code in numbers]
    return [None if number != number else number for number in numbers]  # noqa: PLR0124 - NaN
