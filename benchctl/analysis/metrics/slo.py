"""Requests against their objective (SLO): which of them kept all limits, and by how much.

The ratio of a request is the largest of its latencies over their limits, so a request with a ratio of 1 or less
kept all of them. Limits hold for each request as a whole: shares that keep each limit alone are larger.
``slo_ratio``, the quantile of these ratios at the required share, is 1 or less exactly where that share was kept.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from benchctl.analysis.metrics.latency import quotient, request_durations_ns, smallest_sample
from benchctl.records.columns import Floats
from benchctl.records.record import RequestRecord
from benchctl.units import NS_PER_MS


def request_ratios(requests: Sequence[RequestRecord], limits_ms: Mapping[str, float], factor: float) -> Floats:
    """The ratio of each request, with times multiplied by ``factor``; infinite without a complete answer."""
    durations_ns = [request_durations_ns(request) for request in requests]
    ratios = [max(each[name] / limit for name, limit in limits_ms.items()) for each in durations_ns]
    return np.array(ratios) / NS_PER_MS * factor


def slo_metrics(ratios: Floats, share: float, duration_s: float | None) -> dict[str, float | None]:
    """``SLO_METRICS`` of requests with these ratios, which took ``duration_s``; ``share`` of them must keep all.

    ``slo_ratio`` is the smallest ratio that at least this share has or is below; unknown of fewer requests than
    such a percentile needs, and where requests without an answer reach into it.
    """
    num_kept, least = int((ratios <= 1).sum()), math.ceil(share * len(ratios) - 1e-9)
    is_known = len(ratios) >= smallest_sample(100 * share)
    ratio = float(np.partition(ratios, least - 1)[least - 1]) if is_known else math.inf
    return {
        "goodput": quotient(num_kept, duration_s) if len(ratios) else None,
        "slo_attained_frac": quotient(num_kept, len(ratios)),
        "slo_ratio": ratio if math.isfinite(ratio) else None,
    }
