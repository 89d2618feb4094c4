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

What follows from counts is carried as *samples*: an array with the value first, then draws of what it can be.
Formulas hold for numbers and for samples alike; ``estimate`` turns samples into a value with its interval.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul
from typing import Any, Final, TypeAlias, TypeVar

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
