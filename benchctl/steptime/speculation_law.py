"""Tokens per step and speed-up of speculative decoding, from the acceptance of each drafted position."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from scipy.special import betaincinv

from benchctl.errors import UsageError

if TYPE_CHECKING:
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


def estimate(value: float, draws: Draws | None) -> Estimate:
    """The value with the quantiles of its draws.

    Draw i of n, in order, stands for the level (i - 1/2) / n. The interval always contains the value: where all
    drafts were accepted, the posterior's quantiles would not.
    """
    if draws is None:
        return Estimate(value)
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], method="hazen")
    return Estimate(value, min(float(low), value), max(float(high), value))


def quotient(above: Estimate, below: Estimate) -> Estimate:
    """The quotient of two independent estimates: half-widths of logarithms add up in squares."""
    value, widths = above.value / below.value, (above.log_half_width, below.log_half_width)
    if widths[0] is None or widths[1] is None:
        return Estimate(value)
    factor = math.exp(math.hypot(widths[0], widths[1]))
    return Estimate(value, value / factor, value * factor)


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
