"""The law at each draft length K: what a step yields and gains, the best K, and where speculation stops to pay.

The gain rises with K as long as one more draft is worth its cost, and then falls, so there is one best K and beyond
it a largest K that is not slower than no speculation. Both are whole numbers; their intervals are quantiles over
draws of the acceptance.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from benchctl.errors import UsageError
from benchctl.steptime.speculation.acceptance import LEVEL, Acceptance, Draws
from benchctl.steptime.speculation.estimate import Estimate, estimate
from benchctl.steptime.speculation.law import (
    DraftCost,
    acceptance_rate,
    backfill_limit,
    speed_up,
    survival,
    system_efficiency,
    tokens_by_drafts,
    tokens_per_step,
)

Lengths: TypeAlias = npt.NDArray[np.intp]
_ByDrafts: TypeAlias = Sequence[Any]
"""Tokens per step for K = 0, 1, ...: numbers, or arrays of draws."""

LONGEST: Final = 128
"""Draft tokens at most: the best and the break-even length are looked for up to here."""
_BISECTIONS: Final = 60


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
    system_efficiency: Estimate
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
    """The law at several draft lengths; ``bonus`` says which server ``best`` and ``break_even`` are of."""

    acceptance: Acceptance
    cost: DraftCost
    bonus: bool
    lengths: tuple[DraftLength, ...]
    best: WholeEstimate
    """Draft tokens of the largest speed-up; 0 where speculation never pays."""
    best_speed_up: Estimate
    """At ``best``, which stays the same in all draws."""
    break_even: WholeEstimate
    """Most draft tokens that are still faster than no speculation; 0 without any, ``LONGEST`` for at least that."""


def law_at(
    acceptance: Acceptance, cost: DraftCost, draft_tokens: Sequence[int], *, bonus: bool = True, seed: int = 0
) -> SpeculationLaw:
    """The law at each of these draft lengths. Raises UsageError for one that is not from 1 to ``LONGEST``."""
    for num in draft_tokens:
        if not 1 <= num <= LONGEST:
            raise UsageError(f"{num} draft tokens: a step drafts from 1 to {LONGEST}")
    curves = _Curves(acceptance, cost, seed)
    best = _best_length(curves, bonus=bonus)
    return SpeculationLaw(
        acceptance=acceptance,
        cost=cost,
        bonus=bonus,
        lengths=tuple(_length(curves, num, bonus=bonus) for num in draft_tokens),
        best=best,
        best_speed_up=curves.estimate(lambda tokens, plain: _gain(tokens, plain, best.value, cost, bonus=bonus)),
        break_even=_break_even_length(curves, bonus=bonus),
    )


def break_even_acceptance(num_draft_tokens: int, cost: DraftCost, *, bonus: bool) -> float | None:
    """The acceptance at every position at which K drafts gain nothing: E = 1 + K c + d.

    None where even drafts that are all accepted do not pay.
    """
    step = cost.step(num_draft_tokens, bonus=bonus)
    low, high = 0.0, 1.0
    if tokens_per_step((high,) * num_draft_tokens, bonus=bonus) <= step:
        return None
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        pays = tokens_per_step((middle,) * num_draft_tokens, bonus=bonus) > step
        low, high = (low, middle) if pays else (middle, high)
    return high


class _Curves:
    """Tokens per step for K = 0..``LONGEST`` with and without bonus, at the values and at each draw of them."""

    def __init__(self, acceptance: Acceptance, cost: DraftCost, seed: int) -> None:
        self.acceptance, self.cost = acceptance, cost
        self.survival = survival(acceptance.of(LONGEST))
        self.tokens = tokens_by_drafts(self.survival, bonus=True)
        self.plain = tokens_by_drafts(self.survival, bonus=False)
        self.positions = acceptance.draws(LONGEST, seed)
        self.has_draws = bool(self.positions)
        if self.has_draws:
            self.survival_draws = acceptance.survival_draws(LONGEST, seed)
            self.token_draws = tokens_by_drafts(self.survival_draws, bonus=True)
            self.plain_draws = tokens_by_drafts(self.survival_draws, bonus=False)

    def estimate(self, formula: Callable[[_ByDrafts, _ByDrafts], Any]) -> Estimate:
        """A formula of the tokens by K with and without bonus, at the values and at the draws."""
        value = formula(self.tokens, self.plain)
        return estimate(value, formula(self.token_draws, self.plain_draws) if self.has_draws else None)

    def gains(self, *, bonus: bool) -> tuple[Draws, Draws | None]:
        """Speed-ups for K = 0..``LONGEST``, at the values and for each draw in a column of its own."""
        numbers = range(LONGEST + 1)
        values = np.array([_gain(self.tokens, self.plain, num, self.cost, bonus=bonus) for num in numbers])
        if not self.has_draws:
            return values, None
        draws = [_gain(self.token_draws, self.plain_draws, num, self.cost, bonus=bonus) for num in numbers]
        return values, np.array(draws)


def _gain(tokens: _ByDrafts, plain: _ByDrafts, num_draft_tokens: int, cost: DraftCost, *, bonus: bool) -> Any:
    of_server = tokens if bonus else plain
    return speed_up(of_server[num_draft_tokens], num_draft_tokens, cost, bonus=bonus)


def _length(curves: _Curves, num: int, *, bonus: bool) -> DraftLength:
    cost = curves.cost
    has_draws = curves.has_draws
    return DraftLength(
        num_draft_tokens=num,
        acceptance=estimate(curves.acceptance.of(num)[-1], curves.positions[num - 1] if has_draws else None),
        survival=estimate(curves.survival[num], curves.survival_draws[num] if has_draws else None),
        tokens=curves.estimate(lambda tokens, _: tokens[num]),
        tokens_without_bonus=curves.estimate(lambda _, plain: plain[num]),
        bonus_ratio=curves.estimate(lambda tokens, plain: tokens[num] / plain[num]),
        speed_up=curves.estimate(lambda tokens, plain: _gain(tokens, plain, num, cost, bonus=True)),
        speed_up_without_bonus=curves.estimate(lambda tokens, plain: _gain(tokens, plain, num, cost, bonus=False)),
        acceptance_rate=curves.estimate(lambda tokens, _: acceptance_rate(tokens[num], num)),
        system_efficiency=curves.estimate(lambda tokens, _: system_efficiency(tokens[num], num)),
        backfill_limit=curves.estimate(lambda tokens, plain: backfill_limit(tokens[num], plain[num], num, cost)),
        break_even_acceptance=break_even_acceptance(num, cost, bonus=bonus),
        is_extrapolated=curves.acceptance.is_extrapolated(num),
    )


def _best_length(curves: _Curves, *, bonus: bool) -> WholeEstimate:
    """The K of the largest speed-up, the fewest drafts where several have it."""
    values, draws = curves.gains(bonus=bonus)
    return _whole(int(values.argmax()), None if draws is None else draws.argmax(axis=0))


def _break_even_length(curves: _Curves, *, bonus: bool) -> WholeEstimate:
    """The largest K with a speed-up above 1; 0 without any."""
    values, draws = curves.gains(bonus=bonus)
    return _whole(int(_last_above_1(values)), None if draws is None else _last_above_1(draws))


def _last_above_1(gains: Draws) -> Lengths:
    """Index of the last row above 1 in each column; 0 without any. Row 0 is a step without drafts."""
    pays = gains > 1
    last: Lengths = len(gains) - 1 - np.argmax(pays[::-1], axis=0)
    return np.where(pays.any(axis=0), last, 0)


def _whole(value: int, draws: Lengths | None) -> WholeEstimate:
    if draws is None:
        return WholeEstimate(value=value)
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], method="inverted_cdf")
    lengths, numbers = np.unique(draws, return_counts=True)
    order = np.argsort(-numbers, kind="stable")
    shares = tuple((int(lengths[i]), float(numbers[i]) / len(draws)) for i in order)
    return WholeEstimate(value=value, low=min(int(low), value), high=max(int(high), value), shares=shares)
