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
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from benchctl.errors import UsageError
from benchctl.steptime.acceptance import LEVELS, Acceptance, Estimate, Samples, estimate, survival

Quantity = TypeVar("Quantity", float, npt.NDArray[np.float64])
"""One number, or samples."""

LONGEST: Final = 128
"""Draft tokens at most: the best and the break-even length are looked for up to here."""
_BISECTIONS: Final = 60


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


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCost:
    """Times beside the verification, as shares of a step of the target model without speculation.

    ``draft`` is that of one draft pass (c), ``backfill`` what a step adds to compute the draft's keys and values of
    bonus tokens (d); both are numbers, or samples where they were measured. Raises UsageError for a share that is
    negative or not a number.
    """

    draft: float | Samples
    backfill: float | Samples = 0.0

    def __post_init__(self) -> None:
        for name, share in (("draft", self.draft), ("backfill", self.backfill)):
            if not (np.all(share >= 0) and np.all(share < math.inf)):
                raise UsageError(
                    f"{name} cost {share:g}: it is a share of a step without speculation, 0 or more, such as 0.05"
                )

    def step(self, num_draft_tokens: int, *, bonus: bool) -> Any:
        """Duration of a step with so many drafts over that of one without speculation: 1 + K c + d."""
        return 1.0 + num_draft_tokens * self.draft + (self.backfill if bonus and num_draft_tokens else 0.0)


def speed_up(tokens: Quantity, num_draft_tokens: int, cost: DraftCost, *, bonus: bool) -> Quantity:
    """Tokens per second over those without speculation, E / (1 + K c + d).

    A verification is taken to last as long as a step without drafts, which holds while the batch is so small that
    weights and caches bound it; ``speculation_load`` has the rest.
    """
    gain: Quantity = tokens / cost.step(num_draft_tokens, bonus=bonus)
    return gain


def backfill_limit(tokens: Quantity, tokens_without: Quantity, num_draft_tokens: int, cost: DraftCost) -> Quantity:
    """Cost of the backfill at which bonus tokens gain nothing: (1 + K c) (E / E0 - 1), as a share of a step."""
    limit: Quantity = cost.step(num_draft_tokens, bonus=False) * (tokens / tokens_without - 1.0)
    return limit


def break_even_acceptance(num_draft_tokens: int, cost: DraftCost, *, bonus: bool) -> float | None:
    """The acceptance at every position at which K drafts gain nothing: E = 1 + K c + d.

    None where even drafts that are all accepted do not pay.
    """
    step: float = cost.step(num_draft_tokens, bonus=bonus)

    def gain(acceptance: float) -> float:
        return tokens_per_step((acceptance,) * num_draft_tokens, bonus=bonus) - step

    low, high = 0.0, 1.0
    if gain(high) <= 0:
        return None
    if gain(low) >= 0:
        return low
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if gain(middle) > 0 else (middle, high)
    return high


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLength:
    """The law for one number of draft tokens K."""

    num_draft_tokens: int
    acceptance: Estimate
    """Of the last of the K positions, given that all before it are accepted."""
    survival: Estimate
    """Probability that all K are accepted: the tokens that the last of them adds to a step."""
    tokens: Estimate
    """Expected tokens per step, with bonus."""
    tokens_without_bonus: Estimate
    bonus_ratio: Estimate
    """Tokens with bonus over those without."""
    speed_up: Estimate
    speed_up_without_bonus: Estimate
    acceptance_rate: Estimate
    """Accepted tokens over draft tokens, (E - 1) / K."""
    system_efficiency: Estimate
    """Tokens of a step over the most that it can yield, E / (K + 1), as version 0 of vLLM logged it."""
    backfill_limit: Estimate
    """Cost of a backfill, as a share of a step, from which on bonus tokens do not pay."""
    break_even_acceptance: float | None
    """Acceptance at every position from which on these drafts pay; None where no acceptance is enough."""
    is_extrapolated: bool

    def gain(self, *, bonus: bool) -> Estimate:
        """The speed-up with or without bonus token."""
        return self.speed_up if bonus else self.speed_up_without_bonus


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeEstimate:
    """A draft length with its interval; ``shares`` of the draws have each length, the most frequent first."""

    value: int
    low: int | None = None
    high: int | None = None
    shares: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationLaw:
    """The law at several draft lengths; ``bonus`` says which server ``best`` and ``break_even`` are of.

    The gain rises with K as long as one more draft is worth its cost, and then falls, so there is one best K and
    beyond it a largest K that is not slower than no speculation.
    """

    acceptance: Acceptance
    cost: DraftCost
    bonus: bool
    lengths: tuple[DraftLength, ...]
    best: WholeEstimate
    """Draft tokens of the largest speed-up, the fewest where several have it; 0 where speculation never pays."""
    best_speed_up: Estimate
    """At ``best``, which stays the same in all draws."""
    break_even: WholeEstimate
    """Most draft tokens that are still faster than no speculation; 0 without any, ``LONGEST`` for at least that."""


