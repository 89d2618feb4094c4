"""Lengths of natural answers.

The distribution is made so that 50 questions with 16 samples each give what was published for GSM8K with
Qwen2.5-7B: about 237,675 output tokens and a longest answer that keeps the engine busy for 1,193 steps. The
published record holds no individual lengths; the shape between the two is an assumption. To keep totals and
makespan stable for any 50 questions, the samples of one request are stratified (each draws from its own
n-quantile) and the last percent of answers runs close to the bound.
"""

import itertools
from bisect import bisect_right
from typing import Final

from benchctl.guided.params import GuidanceParams
from benchctl.workload.seeded import named_stream

_QUANTILES: Final = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.97, 0.99, 1.0)
_LENGTHS: Final = (80, 141, 188, 254, 345, 464, 690, 1165, 1195)
"""Length at each of the quantiles, linear between them: mean 297.3 tokens."""

_TRADEOFF: Final = ((-100.0, 278.905), (-10.0, 343.32375), (-5.0, 351.300625), (-2.0, 351.300625), (0.0, 353.2875))
"""Published mean lengths by scale of ``centered_exp``. The values at -5 (351.98) and -2 (350.62) are out of
order by less than their noise of 5.9 tokens; both are set to their mean, which makes the curve monotone."""


def natural_quantiles(*, seed: int, prompt_digest: str, n: int) -> list[float]:
    """Quantiles of n choices in the distribution of lengths, each in [0, 1).

    Choice c lies in stratum p(c) of n equal ones, p a permutation drawn for the prompt.
    """
    draw = named_stream(seed, f"length:{prompt_digest}")
    strata = list(range(n))
    draw.shuffle(strata)
    return [(stratum + draw.random()) / n for stratum in strata]


def natural_length(quantile: float) -> int:
    """Tokens of an answer at ``quantile``: the published-like table, linear between its points."""
    upper = min(bisect_right(_QUANTILES, quantile), len(_QUANTILES) - 1)
    low, high = _QUANTILES[upper - 1], _QUANTILES[upper]
    share = (quantile - low) / (high - low)
    return round(_LENGTHS[upper - 1] + share * (_LENGTHS[upper] - _LENGTHS[upper - 1]))


def guided_length_ratio(guidance: GuidanceParams | None) -> float:
    """Length under guidance over length without.

    Only ``centered_exp`` has published lengths: below 0 the ratio follows them, linear between the points and
    constant below -100; above 0 it is the inverse of the ratio at the mirrored scale, an assumption. All other
    modes and hard constraints leave the length as it is.
    """
    if guidance is None or guidance.has_target or guidance.mode != "centered_exp":
        return 1.0
    shorter = _shortening(-abs(guidance.value_scale))
    return shorter if guidance.value_scale <= 0 else 1 / shorter


def _shortening(scale: float) -> float:
    neutral = _TRADEOFF[-1][1]
    if scale <= _TRADEOFF[0][0]:
        return _TRADEOFF[0][1] / neutral
    for (low, length), (high, longer) in itertools.pairwise(_TRADEOFF):
        if scale <= high:
            return (length + (scale - low) / (high - low) * (longer - length)) / neutral
    return 1.0
