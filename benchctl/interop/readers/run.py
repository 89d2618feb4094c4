"""One run from the result file of another load generator, under benchctl's names and units.

Two tools may use one name for two things, and two names for one. A reader therefore takes over only metrics with
the definition of ``analysis/metrics/table.py``; it leaves out the others, and a note says so.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

from benchctl.errors import RecordError
from benchctl.untrusted.text import visible_value

Source: TypeAlias = Literal["vllm", "sglang", "aiperf", "guidellm", "benchctl"]
"""The tool that drove the load."""

Setting: TypeAlias = str | float | None
"""None is unknown; an unlimited rate is the text ``inf``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignRun:
    """One run of another tool.

    ``where`` is the location: the file, and the line or entry if it holds several runs. ``metrics`` are the known
    numbers only, by the names and in the units of ``METRICS``. ``settings`` must be equal for two runs to be
    compared; ``load_point`` are the settings of the load on the server. ``failure`` counts the requests that were
    not answered.
    """

    source: Source
    where: str
    metrics: Mapping[str, float]
    settings: Mapping[str, Setting]
    failure: str | None = None
    notes: tuple[str, ...] = ()
    latencies_ms: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Those of single requests, by name, as far as the tool has written them."""

    @property
    def load_point(self) -> tuple[tuple[str, Setting], ...]:
        return tuple((key, self.settings.get(key)) for key in LOAD_POINT)


LOAD_POINT = ("request_rate", "max_concurrency")
_MOST: Final = 1e15
"""Above every duration in ms, count and rate of a load."""


def number_at(document: Mapping[str, Any], key: str, where: str) -> float | None:
    """The finite number under ``key``; None without one.

    Raises RecordError for anything else, and for a number that no duration, count or rate can have.
    """
    value = document.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RecordError(
            f"{where}: {key} is {visible_value(value)}, not a number; write the file again with its tool"
        )
    if not math.isfinite(value):
        return None
    if not 0 <= value <= _MOST:
        raise RecordError(f"{where}: {key} is {value:g}, which is impossible; write the file again with its tool")
    return float(value)


def setting_at(document: Mapping[str, Any], key: str) -> Setting:
    """A setting in comparable form: a text or a number; ``inf`` for an unlimited rate, None for no value."""
    value = document.get(key)
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        return repr(value)
    return float(value) if math.isfinite(value) else str(value)


def drop_unknown(values: Mapping[str, float | None]) -> dict[str, float]:
    """The values that are known."""
    return {name: value for name, value in values.items() if value is not None}


def unanswered(failed: float | None, total: float | None, why: str = "") -> str | None:
    """The sentence about requests that were not answered; None if none is known to have failed."""
    if not failed:
        return None
    return f"{failed:.0f} of {'an unknown number of' if total is None else f'{total:.0f}'} requests failed{why}"
