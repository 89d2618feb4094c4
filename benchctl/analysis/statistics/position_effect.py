"""The effect of a run's position in its block, estimated once from all runs of an experiment.

A machine that drifts within a block makes later runs slower. For the value y of the run of arm j at position p of
block b, the model is the analysis of variance of a row-column design,

    ln y = block_b + arm_j + β p

fitted by least squares over all runs that count. With z the positions less what blocks and arms explain of them,
β = Σ z y / Σ z² (R. Frisch, F. V. Waugh, *Partial time regressions as compared with individual trends*,
Econometrica 1, 1933, 387-401). Every comparison of two arms then removes the same β from both, so that each arm has
one mean, whatever it is compared with.

The effect is removed in three places, each with the slope of its own quantity: from the ratio of two arms and its
two centres (``ArmPair.ratio``), from the parts that their times are divided into (``compare/cells``), and from the
centre of an arm that is compared with none (``adjusted_level``). Values of single runs are shown as measured.
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from benchctl.analysis.statistics.estimate import (
    DEFAULT_ESTIMATOR,
    MIN_PAIRED_BLOCKS,
    Estimator,
    PooledSlope,
    estimate_paired,
    logs_at_middle,
)

RunKey: TypeAlias = tuple[int, str]
"""Block and arm of a run."""


def pooled_slope(values: Mapping[RunKey, float | None], positions: Mapping[RunKey, int]) -> PooledSlope | None:
    """β of the logarithms of those values that are known and positive.

    None below six blocks, and where the effects of positions and arms are confounded.
    """
    logs = {key: math.log(value) for key, value in values.items() if value and value > 0}
    z, y = _residual_positions(tuple((key, positions[key]) for key in logs)), np.array(list(logs.values()))
    if z is None:
        return None
    information = float(z @ z)
    return PooledSlope(float(z @ (y - y.mean())) / information, information)


@lru_cache(maxsize=64)
def _residual_positions(positions: tuple[tuple[RunKey, int], ...]) -> NDArray[np.float64] | None:
    """z: the positions minus their least-squares fit by blocks and arms."""
    of_blocks, of_arms = [block for (block, _), _ in positions], [arm for (_, arm), _ in positions]
    blocks, arms = sorted(set(of_blocks)), sorted(set(of_arms))
    if len(blocks) < MIN_PAIRED_BLOCKS or len(arms) < 2:
        return None
    in_block = np.eye(len(blocks))[[blocks.index(block) for block in of_blocks]]
    indicators = np.hstack([in_block, np.eye(len(arms))[[arms.index(arm) for arm in of_arms]]])
    p = np.array([position for _, position in positions], dtype=float)
    z: NDArray[np.float64] = p - indicators @ np.linalg.lstsq(indicators, p, rcond=None)[0]
    # Less is rounding: the positions of the runs are fixed by their blocks and arms
    return z if float(z @ z) > 1e-9 else None


def adjusted_level(
    values: Sequence[float],
    offsets: Sequence[float] | None,
    slope: PooledSlope | None,
    estimator: Estimator = DEFAULT_ESTIMATOR,
) -> tuple[float, tuple[float, ...]]:
    """The centre of one arm's values at the middle of a block, exp of that of ln y - β offset, and their weights.

    The centre is that of the ``estimator``: the mean, or one in which outliers count little. ``offsets`` are the
    positions of its runs minus the middle; without them or a slope nothing is adjusted.
    """
    effect = 0.0 if slope is None else slope.log_per_position
    if not effect and len(set(values)) == 1:
        return values[0], ()
    estimate = estimate_paired(logs_at_middle(values, offsets, effect), estimator=estimator)
    return math.exp(estimate.log_ratio), estimate.block_weights
