"""Margins and verdicts: the interval of a ratio against the change that counts and the change that does not.

There are two margins. A change is called beyond the *change margin*: the threshold, or the noise floor of the
metric where that is larger, because identical servers differ by that much. Two sides are called equivalent only
inside the *equivalence margin*: the threshold, or the margin that the user names. Noise never widens that one: on a
noisier machine less can be shown, and two sides that it cannot tell apart are not therefore equivalent.

A margin m is a factor of 1 + m either way, so that swapping the two sides mirrors the verdict. In per cent this is
lopsided: a margin of 10 % reaches from -9.1 % to +10 %.
"""

import math
from dataclasses import dataclass
from typing import Final, Literal

from benchctl.analysis.metrics.table import Direction
from benchctl.analysis.statistics.block_ratio import RatioEstimate
from benchctl.analysis.statistics.intervals import Interval

Verdict = Literal["regression", "improvement", "equivalent", "inconclusive", "changed"]
"""``changed`` is the verdict beyond the margin for a metric without a better direction."""

_LEAST_ALPHA: Final = 1e-12


@dataclass(frozen=True, slots=True)
class Margins:
    """Fractions. ``equivalence_frac`` exceeds ``change_frac`` only where the user named it."""

    change_frac: float
    """Beyond it a change is called."""
    equivalence_frac: float
    """Inside it two sides are called equivalent."""
    is_noise_floor: bool = False
    """The change margin is the noise floor of the metric, larger than the threshold."""

    @property
    def log_change(self) -> float:
        return log_margin(self.change_frac)

    @property
    def log_equivalence(self) -> float:
        return log_margin(self.equivalence_frac)

    @property
    def log_bands(self) -> tuple[float, ...]:
        """The margins that a chart shades around "equal", the wider first; one where both are the same."""
        return tuple(sorted({self.log_change, self.log_equivalence}, reverse=True))

    def leave_between(self, log_ratio: float) -> bool:
        """True for a ratio outside equivalence and inside the change margin, where no block helps."""
        return self.log_equivalence <= abs(log_ratio) <= self.log_change


def margins_of(threshold_frac: float, floor_frac: float = 0.0, equivalence_frac: float | None = None) -> Margins:
    """A change beyond the larger of threshold and floor; equivalence inside the threshold or the named margin."""
    return Margins(
        change_frac=max(threshold_frac, floor_frac),
        equivalence_frac=threshold_frac if equivalence_frac is None else equivalence_frac,
        is_noise_floor=floor_frac > threshold_frac,
    )


def log_margin(margin_frac: float) -> float:
    """A margin in logarithms: ln(1 + m)."""
    return math.log1p(margin_frac)


def verdict_of(
    estimate: RatioEstimate, margins: Margins, direction: Direction, confidence: float | None = None
) -> Verdict:
    """The interval against the margins, for the direction that is better; at another ``confidence`` where given.

    Wholly inside the equivalence margin: equivalent, also where a named one reaches beyond the change margin.
    Wholly beyond the change margin on the worse side: regression; on the better side: improvement. Anything else,
    and no interval: inconclusive. "Not significant" is never "the same".
    """
    interval = estimate.interval_at(estimate.confidence if confidence is None else confidence)
    return "inconclusive" if interval is None else verdict_of_interval(interval, margins, direction)


def verdict_of_interval(interval: Interval, margins: Margins, direction: Direction) -> Verdict:
    """``verdict_of`` an interval of the log-ratio."""
    low, high = interval
    if -margins.log_equivalence <= low and high <= margins.log_equivalence:
        return "equivalent"
    if -margins.log_change <= high and low <= margins.log_change:
        return "inconclusive"
    if direction == "none":
        return "changed"
    return "regression" if (low > margins.log_change) == (direction == "lower") else "improvement"


def decision_alpha(estimate: RatioEstimate, margins: Margins) -> float:
    """The least alpha at which the interval of 1 - alpha decides: the p-value of the verdict.

    A wrong verdict needs an interval that misses the truth, so that this is a valid p-value of "the verdict is
    wrong" and several can be corrected together. 1 where nothing decides.
    """
    low, high = math.log(_LEAST_ALPHA), 0.0
    if verdict_of(estimate, margins, "none", 0.0) == "inconclusive":
        return 1.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        decides = verdict_of(estimate, margins, "none", 1 - math.exp(middle)) != "inconclusive"
        low, high = (low, middle) if decides else (middle, high)
    return math.exp(high)
