"""The server's own timestamps of requests, as JSON Lines: input of the overheads of a step-time model.

A line has ``arrived``, ``queued``, ``finished`` and ``departed``, each with ``_ts`` or ``_at`` in seconds or
``_us`` in microseconds, and ``output_tokens``. Requests that lack one, such as failed ones, are left out.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchctl.errors import UsageError
from benchctl.steptime.fitting.overheads import fit_overheads
from benchctl.steptime.model import RequestOverheads

_EVENTS: Final = ("arrived", "queued", "finished", "departed")
_UNITS: Final = {"_us": 1.0, "_ts": 1e6, "_at": 1e6}
_TOKENS: Final = ("output_tokens", "output_toks")


def read_overheads(path: Path) -> RequestOverheads:
    """The overheads of the requests of a file. Raises UsageError naming what is missing."""
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path}: cannot be read as JSON Lines ({error}); name a file with a request a line"
        ) from error
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
    values.append(next((float(line[key]) for key in _TOKENS if isinstance(line.get(key), int)), None))
    return tuple(value for value in values if value is not None) if None not in values else None


def _time_us(line: Mapping[str, Any], event: str) -> float | None:
    for suffix, factor in _UNITS.items():
        value = line.get(event + suffix)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value) * factor
    return None
