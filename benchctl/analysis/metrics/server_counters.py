"""Counters that servers keep of their own work, by the names under which each kind of server states them.

A counter is summed over its series, one for each model, replica or source. The growth between the first and the
last reading of a run belongs to its load alone, because both are taken while the server is idle.
"""

import re
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from benchctl.analysis.metrics.latency import total as total_of
from benchctl.profile.engine_table import ENGINES, ServerCounters
from benchctl.records.record import RequestRecord
from benchctl.records.schema import PrometheusSample

_POSITION: Final = re.compile(r'[{,]position="([0-9]{1,3})"')
"""A draft has far fewer than a thousand tokens."""
_COUNTERS: Final = tuple(spec.counters for spec in ENGINES.values())
COUNTERS: Final = ServerCounters(
    generated_tokens=tuple(name for counters in _COUNTERS for name in counters.generated_tokens),
    prefix_hits=tuple(name for counters in _COUNTERS for name in counters.prefix_hits),
    drafts=tuple(name for counters in _COUNTERS for name in counters.drafts),
    draft_tokens=tuple(name for counters in _COUNTERS for name in counters.draft_tokens),
    accepted_tokens=tuple(name for counters in _COUNTERS for name in counters.accepted_tokens),
    accepted_by_position=tuple(name for counters in _COUNTERS for name in counters.accepted_by_position),
    open_requests=tuple(name for counters in _COUNTERS for name in counters.open_requests),
)
"""The names of all kinds of servers."""


@dataclass(frozen=True, slots=True)
class Growth:
    """Growth of a counter during a load; ``name`` has the names that the server uses."""

    name: str
    count: int


def measure_growth(samples: Sequence[PrometheusSample], names: Iterable[str]) -> Growth | None:
    """Total growth of the counters called ``names``; None without two readings of any of them."""
    growths: dict[str, float] = {}
    for name in names:
        readings = [reading for sample in samples if (reading := total(sample.values, name)) is not None]
        if len(readings) > 1:
            growths[name] = readings[-1] - readings[0]
    return Growth(" + ".join(growths), round(sum(growths.values()))) if growths else None


def prefix_hit_frac(samples: Sequence[PrometheusSample], requests: Sequence[RequestRecord]) -> float | None:
    """Share of the prompt tokens of measured requests that came from a cache, by the server's counters or else by
    usage.
    """
    grown = measure_growth(samples, COUNTERS.prefix_hits)
    prompt = total_of([request.prompt_tokens for request in requests])
    hits = total_of([request.cached_tokens for request in requests]) if grown is None else grown.count
    return None if not prompt or hits is None else min(1.0, hits / prompt)


def measure_growth_by_position(samples: Sequence[PrometheusSample], names: Container[str]) -> tuple[int, ...]:
    """Growth of the counters called ``names`` at each position from 0; empty without two readings of any."""
    readings: list[defaultdict[int, float]] = []
    for sample in samples:
        counts: defaultdict[int, float] = defaultdict(float)  # summed over all series of a position
        for key, value in sample.values.items():
            if key.partition("{")[0] in names and (position := _POSITION.search(key)) is not None:
                counts[int(position[1])] += value
        readings += [counts] if counts else []
    if len(readings) < 2:
        return ()
    first, last = readings[0], readings[-1]
    return tuple(round(last[position] - first[position]) for position in range(max(last) + 1))


def total(values: Mapping[str, float], name: str) -> float | None:
    """A counter or gauge summed over its series; None if the page has none of them."""
    series = [value for key, value in values.items() if key.partition("{")[0] == name]
    return sum(series) if series else None


def is_idle(values: Mapping[str, float]) -> bool:
    """True if the server reports no running or waiting request."""
    return not any(total(values, name) for name in COUNTERS.open_requests)


def token_counts(values: Mapping[str, float]) -> dict[str, float]:
    """The counters that checks compare; two equal readings mean that the server has caught up."""
    own = COUNTERS
    names = (*own.generated_tokens, *own.prefix_hits, *own.drafts, *own.draft_tokens, *own.accepted_tokens)
    return {name: count for name in names if (count := total(values, name)) is not None}
