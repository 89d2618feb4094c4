"""Counters that servers keep of their own work, by the names under which each kind of server states them.

A counter is summed over its series: one for each model, replicate or source. What grew between the first and the
last reading of a run belongs to its load alone, because both are taken while nothing runs.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from benchctl.records.run import PrometheusSample

GENERATED_TOKENS: Final = (
    "vllm:generation_tokens_total",
    "sglang:generation_tokens_total",
    "llamacpp:tokens_predicted_total",
)
"""Output tokens. The simulator uses the names of vLLM."""
PREFIX_HITS: Final = (
    "vllm:prefix_cache_hits_total",
    "vllm:external_prefix_cache_hits_total",
    "sglang:cached_tokens_total",
)
"""Prompt tokens that were found in a cache in place of being computed. vLLM leaves out those of a request that it
had preempted and takes up again, and counts each of ``n`` choices for itself."""
REQUESTS_UNDER_WAY: Final = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "sglang:num_running_reqs",
    "sglang:num_queue_reqs",
    "llamacpp:requests_processing",
    "llamacpp:requests_deferred",
)
"""Gauges that are 0 while a server is idle."""


@dataclass(frozen=True, slots=True)
class Growth:
    """By how much a counter grew during a load; ``names`` are those that the server states."""

    names: tuple[str, ...]
    count: int

    @property
    def name(self) -> str:
        return " + ".join(self.names)


def measure_growth(samples: Sequence[PrometheusSample], names: Iterable[str]) -> Growth | None:
    """What the counters called ``names`` grew by together; None without two readings of any of them."""
    stated = tuple(name for name in names if sum(total(s.values, name) is not None for s in samples) > 1)
    if not stated:
        return None
    grown = 0.0
    for name in stated:
        readings = [reading for sample in samples if (reading := total(sample.values, name)) is not None]
        grown += readings[-1] - readings[0]
    return Growth(stated, round(grown))


def total(values: Mapping[str, float], name: str) -> float | None:
    """A counter or gauge summed over its series; None where the page has none of them."""
    series = [value for key, value in values.items() if key.partition("{")[0] == name]
    return sum(series) if series else None


def is_idle(values: Mapping[str, float]) -> bool:
    """Whether the server says of no request that it runs or waits."""
    return not any(total(values, name) for name in REQUESTS_UNDER_WAY)


def token_counts(values: Mapping[str, float]) -> dict[str, float]:
    """The counters that are held against other accounts: two equal readings say that the server has caught up."""
    return {name: count for name in (*GENERATED_TOKENS, *PREFIX_HITS) if (count := total(values, name)) is not None}
