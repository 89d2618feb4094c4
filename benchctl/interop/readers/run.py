"""One run as the result file of another load generator tells it, under benchctl's names and units.

Two tools may use one name for two things, and two names for one. A reader therefore takes over only what is defined
as here (``analysis/metrics/table.py``); what is not is left out, and a note says so.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from benchctl.errors import RecordError

Source: TypeAlias = Literal["vllm", "sglang", "aiperf", "guidellm", "benchctl"]
"""The tool that drove the load."""

Setting: TypeAlias = str | float | None
"""None is unknown; an unlimited rate is the text ``inf``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignRun:
    """What one run of another tool tells.

    ``where`` names the file, and the place in it where it holds several runs. ``metrics`` are the known numbers
    only, by the names and in the units of ``METRICS``. ``settings`` must be equal for two runs to be compared;
    ``load_point`` are those of them that say how hard the server was driven. ``failure`` says which requests were
    not answered.
    """

    source: Source
    where: str
    metrics: Mapping[str, float]
    settings: Mapping[str, Setting]
    failure: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def load_point(self) -> tuple[tuple[str, Setting], ...]:
        return tuple((key, self.settings.get(key)) for key in LOAD_POINT)


LOAD_POINT = ("request_rate", "max_concurrency")


def number_at(document: Mapping[str, Any], key: str, where: str) -> float | None:
    """The finite number under ``key``; None where there is none. Raises RecordError for anything else."""
    value = document.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RecordError(
            f"{where}: {key} is {value!r}; a number belongs there: write the file again with its tool"
        )
    return float(value) if math.isfinite(value) else None


def setting_at(document: Mapping[str, Any], key: str) -> Setting:
    """A setting as it can be compared: a text or a number; ``inf`` for a rate without bound, None for no value."""
    value = document.get(key)
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        return repr(value)
    return float(value) if math.isfinite(value) else str(value)


def known(values: Mapping[str, float | None]) -> dict[str, float]:
    """Without what is unknown."""
    return {name: value for name, value in values.items() if value is not None}


def unanswered(failed: float | None, total: float | None, why: str = "") -> str | None:
    """The sentence for requests that were not answered; None where none is known of."""
    if not failed:
        return None
    return f"{failed:.0f} of {'an unknown number of' if total is None else f'{total:.0f}'} requests failed{why}"
