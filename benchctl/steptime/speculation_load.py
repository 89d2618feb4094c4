"""Speculation on a server with step times: goodput by batch, latency by rate."""

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Final

from benchctl.errors import UsageError
from benchctl.steptime.queueing import (
    PredictedLoad,
    RequestSize,
    ServerLimits,
    StepSeconds,
    kv_capacity_tokens,
    load_at_rate,
)
from benchctl.steptime.speculation.server_steps import Backfill, ServerSteps, SpeculativeStep
from benchctl.steptime.speculation_law import Acceptance, Estimate, estimate, survival, tokens_by_drafts
from benchctl.steptime.work import Deployment, StepWork, one_step

_GRID_RATIO: Final = 1.25
"""Ratio of neighbouring batches in the search for a crossover, before it is bisected."""


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
        longest = self.draft_tokens[-1]
        self._survival = survival(acceptance.of(longest))
        self._tokens = tokens_by_drafts(self._survival, bonus=bonus)
        survival_draws = acceptance.survival_draws(longest, seed)
        self._draws = tokens_by_drafts(survival_draws, bonus=bonus) if survival_draws else ()

    def at_context(self, context: float) -> "Speculation":
        """The same with so many tokens in the cache of each row."""
        moved = copy(self)
        moved.steps = replace(self.steps, context=context)
        return moved

    def tokens(self, num_draft_tokens: int) -> float:
        """Expected tokens per step and sequence."""
        return self._tokens[num_draft_tokens]

    def step(self, rows: float, num_draft_tokens: int) -> SpeculativeStep:
        return self.steps.step(rows, num_draft_tokens, self._survival[num_draft_tokens], bonus=self.bonus)

    def goodput_per_s(self, rows: float, num_draft_tokens: int) -> float:
        return rows * self.tokens(num_draft_tokens) / self.step(rows, num_draft_tokens).total_s

    def at_batch(self, rows: int) -> BatchLoad:
        """No speculation and every draft length at one batch size. Raises UsageError for one below 1."""
        if rows < 1:
            raise UsageError(f"a batch of {rows} sequences has no load; it has at least 1")
        return BatchLoad(rows=rows, points=tuple(self._point(rows, num) for num in (0, *self.draft_tokens)))

    def batches_that_pay(self, num_draft_tokens: int, most_rows: int) -> tuple[int, int] | None:
        """The smallest and the largest batch up to ``most_rows`` at which K drafts gain; None where none does.

        Found on a grid and bisected at its ends, so that a few batches between the two that do not pay are missed.
        """
        grid = list(_grid(most_rows))
        paying = [index for index, rows in enumerate(grid) if self._pays(rows, num_draft_tokens)]
        if not paying:
            return None
        first, last = paying[0], paying[-1]
        smallest, largest = grid[first], grid[last]
        if first > 0:
            smallest = self._boundary(smallest, grid[first - 1], num_draft_tokens)
        if last + 1 < len(grid):
            largest = self._boundary(largest, grid[last + 1], num_draft_tokens)
        return smallest, largest

    def _pays(self, rows: int, num_draft_tokens: int) -> bool:
        return self.goodput_per_s(rows, num_draft_tokens) > rows / self.steps.plain_s(rows)

    def _boundary(self, pays: int, does_not: int, num_draft_tokens: int) -> int:
        """The last batch that pays, on the way from one that does to one that does not."""
        while abs(does_not - pays) > 1:
            middle = (pays + does_not) // 2
            pays, does_not = (middle, does_not) if self._pays(middle, num_draft_tokens) else (pays, middle)
        return pays

    def _point(self, rows: int, num: int) -> LoadPoint:
        step, draws = self.step(rows, num), self._draws[num] if self._draws else None
        total_s, plain_s = step.total_s, self.steps.plain_s(rows)

        def of_tokens(factor: float) -> Estimate:
            return estimate(self._tokens[num] * factor, None if draws is None else draws * factor)

        tpot_s = None if draws is None else total_s / draws
        return LoadPoint(
            rows=rows,
            num_draft_tokens=num,
            step=step,
            tokens=of_tokens(1.0),
            goodput_per_s=of_tokens(rows / total_s),
            tpot_s=estimate(total_s / self._tokens[num], tpot_s),
            speed_up=of_tokens(plain_s / total_s),
        )


def _grid(most_rows: int) -> Iterable[int]:
    """Batch sizes from 1 to ``most_rows``, each about a quarter larger than the one before."""
    rows = 1
    while rows < most_rows:
        yield rows
        rows = max(rows + 1, int(rows * _GRID_RATIO))
    yield most_rows


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


def load_with_drafts(
    speculation: Speculation, rate_per_s: float, size: RequestSize, limits: ServerLimits
) -> RateLoad:
    """The load of each draft length at one rate. Raises UsageError for a rate that is not above 0."""
    at_size = speculation.at_context(size.mean_context)
    return RateLoad(
        rate_per_s=rate_per_s,
        loads=tuple(
            (num, load_at_rate(rate_per_s, size, seconds_per_token(at_size, num), limits))
            for num in (0, *speculation.draft_tokens)
        ),
    )


def seconds_per_token(speculation: Speculation, num_draft_tokens: int) -> StepSeconds:
    """Time in which a step of such work yields one token to each of its rows, with the prompts that it adds."""
    target_s, draft_s = speculation.steps.target_s, speculation.steps.draft_s
    if not num_draft_tokens:
        return target_s

    def token_s(work: StepWork) -> float:
        rows = float(work.num_decodes)
        decode_s = speculation.step(rows, num_draft_tokens).total_s if rows else 0.0
        prompts_s = 0.0
        if work.num_prefills:
            verified = one_step(
                num_decodes=rows, context=speculation.steps.context, row_tokens=num_draft_tokens + 1
            )
            together = _with_prompts_of(work, verified)
            prompts = _with_prompts_of(work, one_step(num_decodes=0.0, context=0.0))
            prompts_s = target_s(together) - (target_s(verified) if rows else 0.0) + draft_s(prompts)
        return decode_s / speculation.tokens(num_draft_tokens) + prompts_s

    return token_s


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


MOST_ROWS: Final = 4096
"""Batches are looked at up to here where memory sets no limit."""


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


def serve(
    speculation: Speculation,
    origin: str,
    batch_sizes: Sequence[int],
    *,
    memory_rows: int | None = None,
    rates: Sequence[float] = (),
    size: RequestSize | None = None,
    limits: ServerLimits | None = None,
) -> ServedSpeculation:
    """Every draft length at each batch size and, for requests of ``size``, at each rate."""
    most_rows = max(1, min(MOST_ROWS, MOST_ROWS if memory_rows is None else memory_rows))
    return ServedSpeculation(
        origin=origin,
        context=speculation.steps.context,
        backfill=speculation.steps.backfill,
        most_rows=most_rows,
        memory_rows=memory_rows,
        batches=tuple(speculation.at_batch(rows) for rows in batch_sizes),
        paying=tuple((num, speculation.batches_that_pay(num, most_rows)) for num in speculation.draft_tokens),
        rates=tuple(load_with_drafts(speculation, rate, size, limits or ServerLimits()) for rate in rates)
        if size is not None
        else (),
    )


def rows_that_fit(target: Deployment, draft: Deployment | None, context: float) -> int | None:
    """Sequences of ``context`` tokens that fit beside the weights of both models; None for unknown memory.

    ``kv_capacity_tokens`` over the context.
    """
    if target.hardware.memory_bytes is None:
        return None
    return int(kv_capacity_tokens(target, draft=draft) / max(context, 1.0))
