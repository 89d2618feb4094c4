"""Counters that servers keep of their own work, by the names under which each kind of server states them.

A counter is summed over its series, one for each model, replica or source. The growth between the first and the
last reading of a run belongs to its load alone, because both are taken while the server is idle.
"""

import re
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from benchctl.profile.engine_options import engine_specs
from benchctl.records.schema import PrometheusSample

_POSITION: Final = re.compile(r'[{,]position="([0-9]{1,3})"')
"""A draft has far fewer than a thousand tokens."""
_COUNTERS: Final = tuple(spec.counters for spec in engine_specs())
GENERATED_TOKENS: Final = tuple(name for counters in _COUNTERS for name in counters.generated_tokens)
"""Output tokens."""
PREFIX_HITS: Final = tuple(name for counters in _COUNTERS for name in counters.prefix_hits)
"""Prompt tokens that were found in a cache instead of being computed."""
DRAFTS: Final = tuple(name for counters in _COUNTERS for name in counters.drafts)
"""Drafts that were verified."""
DRAFT_TOKENS: Final = tuple(name for counters in _COUNTERS for name in counters.draft_tokens)
"""Tokens of these drafts."""
ACCEPTED_TOKENS: Final = tuple(name for counters in _COUNTERS for name in counters.accepted_tokens)
"""Draft tokens that were accepted."""
ACCEPTED_BY_POSITION: Final = tuple(name for counters in _COUNTERS for name in counters.accepted_by_position)
"""Draft tokens that were accepted, by their position in the draft."""
OPEN_REQUESTS: Final = tuple(name for counters in _COUNTERS for name in counters.open_requests)
"""Gauges that are 0 while a server is idle."""


@dataclass(frozen=True, slots=True)
class Growth:
    """Growth of a counter during a load; ``names`` are those that the server uses."""

    names: tuple[str, ...]
    count: int

    @property
    def name(self) -> str:
        return " + ".join(self.names)


def measure_growth(samples: Sequence[PrometheusSample], names: Iterable[str]) -> Growth | None:
    """Total growth of the counters called ``names``; None without two readings of any of them."""
    growths: dict[str, float] = {}
    for name in names:
        readings = [reading for sample in samples if (reading := total(sample.values, name)) is not None]
        if len(readings) > 1:
            growths[name] = readings[-1] - readings[0]
    return Growth(tuple(growths), round(sum(growths.values()))) if growths else None


def measure_growth_by_position(samples: Sequence[PrometheusSample], names: Iterable[str]) -> tuple[int, ...]:
    """Growth of the counters called ``names`` at each position from 0; empty without two readings of any."""
    by_sample = [_by_position(sample.values, frozenset(names)) for sample in samples]
    counts = [of_positions for of_positions in by_sample if of_positions]
    if len(counts) < 2:
        return ()
    return tuple(round(counts[-1][position] - counts[0][position]) for position in range(max(counts[-1]) + 1))


def _by_position(values: Mapping[str, float], names: Container[str]) -> Counter[int]:
    """Counters summed over all series of a position."""
    counts: Counter[int] = Counter()
    for key, value in values.items():
        if key.partition("{")[0] in names and (position := _POSITION.search(key)) is not None:
            counts[int(position[1])] += value  # type: ignore[assignment]  # a page has floats
    return counts


def total(values: Mapping[str, float], name: str) -> float | None:
    """A counter or gauge summed over its series; None if the page has none of them."""
    series = [value for key, value in values.items() if key.partition("{")[0] == name]
    return sum(series) if series else None


def is_idle(values: Mapping[str, float]) -> bool:
    """True if the server reports no running or waiting request."""
    return not any(total(values, name) for name in OPEN_REQUESTS)


def token_counts(values: Mapping[str, float]) -> dict[str, float]:
    """The counters that checks compare; two equal readings mean that the server has caught up."""
    names = (*GENERATED_TOKENS, *PREFIX_HITS, *DRAFTS, *DRAFT_TOKENS, *ACCEPTED_TOKENS)
    return {name: count for name in names if (count := total(values, name)) is not None}
