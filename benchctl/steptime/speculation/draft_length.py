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
    CostDraws,
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
    acceptance: Acceptance,
    cost: DraftCost,
    draft_tokens: Sequence[int],
    *,
    bonus: bool = True,
    seed: int = 0,
    cost_draws: CostDraws | None = None,
) -> SpeculationLaw:
    """The law at each of these draft lengths.

    ``cost_draws`` carries the uncertainty of measured costs into intervals, beside that of a counted acceptance.
    Raises UsageError for a length that is not from 1 to ``LONGEST``.
    """
    for num in draft_tokens:
        if not 1 <= num <= LONGEST:
            raise UsageError(f"{num} draft tokens: a step drafts from 1 to {LONGEST}")
    curves = _Curves(acceptance, cost, seed, cost_draws)
    best = _best_length(curves, bonus=bonus)
    return SpeculationLaw(
        acceptance=acceptance,
        cost=cost,
        bonus=bonus,
        lengths=tuple(_length(curves, num, bonus=bonus) for num in draft_tokens),
        best=best,
        best_speed_up=curves.estimate(lambda at: at.gain(best.value, bonus=bonus)),
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
    if tokens_per_step((low,) * num_draft_tokens, bonus=bonus) >= step:
        return low
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        pays = tokens_per_step((middle,) * num_draft_tokens, bonus=bonus) > step
        low, high = (low, middle) if pays else (middle, high)
    return high


@dataclass(frozen=True, slots=True, kw_only=True)
class _Curve:
    """Survival and tokens per step for K = 0..``LONGEST``, with the costs: numbers, or arrays of draws."""

    positions: _ByDrafts
    survival: _ByDrafts
    tokens: _ByDrafts
    plain: _ByDrafts
    cost: Any

    @classmethod
    def of(cls, positions: _ByDrafts, survival: _ByDrafts, cost: "DraftCost | CostDraws") -> "_Curve":
        return cls(
            positions=positions,
            survival=survival,
            tokens=tokens_by_drafts(survival, bonus=True),
            plain=tokens_by_drafts(survival, bonus=False),
            cost=cost,
        )

    def gain(self, num: int, *, bonus: bool) -> Any:
        return speed_up((self.tokens if bonus else self.plain)[num], num, self.cost, bonus=bonus)


class _Curves:
    """The law at the values of the acceptance and of the costs, and at each draw of them."""

    def __init__(self, acceptance: Acceptance, cost: DraftCost, seed: int, cost_draws: CostDraws | None) -> None:
        self.acceptance, self.cost = acceptance, cost
        values = acceptance.of(LONGEST)
        self.values = _Curve.of(values, survival(values), cost)
        drawn = acceptance.draws(LONGEST, seed)
        self.draws = (
            _Curve.of(drawn, acceptance.survival_draws(LONGEST, seed), cost_draws or cost) if drawn else None
        )

    def estimate(self, formula: Callable[[_Curve], Any]) -> Estimate:
        """A formula at the values and at the draws."""
        return estimate(formula(self.values), None if self.draws is None else formula(self.draws))

    def gains(self, *, bonus: bool) -> tuple[Draws, Draws | None]:
        """Speed-ups for K = 0..``LONGEST``, at the values and for each draw in a column of its own."""
        numbers = range(LONGEST + 1)
        values = np.array([self.values.gain(num, bonus=bonus) for num in numbers])
        if self.draws is None:
            return values, None
        draws = self.draws
        rows = np.broadcast_arrays(draws.survival[0], *(draws.gain(num, bonus=bonus) for num in numbers))[1:]
        return values, np.array(rows)


def _length(curves: _Curves, num: int, *, bonus: bool) -> DraftLength:
    return DraftLength(
        num_draft_tokens=num,
        acceptance=curves.estimate(lambda at: at.positions[num - 1]),
        survival=curves.estimate(lambda at: at.survival[num]),
        tokens=curves.estimate(lambda at: at.tokens[num]),
        tokens_without_bonus=curves.estimate(lambda at: at.plain[num]),
        bonus_ratio=curves.estimate(lambda at: at.tokens[num] / at.plain[num]),
        speed_up=curves.estimate(lambda at: at.gain(num, bonus=True)),
        speed_up_without_bonus=curves.estimate(lambda at: at.gain(num, bonus=False)),
        acceptance_rate=curves.estimate(lambda at: acceptance_rate(at.tokens[num], num)),
        system_efficiency=curves.estimate(lambda at: system_efficiency(at.tokens[num], num)),
        backfill_limit=curves.estimate(lambda at: backfill_limit(at.tokens[num], at.plain[num], num, at.cost)),
        break_even_acceptance=break_even_acceptance(num, curves.cost, bonus=bonus),
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
