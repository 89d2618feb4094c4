"""What the order of an experiment did: the effect of the place in a block, trends over blocks, odd blocks.

None of it changes a verdict. It tells whether the machine drifted, whether the change itself moved while it was
measured, and which blocks deserve a look at their logs.
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
"""Modified z-score beyond which a block stands out: B. Iglewicz, D. C. Hoaglin, *How to Detect and Handle
Outliers*, ASQC Quality Press 1993."""
_MIN_POINTS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Slope:
    """A straight line through log values: what one unit adds, and the two-sided p-value of "nothing"."""

    log_per_unit: float
    standard_error: float
    p_value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderEffects:
    """``place``: what one place later in its block adds to a run. ``trend``: what one block later adds to the
    ratio. ``level``: what one block later adds to both sides alike, the drift of the machine. None where unknown.
    """

    place: Slope | None
    trend: Slope | None
    level: Slope | None


def order_effects(
    a: Sequence[float], b: Sequence[float], blocks: Sequence[int], places: Sequence[float] | None
) -> OrderEffects:
    """From the logarithms of both sides by block; ``places`` is the place of B less that of A."""
    before, after = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    return OrderEffects(
        place=None if places is None else _slope(places, after - before),
        trend=_slope(blocks, after - before),
        level=_slope(blocks, (before + after) / 2),
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


def outlying(differences: Sequence[float]) -> tuple[int, ...]:
    """Indices whose modified z-score 0.6745 |d - median| / MAD exceeds 3.5. They are marked, never dropped."""
    if len(differences) < _MIN_POINTS:
        return ()
    centre = median(differences)
    spread = median(abs(d - centre) for d in differences)
    if spread == 0:
        return ()
    return tuple(i for i, d in enumerate(differences) if 0.6745 * abs(d - centre) / spread > OUTLIER_SCORE)
