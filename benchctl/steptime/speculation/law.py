"""Tokens per step and speed-up of speculative decoding, from the acceptance of each drafted position.

A step verifies K drafted tokens of a sequence. It yields those before the first rejection, and one more: the token
that replaces the rejected one or, if all are accepted, the bonus token, which the verification computes anyway.
Without a bonus token a step whose drafts are all accepted yields K.

With P(i) the probability that the first i drafts are accepted:

    E  = sum of P(i) for i = 0..K        with bonus token
    E0 = sum of P(i) for i = 0..K-1      without

For one acceptance a at every position these are (1 - a^(K+1)) / (1 - a) and (1 - a^K) / (1 - a) (Leviathan et al.,
arXiv 2211.17192, equation 1). A step costs 1 + K c + d times a step without speculation, where c is the cost of one
draft pass and d that of computing the draft's keys and values of bonus tokens, both as shares of such a step. A
server without bonus tokens has nothing to backfill, so d counts with them alone.

``survival`` and ``tokens_per_step`` take probabilities; the other formulas hold for numbers and arrays of draws.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING, Protocol, TypeVar

from benchctl.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Quantity = TypeVar("Quantity", float, "NDArray[np.float64]")
"""One number, or one for each of many draws."""
Cost_co = TypeVar("Cost_co", covariant=True)


class StepCost(Protocol[Cost_co]):
    """The cost of a step that drafts: one number, or draws of it."""

    def step(self, num_draft_tokens: int, *, bonus: bool) -> Cost_co:
        """Duration of a step with so many drafts over that of one without speculation: 1 + K c + d."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCost:
    """Times beside the verification, as shares of a step of the target model without speculation.

    ``draft`` is that of one draft pass (c), ``backfill`` what a step adds to compute the draft's keys and values of
    bonus tokens (d). Raises UsageError for a share that is negative or not a number.
    """

    draft: float
    backfill: float = 0.0

    def __post_init__(self) -> None:
        for name, share in (("draft", self.draft), ("backfill", self.backfill)):
            if not 0 <= share < float("inf"):
                raise UsageError(
                    f"{name} cost {share:g}: it is a share of a step without speculation, 0 or more, such as 0.05"
                )

    def step(self, num_draft_tokens: int, *, bonus: bool) -> float:
        """Duration of a step with so many drafts over that of one without speculation."""
        return _step(num_draft_tokens, self.draft, self.backfill if bonus else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CostDraws:
    """Draws of both costs, where they were measured."""

    draft: "NDArray[np.float64]"
    backfill: "NDArray[np.float64]"

    def step(self, num_draft_tokens: int, *, bonus: bool) -> "NDArray[np.float64]":
        """As that of ``DraftCost``, for each draw."""
        return _step(num_draft_tokens, self.draft, self.backfill if bonus else 0.0 * self.backfill)


def _step(num_draft_tokens: int, draft: Quantity, backfill: Quantity) -> Quantity:
    return 1.0 + num_draft_tokens * draft + (backfill if num_draft_tokens else 0.0)


def survival(acceptance: Sequence[float]) -> tuple[float, ...]:
    """Probability that the first i drafts are accepted, for i = 0..K.

    ``acceptance[i]`` is the probability that draft i + 1 is accepted when all before it are. Raises UsageError for
    a probability outside of 0 to 1.
    """
    for position, probability in enumerate(acceptance, start=1):
        if not 0 <= probability <= 1:
            raise UsageError(f"acceptance {probability:g} at position {position}: it is a probability from 0 to 1")
    return tuple(accumulate(acceptance, mul, initial=1.0))


def tokens_per_step(acceptance: Sequence[float], *, bonus: bool) -> float:
    """Expected tokens that one sequence gains in one step with ``len(acceptance)`` drafts; 1 without any."""
    return tokens_by_drafts(survival(acceptance), bonus=bonus)[-1]


def tokens_by_drafts(survival: Sequence[Quantity], *, bonus: bool) -> tuple[Quantity, ...]:
    """Expected tokens of one sequence in one step with K drafts, for K = 0..N, from P(0), ..., P(N).

    Without a bonus token K drafts yield what K - 1 yield with it: E0(K) = E(K - 1).
    """
    with_bonus: tuple[Quantity, ...] = tuple(accumulate(survival))
    return with_bonus if bonus else with_bonus[:1] + with_bonus[:-1]


def steps_by_length(longest: int, acceptance: Sequence[float], *, bonus: bool) -> tuple[float, ...]:
    """Expected steps that yield n tokens to one sequence, for n = 0..``longest``; the last may yield more.

    S(n) = 1 + sum of p(j) S(n - j), with p(j) the probability that a step yields j tokens and S = 0 up to n = 0.
    n / S(n) is below the tokens per step of an endless sequence by the tokens that are cut off.
    """
    gains = token_probabilities(acceptance, bonus=bonus)
    steps = [0.0]
    for tokens in range(1, longest + 1):
        after = (gains[gain] * steps[tokens - gain] for gain in range(1, min(len(gains) - 1, tokens) + 1))
        steps.append(1.0 + sum(after))
    return tuple(steps)


def token_probabilities(acceptance: Sequence[float], *, bonus: bool) -> tuple[float, ...]:
    """Probability that a step yields j tokens, for j = 0, 1, ..., K + 1, or K without bonus token."""
    reached = survival(acceptance)
    if not bonus and acceptance:
        reached = reached[:-1]
    return (0.0, *(here - following for here, following in zip(reached, (*reached[1:], 0.0), strict=True)))


def acceptance_rate(tokens: Quantity, num_draft_tokens: int) -> Quantity:
    """Accepted tokens over draft tokens, (E - 1) / K, from the tokens per step with bonus."""
    return (tokens - 1.0) / num_draft_tokens


def system_efficiency(tokens: Quantity, num_draft_tokens: int) -> Quantity:
    """Tokens of a step over the most that it can yield, E / (K + 1), as version 0 of vLLM logged it."""
    return tokens / (num_draft_tokens + 1.0)


def speed_up(tokens: Quantity, num_draft_tokens: int, cost: "StepCost[Quantity]", *, bonus: bool) -> Quantity:
    """Tokens per second over those without speculation, E / (1 + K c + d).

    A verification is taken to last as long as a step without drafts, which holds while the batch is so small that
    weights and caches bound it; ``batch_load`` has the rest.
    """
    return tokens / cost.step(num_draft_tokens, bonus=bonus)


def backfill_limit(
    tokens: Quantity, tokens_without: Quantity, num_draft_tokens: int, cost: "StepCost[Quantity]"
) -> Quantity:
    """Cost of the backfill at which bonus tokens gain nothing: (1 + K c) (E / E0 - 1), as a share of a step."""
    return cost.step(num_draft_tokens, bonus=False) * (tokens / tokens_without - 1.0)
