"""Goodput of speculation at each batch size: step times in place of constant costs.

    goodput = B E / T(B, K)          tokens per second of a batch of B sequences
    TPOT    = T(B, K) / E            time per output token of each of them

While weights and caches bound a step, verifying B (K + 1) tokens takes as long as B. Once arithmetic does, drafts
that are rejected take time from other sequences, and fewer drafts are better, until none are (X. Liu et al.,
*Optimizing Speculative Decoding for Serving Large Language Models Using Goodput*, arXiv 2406.14066).
"""

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Final

from benchctl.errors import UsageError
from benchctl.steptime.speculation.acceptance import Acceptance
from benchctl.steptime.speculation.estimate import Estimate, estimate
from benchctl.steptime.speculation.law import survival, tokens_by_drafts
from benchctl.steptime.speculation.server_steps import ServerSteps, SpeculativeStep

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
