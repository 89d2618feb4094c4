"""Prompt tokens that servers of others found in their prefix caches: whether both sides found as many.

A server that benchctl starts is fresh, and its cache is an option of the profile. One that is attached has the
cache of its owner, filled by whatever was asked before: what is cached costs nothing, so sides that found unequal
shares are not compared at equal work.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from benchctl.analysis.metrics.latency import measured, total
from benchctl.analysis.metrics.server_counters import PREFIX_HITS, measure_growth
from benchctl.records.loaded import LoadedRun
from benchctl.records.schema import ResultWarning

TOLERATED_SHARE: Final = 0.05
"""Of all prompt tokens: the difference below which caches count as equally warm."""


def prefix_warnings(
    a_runs: Sequence[LoadedRun], b_runs: Sequence[LoadedRun], where: str
) -> Iterable[ResultWarning]:
    """A warning where the sides, or the runs of one side, found different shares of their prompts in a cache."""
    a_shares, b_shares = (_shares(runs) for runs in (a_runs, b_runs))
    if not a_shares or not b_shares:
        return
    lowest, highest = min(*a_shares, *b_shares), max(*a_shares, *b_shares)
    if highest - lowest <= TOLERATED_SHARE:
        return
    message = (
        f"prompt tokens found in the servers' prefix caches: {_percent(a_shares)} on side A, {_percent(b_shares)} "
        "on side B; what is cached is not computed, so the difference is partly that of the caches"
    )
    yield ResultWarning(code="prefix-hits-differ", message=message, where=where)


def hit_share(run: LoadedRun) -> float | None:
    """Share of the prompt tokens of a load that came from a cache, by the server's counters or else by usage."""
    requests = measured(run.requests)
    prompt = total([request.prompt_tokens for request in requests])
    grown = measure_growth(run.prometheus, PREFIX_HITS)
    hits = total([request.cached_tokens for request in requests]) if grown is None else grown.count
    return None if not prompt or hits is None else min(1.0, hits / prompt)


def _shares(runs: Iterable[LoadedRun]) -> list[float]:
    """Of servers that benchctl did not start."""
    shares = (hit_share(run) for run in runs if not run.record.argv)
    return [share for share in shares if share is not None]


def _percent(shares: Sequence[float]) -> str:
    lowest, highest = f"{min(shares):.0%}", f"{max(shares):.0%}"
    return lowest if lowest == highest else f"{lowest} to {highest}"
