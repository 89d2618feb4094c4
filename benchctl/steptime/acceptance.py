"""Acceptance of drafts by position, and numbers that follow from it with their intervals.

What follows from counts is carried as *samples*: an array with the value first, then draws of what it can be.
Formulas hold for numbers and for samples alike; ``estimate`` turns samples into a value with its interval.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from benchctl.errors import UsageError

Samples: TypeAlias = npt.NDArray[np.float64]
"""A value and, where there are any, its draws."""

NUM_DRAWS: Final = 4000
LEVEL: Final = 0.95
"""Of every interval that follows from counts."""
LEVELS: Final = ((1 - LEVEL) / 2, (1 + LEVEL) / 2)
"""The ends of an interval."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number, and the interval of 95 % where it follows from counts; bounds are None where it does not."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def log_half_width(self) -> float | None:
        """Half the interval as a logarithm; None without a positive one."""
        if self.low is None or self.high is None or self.low <= 0:
            return None
        return math.log(self.high / self.low) / 2

    def times(self, factor: float) -> "Estimate":
        """The estimate of a positive multiple."""
        low, high = (None if bound is None else bound * factor for bound in (self.low, self.high))
        return Estimate(self.value * factor, low, high)


def estimate(samples: Samples) -> Estimate:
    """The value with the quantiles of its draws.

    Draw i of n, in order, stands for the level (i - 1/2) / n. The interval always contains the value: where all
    drafts were accepted, the posterior's quantiles would not.
    """
    value = float(samples[0])
    if len(samples) == 1:
        return Estimate(value)
    low, high = np.quantile(samples[1:], LEVELS, method="hazen")
    return Estimate(value, min(float(low), value), max(float(high), value))


def quotient(above: Estimate, below: Estimate) -> Estimate:
    """The quotient of two independent estimates: half-widths of logarithms add up in squares."""
    value, widths = above.value / below.value, (above.log_half_width, below.log_half_width)
    if widths[0] is None or widths[1] is None:
        return Estimate(value)
    factor = math.exp(math.hypot(widths[0], widths[1]))
    return Estimate(value, value / factor, value * factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionCounts:
    """Drafts judged at one position, all before it being accepted, and those of them that were accepted there."""

    accepted: int
    judged: int

    def __post_init__(self) -> None:
        if not 0 <= self.accepted <= self.judged or not self.judged:
            raise UsageError(
                f"{self.accepted} accepted of {self.judged}: give counts such as 80/100, at least one draft and no "
                "more accepted than judged"
            )

    @property
    def acceptance(self) -> float:
        return self.accepted / self.judged


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """Conditional acceptance of the positions of a draft: of position i, given that all before it were accepted.

    ``counts`` has the counts behind ``values`` where they were counted. Beyond the last position the last value is
    repeated: by the meaning of ``is_constant`` (one number for every position), or else as an extrapolation. Raises
    UsageError without values and for one outside of 0 to 1.
    """

    values: tuple[float, ...]
    counts: tuple[PositionCounts, ...] = ()
    is_constant: bool = False

    def __post_init__(self) -> None:
        if not self.values:
            raise UsageError("no acceptance: state it as a number, a list by position, or counts such as 80/100")
        survival(self.values)

    def of(self, num_draft_tokens: int) -> tuple[float, ...]:
        """Acceptance of each of the first K positions."""
        return tuple(self.values[min(i, len(self.values) - 1)] for i in range(num_draft_tokens))

    def is_extrapolated(self, num_draft_tokens: int) -> bool:
        """True if the last of so many positions has the acceptance of an earlier one for want of its own."""
        return num_draft_tokens > len(self.values) and not self.is_constant

    def samples(self, num_draft_tokens: int, seed: int = 0) -> Samples:
        """Samples of the acceptance of the first K positions, shape (K, 1 + draws); no draws unless counted.

        Of the drafts whose first i - 1 tokens were accepted, n_i were judged at position i and k_i of them
        accepted. Given n_i, k_i is binomial, and the factors of the likelihood are apart for each position, so the
        positions have independent posteriors: beta(k_i + 1/2, n_i - k_i + 1/2) with the prior of Jeffreys. Their
        intervals hold the true value about as often as they say (L. D. Brown, T. T. Cai, A. DasGupta, *Interval
        estimation for a binomial proportion*, Statistical Science 16, 2001) if drafts are independent; drafts of
        one request are more alike than those of many, which the scatter over blocks of an experiment contains.

        Each position has the quantiles of its posterior at evenly spaced levels, in an order that the seed decides:
        an interval that follows from one position is exact. The same seed gives the same draws, and those of more
        positions begin with those of fewer.
        """
        values = np.array(self.of(num_draft_tokens), dtype=np.float64)[:, None]
        if not self.counts:
            return values
        from scipy.special import betaincinv  # noqa: PLC0415 - 0.1 s, which what draws nothing does without

        levels = (np.arange(NUM_DRAWS) + 0.5) / NUM_DRAWS
        drawn = [
            np.random.default_rng([seed, position]).permutation(
                betaincinv(each.accepted + 0.5, each.judged - each.accepted + 0.5, levels)
            )
            for position, each in enumerate(self.counts)
        ]
        rows = np.array([drawn[min(i, len(drawn) - 1)] for i in range(num_draft_tokens)], dtype=np.float64)
        return np.hstack([values, rows])

    def survival(self, num_draft_tokens: int, seed: int = 0) -> Samples:
        """Samples of the probability that the first i drafts are accepted, for i = 0..K, a row each."""
        samples = self.samples(num_draft_tokens, seed)
        return np.vstack([np.ones_like(samples[:1]), np.cumprod(samples, axis=0, dtype=np.float64)])


def stated(values: Sequence[float]) -> Acceptance:
    """One number for every position, or a list by position."""
    return Acceptance(values=tuple(values), is_constant=len(values) == 1)


def counted(counts: Sequence[PositionCounts]) -> Acceptance:
    """Accepted of judged at each position."""
    return Acceptance(values=tuple(each.acceptance for each in counts), counts=tuple(counts))


def of_counters(num_drafts: int, accepted: Sequence[int]) -> Acceptance:
    """Counters of an engine: drafts, and how many of them were accepted up to each position.

    Those judged at a position are those accepted at the one before, so every draft must have as many tokens. A
    position that no draft reached ends the list. Raises UsageError for counts that increase.
    """
    reached = (num_drafts, *accepted)
    for position, (before, here) in enumerate(pairwise(reached), start=1):
        if here > before:
            raise UsageError(
                f"{here} drafts accepted at position {position} and {before} before it: counters by position never "
                "increase, as a token counts only if all before it are accepted"
            )
    return counted([PositionCounts(accepted=here, judged=before) for before, here in pairwise(reached) if before])


def survival(acceptance: Sequence[float]) -> tuple[float, ...]:
    """Probability that the first i drafts are accepted, for i = 0..K.

    ``acceptance[i]`` is the probability that draft i + 1 is accepted when all before it are. Raises UsageError for
    a probability outside of 0 to 1.
    """
    for position, probability in enumerate(acceptance, start=1):
        if not 0 <= probability <= 1:
            raise UsageError(f"acceptance {probability:g} at position {position}: it is a probability from 0 to 1")
    return tuple(accumulate(acceptance, mul, initial=1.0))