def law_at(
    acceptance: Acceptance,
    cost: DraftCost,
    draft_tokens: Sequence[int],
    *,
    bonus: bool = True,
    seed: int = 0,
    cost_samples: DraftCost | None = None,
) -> SpeculationLaw:
    """The law at each of these draft lengths.

    ``cost_samples`` carries the uncertainty of measured costs into intervals, beside that of a counted acceptance.
    Raises UsageError for a length that is not from 1 to ``LONGEST``.
    """
    for num in draft_tokens:
        if not 1 <= num <= LONGEST:
            raise UsageError(f"{num} draft tokens: a step drafts from 1 to {LONGEST}")
    positions, reached = acceptance.samples(LONGEST, seed), acceptance.survival(LONGEST, seed)
    tokens, plain = (tokens_by_drafts(tuple(reached), bonus=each) for each in (True, False))
    costs = cost if cost_samples is None else cost_samples

    def gain(num: int, *, bonus: bool) -> Samples:
        return speed_up((tokens if bonus else plain)[num], num, costs, bonus=bonus)

    def length(num: int) -> DraftLength:
        return DraftLength(
            num_draft_tokens=num,
            acceptance=estimate(positions[num - 1]),
            survival=estimate(reached[num]),
            tokens=estimate(tokens[num]),
            tokens_without_bonus=estimate(plain[num]),
            bonus_ratio=estimate(tokens[num] / plain[num]),
            speed_up=estimate(gain(num, bonus=True)),
            speed_up_without_bonus=estimate(gain(num, bonus=False)),
            acceptance_rate=estimate((tokens[num] - 1.0) / num),
            system_efficiency=estimate(tokens[num] / (num + 1.0)),
            backfill_limit=estimate(backfill_limit(tokens[num], plain[num], num, costs)),
            break_even_acceptance=break_even_acceptance(num, cost, bonus=bonus),
            is_extrapolated=acceptance.is_extrapolated(num),
        )

    gains = np.array([gain(num, bonus=bonus) for num in range(LONGEST + 1)])
    pays = gains > 1
    last_that_pays = LONGEST - np.argmax(pays[::-1], axis=0)
    best = _whole(gains.argmax(axis=0))
    return SpeculationLaw(
        acceptance=acceptance,
        cost=cost,
        bonus=bonus,
        lengths=tuple(length(num) for num in draft_tokens),
        best=best,
        best_speed_up=estimate(gains[best.value]),
        break_even=_whole(np.where(pays.any(axis=0), last_that_pays, 0)),
    )


def _whole(samples: npt.NDArray[np.intp]) -> WholeEstimate:
    """The whole number with the quantiles and the shares of its draws."""
    value, draws = int(samples[0]), samples[1:]
    if not len(draws):
        return WholeEstimate(value=value)
    low, high = np.quantile(draws, LEVELS, method="inverted_cdf")
    lengths, numbers = np.unique(draws, return_counts=True)
    order = np.argsort(-numbers, kind="stable")
    shares = tuple((int(lengths[i]), float(numbers[i]) / len(draws)) for i in order)
    return WholeEstimate(value=value, low=min(int(low), value), high=max(int(high), value), shares=shares)
