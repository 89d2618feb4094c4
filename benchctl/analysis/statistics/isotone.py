"""The size at which a latency that rises with the load crosses its limit, by isotonic regression."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Crossing(NamedTuple):
    """The largest size at which an objective holds; without one it is censored by the sizes that were sent."""

    size: float | None
    """Continuous, such as 61.4 slots; None where no sent size holds, or none breaks."""
    holds: float | None = None
    """Largest sent size up to ``size``; None where none holds."""
    breaks: float | None = None
    """Smallest sent size above it; None where none breaks."""
    elasticity: float | None = None
    """d ln(ratio) / d ln(size) there. None where it is not known: ``size`` is then only the geometric mean of
    ``holds`` and ``breaks``, which breaks without a latency of its own.
    """


def crossing(sizes: Sequence[float], log_ratios: Sequence[float], breaks_from: float | None = None) -> Crossing:
    """The crossing of 0 by y = ln(latency / limit) over x = ln(size).

    Isotonic least squares with equal weights (pool adjacent violators; Barlow et al. 1972). A pool stands as one
    point at its mean x, so that the line through the pools rises strictly and crosses once:
    ln C = X_j - Y_j (X_j+1 - X_j) / (Y_j+1 - Y_j), for the first j with Y_j <= 0 < Y_j+1.

    Args:
        sizes: ascending and positive.
        log_ratios: y of each size.
        breaks_from: the smallest size that breaks without a latency of its own, such as an overloaded one; sizes
            from there on are ignored.
    """
    below = [size for size in sizes if breaks_from is None or size < breaks_from]
    if not below:
        return Crossing(None, breaks=breaks_from)
    from scipy.optimize import isotonic_regression  # noqa: PLC0415 - 0.3 s, and few experiments have a capacity

    fit = isotonic_regression(log_ratios[: len(below)])
    pools = fit.blocks
    centres, levels = np.add.reduceat(np.log(below), pools[:-1]) / np.diff(pools), fit.x[pools[:-1]]
    num_holding = int(np.sum(levels <= 0))
    size = slope = None
    if num_holding == 0:
        return Crossing(None, breaks=below[0])
    if num_holding < len(levels):
        (x, next_x), (y, next_y) = (each[num_holding - 1 : num_holding + 1].tolist() for each in (centres, levels))
        slope = (next_y - y) / (next_x - x)
        size = math.exp(x - y / slope)
    elif breaks_from is not None:
        size = math.sqrt(below[-1] * breaks_from)
    return Crossing(
        size,
        holds=max((each for each in below if size is None or each <= size), default=None),
        breaks=min((each for each in below if size is not None and each > size), default=breaks_from),
        elasticity=slope,
    )
