"""Levels of the intervals at the looks of a stopping rule.

Repeated confidence intervals: each look has an interval of a level of its own, such that the chance that any of
them misses the truth is at most alpha. They hold at whichever look an experiment ends, and for whatever reason. C.
Jennison, B. W. Turnbull, *Interim analyses: the repeated confidence interval approach*, Journal of the Royal
Statistical Society B 51, 1989, 305-361.
"""

import math
from bisect import bisect_left
from typing import Final

TABULATED_ALPHA: Final = 0.05
SMALL_ALPHA: Final = 0.01
MOST_BLOCKS: Final = (12, 24, 48, 100)
"""Largest number of blocks for which each of the first shares holds."""
SHARES: Final[dict[int, tuple[float, ...]]] = {
    2: (0.457, 0.431, 0.426, 0.421, 0.417, 0.412),
    3: (0.349, 0.316, 0.306, 0.300, 0.297, 0.284),
    4: (0.294, 0.263, 0.253, 0.247, 0.242, 0.223),
    5: (0.269, 0.233, 0.222, 0.215, 0.210, 0.196),
    6: (0.242, 0.208, 0.196, 0.192, 0.187, 0.175),
    7: (0.230, 0.192, 0.179, 0.175, 0.172, 0.158),
    8: (0.210, 0.180, 0.170, 0.163, 0.159, 0.145),
    10: (0.182, 0.160, 0.149, 0.144, 0.141, 0.129),
    12: (0.162, 0.153, 0.137, 0.132, 0.127, 0.113),
    15: (0.143, 0.136, 0.124, 0.118, 0.113, 0.098),
    20: (0.121, 0.121, 0.109, 0.103, 0.098, 0.087),
}
"""By number of looks: the level of each look but the last, as a share of that of all looks together. For 5 % and
the most blocks of ``MOST_BLOCKS``; for 5 % and any number; for 1 % and any number. Computed by
``benchmarks/verdict/look_levels.py`` for t statistics of cumulative blocks, 6 at the first look and evenly more."""


def look_weights(num_looks: int) -> tuple[float, ...]:
    """The level of each look in that of the first.

    The last has the square root of their number: early ends come hardly later than with equal levels, and the
    interval after the last block is not much wider than without looks.
    """
    return (*(1.0,) * (num_looks - 1), math.sqrt(num_looks))


def look_alpha(alpha: float, num_looks: int, most_blocks: float, *, is_last: bool) -> float:
    """The level of one of ``num_looks`` looks whose intervals together miss in at most ``alpha``.

    Between the entries of the table it is that of more looks and more blocks; for other levels, and where that is
    more, the share of the union bound.
    """
    if num_looks == 1:
        return alpha
    weights = look_weights(num_looks)
    row = next((shares for number, shares in SHARES.items() if number >= num_looks), None)
    share = 1 / sum(weights)
    if row is not None and alpha >= SMALL_ALPHA:
        column = bisect_left(MOST_BLOCKS, most_blocks) if alpha >= TABULATED_ALPHA - 1e-9 else -1
        share = max(share, row[column])
    return alpha * share * weights[-1 if is_last else 0]
