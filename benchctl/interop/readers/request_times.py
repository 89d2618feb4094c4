"""The server's own timestamps of requests, as JSON Lines: input of the overheads of a step-time model.

A line has ``arrived``, ``queued``, ``finished`` and ``departed``, each with ``_ts`` or ``_at`` in seconds or
``_us`` in microseconds, and ``output_tokens``. Requests that lack one, such as failed ones, are left
out.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchctl.errors import UsageError
from benchctl.steptime.fitting.overheads import fit_overheads
from benchctl.steptime.model import RequestOverheads
from benchctl.untrusted import ROWS_BYTES
from benchctl.untrusted.reading import UnreadableError, json_value, read_lines, utf8_text

_EVENTS: Final = ("arrived", "queued", "finished", "departed")
_UNITS: Final = {"_us": 1.0, "_ts": 1e6, "_at": 1e6}
_MOST: Final = 1e17
"""Above the microseconds since 1970."""
_TOKENS: Final = ("output_tokens", "output_toks")


def read_overheads(path: Path) -> RequestOverheads:
    """The overheads of the requests of a file. Raises UsageError naming what is missing."""
    try:
        lines = [
            json_value(utf8_text(line, where := f"{path}:{number}"), where)
            for number, line in read_lines(path, ROWS_BYTES)
            if line.strip()
        ]
    except UnreadableError as error:
        raise UsageError(f"{error}; name a JSON Lines file with a request a line") from error
    rows = [row for line in lines if isinstance(line, dict) and (row := _row(line)) is not None]
    if not rows:
        keys = ", ".join(sorted(lines[0])) if lines and isinstance(lines[0], dict) else "none"
        needed = ", ".join([*(f"{event}_ts" for event in _EVENTS), _TOKENS[0]])
        raise UsageError(f"{path}: no request has all of {needed}; add them; the first line has {keys}")
    columns = np.array(rows, dtype=np.float64).T
    return fit_overheads(*columns)


def _row(line: Mapping[str, Any]) -> tuple[float, ...] | None:
    """Times of the events in microseconds, and output tokens; None where one is missing."""
    values = [_time_us(line, event) for event in _EVENTS]
    values.append(next((number for key in _TOKENS if (number := _number(line.get(key))) is not None), None))
    return tuple(value for value in values if value is not None) if None not in values else None


def _time_us(line: Mapping[str, Any], event: str) -> float | None:
    for suffix, factor in _UNITS.items():
        value = _number(line.get(event + suffix))
        if value is not None:
            return value * factor
    return None


def _number(value: Any) -> float | None:
    """A number that a time or a count can be; None for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _MOST
    return float(value) if is_number else None
