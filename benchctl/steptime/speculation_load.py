"""Speculation on a server with step times: goodput by batch, the batches at which drafts pay, latency by rate.

    goodput = B E / T(B, K)          tokens per second of a batch of B sequences
    TPOT    = T(B, K) / E            time per output token of each of them

While weights and caches bound a step, verifying B (K + 1) tokens takes as long as B. Once arithmetic does, drafts
that are rejected take time from other sequences, and fewer drafts are better, until none are (X. Liu et al.,
*Optimizing Speculative Decoding for Serving Large Language Models Using Goodput*, arXiv 2406.14066).

At a rate of requests faster sequences leave a smaller batch behind. ``queueing.py`` solves for the batch of
requests that arrive at random: a server that speculates is one whose rows need T(B, K) / E for a token instead of
T(B, 0).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from benchctl.steptime.queueing import (
    PredictedLoad,
    RequestSize,
    ServerLimits,
    StepSeconds,
    kv_capacity_tokens,
    load_at_rate,
)
from benchctl.steptime.speculation_law import Acceptance, Estimate, estimate, tokens_by_drafts
from benchctl.steptime.work import Backfill, Deployment, StepWork, one_step

MOST_ROWS: Final = 4096
"""Batches are looked at up to here where memory sets no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeStep:
    """Seconds of the parts of one step; without drafts ``verify_s`` is the step."""

    draft_s: float
    verify_s: float
    backfill_s: float

    @property
    def total_s(self) -> float:
        return self.draft_s + self.verify_s + self.backfill_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSteps:
    """Step times of both models of one server, whose rows hold ``context`` tokens in the cache.

    A step with K drafts of B rows that hold S tokens each has

        drafting       K passes of the draft over B rows, at contexts S, S + 1, ..., S + K - 1
        verification   one pass of the target over B (K + 1) tokens, with logits for each of them
        backfill       the draft's keys and values of the bonus token of the rows that accepted all K, whose last
                       draft was never an input of the draft; B P(K) rows on average

    A backfill by ``expansion`` puts those tokens as further rows into the first draft pass; one by ``prefill`` is a
    pass of its own, in the steps in which a row needs it: 1 - (1 - P(K))^B of them. Step times are taken at mean
    rows.
    """

    target_s: StepSeconds
    draft_s: StepSeconds
    context: float
    backfill: Backfill = "none"

    def step(self, rows: float, num_draft_tokens: int, all_accepted: float, *, bonus: bool) -> SpeculativeStep:
        """A step with K drafts of each row, all of which are accepted with probability ``all_accepted``."""
        has_backfill = bonus and num_draft_tokens > 0 and all_accepted > 0
        return SpeculativeStep(
            draft_s=sum((self._pass_s(rows, position) for position in range(num_draft_tokens)), 0.0),
            verify_s=self.target_s(
                one_step(num_decodes=rows, context=self.context, row_tokens=num_draft_tokens + 1)
            ),
            backfill_s=self._backfill_s(rows, all_accepted) if has_backfill else 0.0,
        )

    def _pass_s(self, rows: float, position: int = 0) -> float:
        return self.draft_s(one_step(num_decodes=rows, context=self.context + position))

    def _backfill_s(self, rows: float, all_accepted: float) -> float:
        """Time that the backfill adds to a step on average."""
        if self.backfill == "none":
            return 0.0
        if self.backfill == "expansion":
            return self._pass_s(rows * (1 + all_accepted)) - self._pass_s(rows)
        share: float = 1 - (1 - all_accepted) ** rows
        return share * self._pass_s(rows * all_accepted / share)


