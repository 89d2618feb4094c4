"""Acceptance of drafts by position: stated as numbers, or counted, and then with draws of what it can be.

Of the drafts whose first i - 1 tokens were accepted, n_i were judged at position i and k_i of them accepted. Given
n_i, k_i is binomial, and the factors of the likelihood are apart for each position, so the positions have
independent posteriors: beta(k_i + 1/2, n_i - k_i + 1/2) with the prior of Jeffreys. Draws from these carry the
counts into everything that follows from them. Their intervals hold the true value about as often as they say
(L. D. Brown, T. T. Cai, A. DasGupta, *Interval estimation for a binomial proportion*, Statistical Science 16, 2001)
if drafts are independent; drafts of one request are more alike than those of many, which the scatter over blocks of
an experiment contains.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
from scipy.special import betaincinv

from benchctl.errors import UsageError
from benchctl.steptime.speculation.law import survival

Draws: TypeAlias = npt.NDArray[np.float64]
"""One value for each of ``NUM_DRAWS`` draws."""

NUM_DRAWS: Final = 4000
LEVEL: Final = 0.95
"""Of every interval that follows from counts."""


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

    def draws(self, num_draft_tokens: int, seed: int = 0) -> tuple[Draws, ...]:
        """Draws of the acceptance of each of the first K positions; empty where it was stated, not counted.

        Each position has the quantiles of its posterior at evenly spaced levels, in an order that the seed decides:
        an interval that follows from one position is exact. The same seed gives the same draws, and those of more
        positions begin with those of fewer.
        """
        if not self.counts:
            return ()
        levels = (np.arange(NUM_DRAWS) + 0.5) / NUM_DRAWS
        drawn = [
            np.random.default_rng([seed, position]).permutation(
                betaincinv(each.accepted + 0.5, each.judged - each.accepted + 0.5, levels)
            )
            for position, each in enumerate(self.counts)
        ]
        return tuple(drawn[min(i, len(drawn) - 1)] for i in range(num_draft_tokens))

    def survival_draws(self, num_draft_tokens: int, seed: int = 0) -> tuple[Draws, ...]:
        """Draws of the probability that the first i drafts are accepted, for i = 0..K; empty without counts."""
        positions = self.draws(num_draft_tokens, seed)
        return tuple(np.cumprod((np.ones(NUM_DRAWS), *positions), axis=0)) if positions else ()


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
