"""The measured costs of speculation: time that a draft token and bonus tokens add to a step."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev

import numpy as np

from benchctl.analysis.statistics.intervals import t_quantile
from benchctl.analysis.statistics.side_ratio import SideRatio
from benchctl.steptime.speculation.acceptance import LEVEL
from benchctl.steptime.speculation.estimate import Estimate


def fit_costs(
    drafts: Mapping[str, tuple[int, bool]], ratios: Mapping[str, SideRatio]
) -> tuple[Estimate | None, Estimate | None]:
    """c and d of step ratio = 1 + K c + d, by least squares in each block; d where arms differ in bonus tokens.

    ``drafts`` has the draft tokens of each arm and whether it has bonus tokens, ``ratios`` its step time over that
    of the baseline. Both are None without a block that all of these arms share.
    """
    labels = [label for label in drafts if label in ratios]
    if not labels:
        return None, None
    has_both = all(len(set(values)) > 1 for values in zip(*(drafts[label] for label in labels), strict=True))
    design = np.array([drafts[label][: 2 if has_both else 1] for label in labels], dtype=float)
    of_blocks = [ratios[label].block_ratios for label in labels]
    shared = sorted(set.intersection(*(set(each) for each in of_blocks)))
    costs = [
        np.linalg.lstsq(design, np.array([each[block] - 1 for each in of_blocks], dtype=float))[0]
        for block in shared
    ]
    draft = mean_over_blocks([float(cost[0]) for cost in costs])
    return draft, mean_over_blocks([float(cost[1]) for cost in costs]) if has_both else None


def mean_over_blocks(values: Sequence[float | None]) -> Estimate | None:
    """Mean over blocks with the interval of Student's t; None where it is unknown in all of them."""
    known_values = [value for value in values if value is not None]
    if not known_values:
        return None
    mean = fmean(known_values)
    if len(known_values) < 2:
        return Estimate(mean)
    half = t_quantile((1 + LEVEL) / 2, len(known_values) - 1) * stdev(known_values) / math.sqrt(len(known_values))
    return Estimate(mean, mean - half, mean + half)


def step_of(num_draft_tokens: int, draft: Estimate, backfill: Estimate | None) -> Estimate:
    """1 + K c + d; ``backfill`` is None for a server without bonus tokens, or where it is unknown."""
    parts = [draft.times(num_draft_tokens), *([] if backfill is None else [backfill])]
    value = 1 + sum(part.value for part in parts)
    half = math.hypot(
        *((part.high - part.low) / 2 for part in parts if part.high is not None and part.low is not None)
    )
    return (
        Estimate(value, value - half, value + half)
        if all(part.low is not None for part in parts)
        else Estimate(value)
    )