def as_share(target_s: StepSeconds, share: float) -> StepSeconds:
    """Step times of a draft that is known by its cost alone: a share of the target's step of the same work."""
    return lambda work: share * target_s(work)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPoint:
    """One draft length at one batch size; 0 draft tokens are no speculation.

    Intervals are those of the acceptance; step times are taken as they are.
    """

    rows: int
    num_draft_tokens: int
    step: SpeculativeStep
    tokens: Estimate
    """Per step and sequence."""
    goodput_per_s: Estimate
    tpot_s: Estimate
    speed_up: Estimate
    """Goodput over that without speculation at the same batch size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLoad:
    """All draft lengths at one batch size, 0 first."""

    rows: int
    points: tuple[LoadPoint, ...]

    @property
    def best(self) -> LoadPoint:
        """The largest goodput; of equals that with the fewest drafts."""
        return max(self.points, key=lambda point: (point.goodput_per_s.value, -point.num_draft_tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLoad:
    """One rate of requests, with the load for each number of draft tokens, 0 first."""

    rate_per_s: float
    loads: tuple[tuple[int, PredictedLoad], ...]

    @property
    def without(self) -> PredictedLoad:
        """The load without speculation."""
        return self.loads[0][1]

    @property
    def best(self) -> tuple[int, PredictedLoad]:
        """Draft tokens and load of the shortest request; of saturated servers that with the largest throughput."""

        def order(item: tuple[int, PredictedLoad]) -> tuple[bool, float, int]:
            num, load = item
            return load.is_saturated, -load.requests_per_s if load.is_saturated else load.e2el_s, num

        return min(self.loads, key=order)


class Speculation:
    """A server, the acceptance of its drafts, and the draft lengths in question."""

    def __init__(
        self,
        steps: ServerSteps,
        acceptance: Acceptance,
        draft_tokens: Sequence[int],
        *,
        bonus: bool = True,
        seed: int = 0,
    ) -> None:
        self.steps, self.bonus = steps, bonus
        self.draft_tokens = tuple(sorted(set(draft_tokens)))
        survival = acceptance.survival(self.draft_tokens[-1], seed)
        self._survival = survival[:, 0].tolist()
        self._tokens = tokens_by_drafts(tuple(survival), bonus=bonus)

    def at_batch(self, rows: int) -> BatchLoad:
        """No speculation and every draft length at one batch size, at least 1."""
        return BatchLoad(rows=rows, points=tuple(self._point(rows, num) for num in (0, *self.draft_tokens)))

    def _point(self, rows: int, num: int) -> LoadPoint:
        step, tokens = self._step(rows, num), self._tokens[num]
        return LoadPoint(
            rows=rows,
            num_draft_tokens=num,
            step=step,
            tokens=estimate(tokens),
            goodput_per_s=estimate(tokens * (rows / step.total_s)),
            tpot_s=estimate(step.total_s / tokens),
            speed_up=estimate(tokens * (self._step(rows, 0).total_s / step.total_s)),
        )

    def _step(self, rows: float, num_draft_tokens: int) -> SpeculativeStep:
        return self.steps.step(rows, num_draft_tokens, self._survival[num_draft_tokens], bonus=self.bonus)

    def batches_that_pay(self, num_draft_tokens: int, most_rows: int) -> tuple[int, int] | None:
        """The smallest and the largest batch up to ``most_rows`` at which K drafts gain; None where none does.

        Found on a grid and bisected at its ends, so that a few batches between the two that do not pay are missed.
        """
        tokens = float(self._tokens[num_draft_tokens][0])

        def pays(rows: int) -> bool:
            return rows * tokens / self._step(rows, num_draft_tokens).total_s > rows / self._step(rows, 0).total_s

        def boundary(inside: int, outside: int) -> int:
            """The last batch that pays, on the way from one that does to one that does not."""
            while abs(outside - inside) > 1:
                middle = (inside + outside) // 2
                inside, outside = (middle, outside) if pays(middle) else (inside, middle)
            return inside

        grid = list(_grid(most_rows))
        paying = [index for index, rows in enumerate(grid) if pays(rows)]
        if not paying:
            return None
        first, last = paying[0], paying[-1]
        smallest = boundary(grid[first], grid[first - 1]) if first > 0 else grid[first]
        largest = boundary(grid[last], grid[last + 1]) if last + 1 < len(grid) else grid[last]
        return smallest, largest

    def at_rate(self, rate_per_s: float, size: RequestSize, limits: ServerLimits) -> RateLoad:
        """The load of each draft length at one rate. Raises UsageError for a rate that is not above 0."""
        steps = replace(self.steps, context=size.mean_context)
        return RateLoad(
            rate_per_s=rate_per_s,
            loads=tuple(
                (num, load_at_rate(rate_per_s, size, self._seconds_per_token(steps, num), limits))
                for num in (0, *self.draft_tokens)
            ),
        )

    def _seconds_per_token(self, steps: ServerSteps, num: int) -> StepSeconds:
        """Time in which a step of such work yields one token to each of its rows, with the prompts that it adds.

        Prompts add to a step with drafts the target's time beyond that step, and a pass of the draft over the same
        prompt. The last step of a request is taken to be worth E tokens like the others, though ``max_tokens`` may
        cut it.
        """
        if not num:
            return steps.target_s

        def token_s(work: StepWork) -> float:
            rows, decode_s, prompts_s = float(work.num_decodes), 0.0, 0.0
            if rows:
                decode_s = steps.step(rows, num, self._survival[num], bonus=self.bonus).total_s
            if work.num_prefills:
                verified = one_step(num_decodes=rows, context=steps.context, row_tokens=num + 1)
                prompts_s = steps.target_s(_with_prompts_of(work, verified))
                prompts_s -= steps.target_s(verified) if rows else 0.0
                prompts_s += steps.draft_s(_with_prompts_of(work, StepWork()))
            return decode_s / float(self._tokens[num][0]) + prompts_s

        return token_s

    def served(
        self,
        origin: str,
        batch_sizes: Sequence[int],
        *,
        memory_rows: int | None = None,
        rates: Sequence[float] = (),
        size: RequestSize,
        limits: ServerLimits,
    ) -> "ServedSpeculation":
        """Every draft length at each batch size and, for requests of ``size``, at each rate."""
        most_rows = max(1, MOST_ROWS if memory_rows is None else min(MOST_ROWS, memory_rows))
        return ServedSpeculation(
            origin=origin,
            context=self.steps.context,
            backfill=self.steps.backfill,
            most_rows=most_rows,
            memory_rows=memory_rows,
            batches=tuple(self.at_batch(rows) for rows in batch_sizes),
            paying=tuple((num, self.batches_that_pay(num, most_rows)) for num in self.draft_tokens),
            rates=tuple(self.at_rate(rate, size, limits) for rate in rates),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedSpeculation:
    """Speculation on one server.

    ``paying`` has, for each number of draft tokens, the smallest and the largest batch at which it gains, among
    those up to ``most_rows``; None where there is none. ``memory_rows`` is how many sequences fit beside the
    weights of both models, None where the memory is unknown.
    """

    origin: str
    """Source of the step times, in words."""
    context: float
    backfill: Backfill
    most_rows: int
    memory_rows: int | None
    batches: tuple[BatchLoad, ...]
    paying: tuple[tuple[int, tuple[int, int] | None], ...]
    rates: tuple[RateLoad, ...] = ()

    @property
    def largest_paying(self) -> int:
        """The largest batch at which any of the draft lengths gains; 0 if none does."""
        return max((batches[1] for _, batches in self.paying if batches is not None), default=0)


def rows_that_fit(target: Deployment, draft: Deployment | None, context: float) -> int | None:
    """Sequences of ``context`` tokens that fit beside the weights of both models; None for unknown memory."""
    if target.hardware.memory_bytes is None:
        return None
    return int(kv_capacity_tokens(target, draft=draft) / max(context, 1.0))


def _with_prompts_of(work: StepWork, rows: StepWork) -> StepWork:
    """The step of ``rows`` with the prompts of ``work``, each of which ends in it."""
    return replace(
        rows,
        num_prefills=work.num_prefills,
        prefill_tokens=work.prefill_tokens,
        prefill_context=work.prefill_context,
        prefill_positions=work.prefill_positions,
        num_sampled=rows.num_sampled + work.num_prefills,
    )


def _grid(most_rows: int) -> Iterator[int]:
    """Batch sizes from 1 to ``most_rows``, each about a quarter larger than the one before."""
    rows = 1
    while rows < most_rows:
        yield rows
        # Ratio of neighbouring batches in the search for a crossover, before it is bisected
        rows = max(rows + 1, int(rows * 1.25))
    yield most_rows
