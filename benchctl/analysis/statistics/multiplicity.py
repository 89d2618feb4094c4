"""Correction for several tests: every deciding metric in every cell is a chance to be wrong.

Sides that share blocks: one level for all tests such that, where nothing changed, the chance that any is rejected
is at most alpha (max-T). Only blocks are independent: a disturbance moves all metrics of a block, and a slow
baseline moves all cells. So the residuals of all tests are rotated together, by the same rotation of the blocks (O.
Langsrud, *Rotation tests*, Statistics and Computing 15, 2005, 53-60), which preserves their correlation and gives
each test a t statistic; the level is the alpha quantile, over rotations, of the smallest of their p-values. Sign
flips are rotations too, but six blocks have only 32 of them. Three nearly equal metrics cost next to nothing, and
independent ones as much as with Bonferroni, whose level is the lower bound. Tests that decide leave the others a
level of their own, step by step, as with Holm (P. H. Westfall, S. S. Young, *Resampling-Based Multiple Testing*,
Wiley 1993).

Sides that share no blocks: S. Holm, *A simple sequentially rejective multiple test procedure*, Scandinavian
Journal of Statistics 6, 1979, 65-70: the p-values in ascending order meet alpha / m, alpha / (m - 1), ... until
one fails; with it fail all that follow. The chance that any verdict is wrong is then at most alpha, however the
tests depend on one another.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtr

_NUM_DIRECTIONS: Final = 4_000
_SEED: Final = 1993
"""Fixed, so that the level of a comparison is always the same."""


@dataclass(frozen=True, slots=True)
class BlockScores:
    """One test: the contribution of each block to its estimate, beyond the centre."""

    blocks: tuple[int, ...]
    scores: tuple[float, ...]
    """Residuals of the blocks times their weights in the estimate."""


def joint_levels(
    tests: Sequence[BlockScores], decides: Callable[[int, float], bool], alpha: float
) -> tuple[float, ...]:
    """The alpha of each test: that of all tests for those that decide at it, then that of the others, until none of
    them decides. ``decides(i, level)`` is true where test i decides at a level.
    """
    levels, level, remaining = [alpha] * len(tests), 0.0, list(range(len(tests)))
    while remaining:
        level = max(level, joint_level([tests[i] for i in remaining], alpha))
        for i in remaining:
            levels[i] = level
        undecided = [i for i in remaining if not decides(i, level)]
        if len(undecided) == len(remaining):
            break
        remaining = undecided
    return tuple(levels)


def joint_level(tests: Sequence[BlockScores], alpha: float) -> float:
    """The level, from alpha / m to alpha, that m tests share.

    For scores of length 1, the cosine c of a random direction is a t statistic, t = c sqrt(n - 1) / sqrt(1 - c^2).
    The level belongs to the c that the largest of all tests exceeds in the share alpha of the directions.
    """
    if len(tests) < 2:
        return alpha
    blocks = sorted({block for test in tests for block in test.blocks})
    column = {block: i for i, block in enumerate(blocks)}
    scores = np.zeros((len(tests), len(blocks)))
    for row, test in zip(scores, tests, strict=True):
        row[[column[block] for block in test.blocks]] = test.scores
    scale = np.sqrt(np.sum(scores**2, axis=1, keepdims=True))
    scores = np.divide(scores, scale, out=np.zeros_like(scores), where=scale > 0)
    cosines = np.max(np.abs(_directions(len(blocks)) @ scores.T), axis=1)
    cosine, df = float(np.quantile(cosines, 1 - alpha)), len(blocks) - 1
    level = 2 * float(stdtr(df, -cosine * math.sqrt(df / max(1 - cosine**2, 1e-12))))
    return min(max(level, alpha / len(tests)), alpha)


@lru_cache(maxsize=16)
def _directions(num_blocks: int) -> NDArray[np.float64]:
    """Unit vectors of blocks, a row each, uniformly distributed over all directions."""
    vectors = np.random.default_rng([_SEED, num_blocks]).normal(size=(_NUM_DIRECTIONS, num_blocks))
    directions: NDArray[np.float64] = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return directions


def holm_levels(p_values: Sequence[float], alpha: float) -> tuple[float, ...]:
    """The alpha of each test, in the order of ``p_values``.

    A test decides where its p-value does not exceed it. Tests after the first that fails get the level of that one.
    """
    levels = [0.0] * len(p_values)
    level, has_failed = 0.0, False
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        if not has_failed:
            level = alpha / (len(p_values) - rank)
            has_failed = p_values[index] > level
        levels[index] = level
    return tuple(levels)


def holm_p_values(p_values: Sequence[float]) -> tuple[float, ...]:
    """The p-values corrected by Holm's procedure, in their order: the least alpha at which each decides."""
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = largest
    return tuple(corrected)
