"""The logarithmic scale of the forest plot, on which twice and half are equally far from no change."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

_LEAST_LOG: Final = math.log(1.02)
_PAD_FRAC: Final = 0.04
_TICK_GAP_FRAC: Final = 0.13
_NICE_PERCENT: Final = (
    *(100, -50, 50, 300, 900, -75, -90, 500, 200, 25, -25, 20, -20, 10, -10, 5, -5, 3, -3, 2, -2, 1, -1),
    *(0.5, -0.5, 0.2, -0.2, 0.1, -0.1, 0.05, -0.05, 0.02, -0.02, 0.01, -0.01),
)


@dataclass(frozen=True, slots=True)
class LogScale:
    """From ``low`` to ``high``, both logarithms of ratios."""

    low: float
    high: float

    def at(self, log_ratio: float) -> float:
        """Share of the width at which a value is drawn, 0 to 1; values beyond the ends are drawn at the ends."""
        share = (log_ratio - self.low) / (self.high - self.low)
        return min(1.0, max(0.0, share))

    def holds(self, log_ratio: float) -> bool:
        return self.low <= log_ratio <= self.high

    def ticks(self) -> tuple[tuple[float, str], ...]:
        """Logarithm and label of each tick, from left to right: no change, and round percentages."""
        labels = {0.0: "0"}
        for percent in _NICE_PERCENT:
            log_ratio = math.log1p(percent / 100)
            gap = min(abs(self.at(log_ratio) - self.at(other)) for other in labels)
            if self.holds(log_ratio) and gap >= _TICK_GAP_FRAC:
                labels[log_ratio] = f"{percent:+g}%".replace("-", "\N{MINUS SIGN}")
        return tuple(sorted(labels.items()))


def scale_of(points: Sequence[float], ends: Iterable[float], always: Iterable[float]) -> LogScale:
    """A scale that shows every point and ``always``, and as much of the intervals as does not squeeze these.

    An interval over two blocks may reach from nothing to everything: it is cut where it extends further from the
    points than these are apart.
    """
    required = [0.0, *points, *always]
    low, high = min(required), max(required)
    room = max(high - low, _LEAST_LOG)
    for end in ends:
        low, high = min(low, max(end, min(required) - room)), max(high, min(end, max(required) + room))
    if high - low < _LEAST_LOG:
        low, high = low - _LEAST_LOG / 2, high + _LEAST_LOG / 2
    pad = _PAD_FRAC * (high - low)
    return LogScale(low - pad, high + pad)
