"""The latency of a request: time to first token, more tokens, or more time for each.

e2el = ttft + m t, with m tokens after the first and t = (last - first token) / m. For one request on both sides

    e2el_B - e2el_A = (ttft_B - ttft_A) + (m_B - m_A) (t_A + t_B) / 2 + (t_B - t_A) (m_A + m_B) / 2

exactly (E. M. Kitagawa, *Components of a difference between two rates*, JASA 50, 1955, 1168-1194). The parts of a
run are means over the requests that completed on both sides. If one side has no token after the first, its t is
that of the other, so the whole difference is one of tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import fmean
from typing import Final

import numpy as np

from benchctl.analysis.attribution.estimate import Contribution, PairDesign, estimate_contributions
from benchctl.analysis.attribution.run_time import Latency, RunTimeBreakdown

TTFT: Final = "time to first token"
TOKENS: Final = "number of tokens"
TIME_EACH: Final = "time per token"


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencySplit:
    """Invariant: ``parts`` add up to ``whole``, the difference of the mean latency of a request."""

    whole: Contribution
    parts: tuple[Contribution, ...]
    """In this order: ``TTFT``, ``TOKENS``, ``TIME_EACH``."""
    num_requests: int
    """Fewest requests that any two runs share."""
    warning: str | None = None


Requests = Mapping[str, Latency]


def split_latency(
    a: Sequence[RunTimeBreakdown], b: Sequence[RunTimeBreakdown], design: PairDesign
) -> LatencySplit | None:
    """Parts of the latency; None if the latency of a run's requests is unknown, or two runs share none."""
    a_latencies, b_latencies = ([run.latencies for run in side if run.latencies] for side in (a, b))
    if not a or not b or len(a_latencies) < len(a) or len(b_latencies) < len(b):
        return None
    combinations = (
        zip(a_latencies, b_latencies, strict=True) if design.is_paired else product(a_latencies, b_latencies)
    )
    pairs = [(x, y, x.keys() & y.keys()) for x, y in combinations]
    shared = min(len(common) for _, _, common in pairs)
    if not shared:
        return None
    names = ("request latency", TTFT, TOKENS, TIME_EACH)
    whole, *parts = estimate_contributions(names, a_latencies, b_latencies, _split, design)
    both = [
        fmean(side[name].ttft_s + side[name].span_s for side in (x, y) for name in common) for x, y, common in pairs
    ]
    middle, half = fmean(both), whole.added_s / 2
    bunched = sum(run.is_bunched for run in (*a, *b))
    return LatencySplit(
        whole=replace(whole, a_s=middle - half, b_s=middle + half),
        parts=tuple(parts),
        num_requests=shared,
        warning=f"tokens reached the client in bursts in {bunched} of {len(a) + len(b)} runs" if bunched else None,
    )


def _split(x: Requests, y: Requests) -> list[float]:
    """Differences of the shared requests' means: whole, time to first token, tokens, time per token."""
    names = sorted(x.keys() & y.keys())
    a, b = np.array([x[name] for name in names]).T, np.array([y[name] for name in names]).T
    m_a, m_b = a[2], b[2]
    t_a, t_b = (np.divide(span, m, out=np.full(len(names), np.nan), where=m > 0) for _, span, m in (a, b))
    t_a, t_b = np.where(np.isnan(t_a), t_b, t_a), np.where(np.isnan(t_b), t_a, t_b)
    ttft = b[0] - a[0]
    tokens = np.nan_to_num((m_b - m_a) * (t_a + t_b) / 2)
    time_per_token = np.nan_to_num((t_b - t_a) * (m_a + m_b) / 2)
    whole = ttft + b[1] - a[1]
    return [float(part.mean()) for part in (whole, ttft, tokens, time_per_token)]
