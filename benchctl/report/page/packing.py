"""Long lists of numbers in a figure as typed arrays in base64, which plotly.js reads and which take less room.

Fractions are stored with 24 bits, which is seven significant digits: more than a picture shows.
"""

import base64
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchctl.untrusted.text import visible_line

_FEWEST: Final = 16
"""Shorter lists are no smaller in base64."""
_MARKUP: Final = re.compile("&|<(?!br>|/?extra>)")
_ENTITIES: Final = {"&": "&amp;", "<": "&lt;"}
_INTEGERS: Final = (("u1", np.uint8), ("u2", np.uint16), ("i4", np.int32))


def packed(value: Any) -> Any:
    """The value with every list of numbers, or list of rows of numbers, as a typed array of plotly.js.

    Texts become such that plotly.js shows what is in them, but for line breaks; ``meta``, which it never shows,
    stays as it is.
    """
    if isinstance(value, Mapping):
        return {key: part if key == "meta" else packed(part) for key, part in value.items()}
    if isinstance(value, str):
        return _plotly_text(value)
    if not isinstance(value, list | tuple):
        return value
    if len(value) >= _FEWEST and (array := _array_of(value)) is not None:
        return _typed(array)
    return [packed(part) for part in value]


def _plotly_text(text: str) -> str:
    """Plotly reads elements and entities of HTML in every text that it shows; ``<br>`` and ``<extra>`` are ours."""
    return _MARKUP.sub(lambda match: _ENTITIES[match.group()], visible_line(text))


def unpacked(typed: Mapping[str, Any]) -> list[Any]:
    """The numbers of a typed array again, as rows where it has rows."""
    array = np.frombuffer(base64.b64decode(typed["bdata"]), dtype=f"<{typed['dtype']}")
    shape = [int(size) for size in typed.get("shape", str(len(array))).split(",")]
    numbers: list[Any] = array.reshape(shape).tolist()
    return numbers


def _array_of(values: Sequence[Any]) -> NDArray[Any] | None:
    """The numbers as an array; None for anything else, for gaps, and for rows of different lengths."""
    rows = values if isinstance(values[0], list | tuple) else [values]
    if not all(isinstance(row, list | tuple) for row in rows) or len({len(row) for row in rows}) != 1:
        return None
    types = {type(number) for row in rows for number in row}
    if not types or not types <= {int, float}:
        return None
    array: NDArray[Any] = np.array(values, dtype=np.float64)
    if types == {int}:
        low, high = array.min(), array.max()
        ranges = ((kind, np.iinfo(kind)) for _, kind in _INTEGERS)
        fitting = next((kind for kind, limits in ranges if limits.min <= low and high <= limits.max), None)
        return None if fitting is None else array.astype(fitting)
    return array.astype(np.float32)


def _typed(array: NDArray[Any]) -> dict[str, str]:
    names = {np.dtype(kind): name for name, kind in _INTEGERS} | {np.dtype(np.float32): "f4"}
    little = array.astype(array.dtype.newbyteorder("<"))
    typed = {"dtype": names[array.dtype], "bdata": base64.b64encode(little.tobytes()).decode()}
    return typed if array.ndim == 1 else {**typed, "shape": ", ".join(map(str, array.shape))}
