"""Effects of the order of an experiment: position in the block, drift over the blocks, outlier blocks.

They never change a verdict. They reveal a machine that drifted, a ratio that moved during the experiment, and
blocks whose logs are worth reading.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtr

OUTLIER_SCORE: Final = 3.5
"""Modified z-score beyond which a block is an outlier: B. Iglewicz, D. C. Hoaglin, *How to Detect and Handle
Outliers*, ASQC Quality Press 1993."""
_MIN_POINTS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Slope:
    """Slope of a straight line through log values, with the two-sided p-value of a slope of 0."""

    log_per_unit: float
    standard_error: float
    p_value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderEffects:
    """Slopes of log values; None where a slope cannot be estimated."""

    position: Slope | None
    """Added to a run by each position later in its block."""
    ratio_drift: Slope | None
    """Added to the ratio by each block."""
    machine_drift: Slope | None
    """Added to both sides alike by each block."""


def order_effects(
    a: Sequence[float], b: Sequence[float], blocks: Sequence[int], positions: Sequence[float] | None
) -> OrderEffects:
    """The slopes of both sides' log values by block; ``positions`` holds the position of B minus that of A."""
    before, after = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    return OrderEffects(
        position=None if positions is None else _slope(positions, after - before),
        ratio_drift=_slope(blocks, after - before),
        machine_drift=_slope(blocks, (before + after) / 2),
    )


def _slope(x: Sequence[float], y: NDArray[np.float64]) -> Slope | None:
    """Least squares: slope Sxy / Sxx, standard error sqrt(residuals / (n - 2) / Sxx), test against t(n - 2)."""
    if len(x) < _MIN_POINTS or len(set(x)) < 2 or float(np.ptp(y)) == 0:
        return None
    off_x, off_y = np.asarray(x, dtype=float), y - y.mean()
    off_x -= off_x.mean()
    squares, df = float(off_x @ off_x), len(x) - 2
    slope = float(off_x @ off_y) / squares
    residual = off_y - slope * off_x
    standard_error = math.sqrt(float(residual @ residual) / df / squares)
    p_value = 2 * float(stdtr(df, -abs(slope) / standard_error)) if standard_error > 0 else 0.0
    return Slope(log_per_unit=slope, standard_error=standard_error, p_value=p_value)


def outlier_indices(differences: Sequence[float]) -> tuple[int, ...]:
    """Indices whose modified z-score 0.6745 |d - median| / MAD exceeds 3.5. Outliers are marked, never dropped."""
    if len(differences) < _MIN_POINTS:
        return ()
    centre = median(differences)
    spread = median(abs(d - centre) for d in differences)
    if spread == 0:
        return ()
    return tuple(i for i, d in enumerate(differences) if 0.6745 * abs(d - centre) / spread > OUTLIER_SCORE)
