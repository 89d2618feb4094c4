"""Several tests at once: every deciding metric in every cell is a chance to be wrong.

Sides that share blocks: one level for all tests such that, where nothing changed, any of them is rejected in at
most alpha (max-T by sign flips). The blocks are what is independent. If nothing changed, each block could as well
have come out the other way round, for all metrics and cells of the block together; so the same signs go to the
residuals of every test, each choice of signs gives every test a statistic, and the level is what the smallest of
their p-values undercuts in the share alpha of all choices. Three metrics that say nearly the same cost next to
nothing, and independent ones as much as Bonferroni asks for, which is the least level that is ever taken. P. H.
Westfall, S. S. Young, *Resampling-Based Multiple Testing*, Wiley 1993; the intervals at that level hold together.

Sides that share no blocks: S. Holm, *A simple sequentially rejective multiple test procedure*, Scandinavian
Journal of Statistics 6, 1979, 65-70: the p-values in ascending order meet alpha / m, alpha / (m - 1), ... until
one fails; with it fail all that follow. The chance that any verdict is wrong is then at most alpha, however the
tests depend on one another.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtr

MAX_ENUMERATED_BLOCKS: Final = 12
"""Up to so many blocks all 2^(n - 1) choices of signs are taken."""
_DRAWN_SIGNS: Final = 4_000
"""With more blocks; always the same ones."""
_SEED: Final = 1993


@dataclass(frozen=True, slots=True)
class BlockScores:
    """One test: what each block, beyond the centre, adds to its estimate.

    ``scores`` are the residuals of the blocks times their weights in the estimate.
    """

    blocks: tuple[int, ...]
    scores: tuple[float, ...]
    num_effective: float
    """So many blocks of equal weight know the centre as well: 1 / sum of the squared weights."""


def joint_level(tests: Sequence[BlockScores], alpha: float) -> float:
    """The level, from alpha / m to alpha, at which all m tests are judged together.

    Each statistic becomes the p-value of its t-test, in units of what ``alpha`` of its own values undercut, so that
    tests of different blocks can be held against one another: what counts is how much more often any of them is
    small than one alone.
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
    effective = np.maximum([test.num_effective for test in tests], 2.0)
    squared = (_signs(len(blocks)) @ scores.T) ** 2
    t = np.sqrt((effective - 1) * squared / np.maximum(effective - squared, 1e-12))
    p_values = 2 * stdtr(effective - 1, -t)
    alone = np.maximum(_lower_quantile(p_values, alpha), 1e-12)
    level = alpha * float(_lower_quantile(np.min(p_values / alone, axis=1)[:, None], alpha)[0])
    return min(max(level, alpha / len(tests)), alpha)


def _lower_quantile(values: NDArray[np.float64], share: float) -> NDArray[np.float64]:
    """What ``share`` of each column undercuts."""
    ordered = np.sort(values, axis=0)
    rank = max(share * len(ordered) - 1, 0.0)
    below = int(rank)
    above = min(below + 1, len(ordered) - 1)
    quantiles: NDArray[np.float64] = ordered[below] + (rank - below) * (ordered[above] - ordered[below])
    return quantiles


@lru_cache(maxsize=16)
def _signs(num_blocks: int) -> NDArray[np.float64]:
    """Choices of signs, a row each. The last block keeps its own: turning all turns no |statistic|."""
    if num_blocks > MAX_ENUMERATED_BLOCKS:
        stream = np.random.default_rng([_SEED, num_blocks])
        is_turned = stream.random((_DRAWN_SIGNS, num_blocks)) < 0.5
    else:
        is_turned = (np.arange(2 ** (num_blocks - 1))[:, None] >> np.arange(num_blocks)) & 1 == 1
    return np.where(is_turned, -1.0, 1.0)


def holm_levels(p_values: Sequence[float], alpha: float) -> tuple[float, ...]:
    """The alpha at which each test is judged, in the order of ``p_values``.

    A test decides where its p-value is no larger. Tests after the first that fails are judged at its level.
    """
    levels = [0.0] * len(p_values)
    level, has_failed = 0.0, False
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        if not has_failed:
            level = alpha / (len(p_values) - rank)
            has_failed = p_values[index] > level
        levels[index] = level
    return tuple(levels)
