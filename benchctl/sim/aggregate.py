"""Many decode steps at once, in arrays: their prices, and guided rows that are drawn together.

What needs numpy is here: a server, which runs one step after the other, starts without it.
"""

import heapq
from collections.abc import Callable, Sequence as Items
from functools import lru_cache
from typing import Final

import numpy as np

from benchctl.records.columns import Floats, Integers
from benchctl.sim.config import SimConfig
from benchctl.sim.costs.cost_model import GuidedCounts, GuidedStep
from benchctl.sim.guidance import (
    GAP_SCALE,
    SMALLEST_GAP,
    VOCAB,
    CandidateLaw,
    GuidedRow,
    GuidedRows,
    score_rows,
)
from benchctl.sim.sequences import Sequence
from benchctl.sim.steps import NO_VALUE, Course, Progress, StepLog, walk_steps
from benchctl.workload.seeded import named_stream

_BISECTIONS: Final = 60
"""Halvings of the unit interval: past the last bit of a uniform number."""
_FIRST_STEPS: Final = 16
_MOST_STEPS: Final = 256
_MOST_DRAWS: Final = 1 << 15
"""Steps of the first chunk of a batch and of any chunk, and uniform numbers of one."""
_FOLLOWED, _PROMPT, _THRESHOLD, _BOUND, _TEMPERATURE, _MOST = range(6)
"""Rows of the table: the steps at which a sequence has the tokens that the value model has followed, and those of
its prompt; its law, with the most candidates but one."""
_LONGEST: Final = 8192


class AggregateRows(GuidedRows):
    """The same rows drawn together: many of them and many steps in one call of the random source.

    One stream serves all rows, which makes the draws of a row depend on the rows beside it, though no
    distribution. A chunk of steps ends when a row joins, leaves or runs out of choices; the draws left over are
    dropped. Of a chunk only the steps that are asked for are scored, piece by piece. The table has a column for
    each row that may be scored; the last moves into the place of one that leaves.
    """

    def __init__(self, config: SimConfig) -> None:
        super().__init__(config)
        seed = named_stream(config.noise_seed, "guided-rows").getrandbits(128)
        self.source: Final = np.random.Generator(np.random.PCG64(seed))
        self._table = np.zeros((6, 64))
        self._has_prompts = False
        """Whether the value model may lack the prompt of a row of the table."""
        self._active: list[GuidedRow] = []
        """The row in each column of the table."""
        self._repeats: list[tuple[int, int, GuidedRow]] = []
        """Heap of the steps from which a row has no choice; rows that left stay in it."""
        self._begin = 0
        """First step of the chunk."""
        self._chunk: Floats | None = None
        """Uniform numbers of the rows of the table, a column for each step."""
        self._scored: tuple[Integers, Integers] | None = None
        """Rows and steps that the last counts have scored, a row after the other."""
        self._num_next = _FIRST_STEPS

    def join(self, row: GuidedRow, lead: int, step: int) -> None:
        super().join(row, lead, step)
        slot, law = len(self._active), row.law
        if row.repeats_from is not None and lead + step >= row.repeats_from:
            return
        self._settle(step)
        if slot == self._table.shape[1]:
            self._table = np.concatenate((self._table, self._table), axis=1)
        self._active.append(row)
        row.slot = slot
        self._table[:, slot] = (
            row.num_followed - lead,
            row.prompt_tokens - lead,
            scoring_threshold(law),
            law.bound,
            law.temperature,
            min(law.top_k - 1, VOCAB),
        )
        self._has_prompts |= row.num_followed < row.prompt_tokens
        if row.repeats_from is not None:
            heapq.heappush(self._repeats, (row.repeats_from - lead, row.number, row))

    def leave(self, row: GuidedRow, step: int) -> None:
        super().leave(row, step)
        if row.slot >= 0:
            self._settle(step)
            self._vacate(row)

    def score(self, new: Items[tuple[GuidedRow, int]], step: int) -> GuidedStep:
        fresh = score_rows(new, self.config.revision)
        if not self._rows:
            return fresh
        scored, candidates, prefill, extend, fused = (int(column[0]) for column in self.counts_of(step, 1))
        can_fuse = scored + fresh.scored_rows and self.config.revision != "V1"
        return GuidedStep(
            wanted_rows=len(self) + fresh.wanted_rows,
            scored_rows=scored + fresh.scored_rows,
            candidates=candidates + fresh.candidates,
            value_prefill_tokens=prefill + fresh.value_prefill_tokens,
            value_extend_tokens=extend + fresh.value_extend_tokens,
            fused=(fused != 0 and fresh.fused is not False) if can_fuse else None,
        )

    def counts_of(self, step: int, num_steps: int) -> GuidedCounts:
        """Counts of the steps from ``step`` on, ``num_steps`` or as many as the chunk has left.

        A row is scored where its uniform number is below its threshold, independently of all else, as
        ``GuidedRow`` does it; the sums over the rows so have the distribution that single rows give them.
        """
        self._follow(step)
        uniform = self._drawn_from(step)[:, :num_steps]
        num_rows, num_steps = uniform.shape
        hits = (uniform < self._table[_THRESHOLD, :num_rows, None]).ravel().nonzero()[0]
        rows, steps = np.divmod(hits, num_steps) if num_steps > 1 else (hits, np.zeros_like(hits))
        before, prompts, _, bound, temperature, most = self._table.take(rows, axis=1)
        ends, drawn, revision = steps + step, uniform.ravel()[hits], self.config.revision
        if num_steps > 1:
            again = (rows[1:] == rows[:-1]).nonzero()[0]
            before[again + 1] = ends[again]
            self._scored = (rows, ends)
        else:
            self._table[_FOLLOWED, rows] = ends
        lags, scored = ends - before, np.bincount(steps, minlength=num_steps)
        gap = np.maximum(GAP_SCALE * drawn / (1 - drawn) / temperature, SMALLEST_GAP)
        prefill, fused = np.zeros(num_steps, dtype=np.int64), np.full(num_steps, -1)
        if self._has_prompts:
            prefill = _sums(steps, np.maximum(prompts - before, 0), num_steps)
        if revision != "V1":
            late = np.bincount(steps[lags > 1], minlength=num_steps)
            fused = np.where(scored > 0, (revision == "V4") | (late == 0), -1)
        return GuidedCounts(
            scored_rows=scored,
            candidates=_sums(steps, np.floor(np.minimum(bound / gap, most)), num_steps) + scored,
            value_prefill_tokens=prefill,
            value_extend_tokens=_sums(steps, lags, num_steps) - prefill,
            fused=fused,
        )

    def walk(self, course: Course, log: StepLog) -> Progress:
        counts, value_forward_ns = self.counts_of(course.step, course.num_steps), course.cost.value_forward_ns
        if value_forward_ns is None:
            raise TypeError("this price has no guided rows")
        columns = [column.tolist() for column in counts]
        value_ns = [
            value_forward_ns(fused, prefill) if scored else NO_VALUE
            for scored, _, prefill, _, fused in zip(*columns, strict=True)
        ]
        more_ns = [0 if forward_ns == NO_VALUE else course.cost.scored_ns + forward_ns for forward_ns in value_ns]
        progress = walk_steps(course, log, len(value_ns), more_ns)
        for column, values in zip(log.extra.values(), (*columns, value_ns), strict=True):
            column.extend(values[: progress[0]])
        return progress

    def _draw_of(self, seq: Sequence) -> Callable[[], float]:  # noqa: ARG002 - one stream for all
        return self.source.random

    def _drawn_from(self, step: int) -> Floats:
        """The chunk from ``step`` on, drawn where the last one is over."""
        chunk = self._chunk
        if chunk is not None and step < self._begin + chunk.shape[1]:
            return chunk[:, step - self._begin :]
        self._num_next = _FIRST_STEPS if chunk is None else min(2 * self._num_next, _MOST_STEPS)
        while self._repeats and (self._repeats[0][0] <= step or self._repeats[0][2].slot < 0):
            row = heapq.heappop(self._repeats)[2]
            if row.slot >= 0 and row.lead + step >= (row.repeats_from or 0):
                self._vacate(row)
        num_active = len(self._active)
        num_steps = max(1, min(self._num_next, _MOST_DRAWS // max(num_active, 1)))
        if self._repeats:
            num_steps = min(num_steps, self._repeats[0][0] - step)
        self._begin, self._chunk = step, self.source.random((num_active, num_steps))
        return self._chunk

    def _settle(self, step: int) -> None:
        """End the chunk before ``step``."""
        self._follow(step)
        self._chunk = None

    def _follow(self, step: int) -> None:
        """Note before ``step`` that the value model has followed what was scored until then."""
        if self._scored is not None:
            rows, steps = self._scored
            is_past = steps < step
            self._table[_FOLLOWED, rows[is_past]] = steps[is_past]
            self._scored = None

    def _vacate(self, row: GuidedRow) -> None:
        slot, last = row.slot, self._active.pop()
        row.num_followed, row.slot = int(self._table[_FOLLOWED, slot]) + row.lead, -1
        if last is not row:
            self._active[slot] = last
            last.slot = slot
            self._table[:, slot] = self._table[:, len(self._active)]


@lru_cache(maxsize=1024)
def scoring_threshold(law: CandidateLaw) -> float:
    """The uniform number below which a row has a choice: the number of candidates falls with it."""
    if law.count_at(1 - 2**-53) > 1:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if middle < 1 and law.count_at(middle) > 1 else (low, middle)
    return low


def _sums(step: Integers, values: Integers | Floats, num_steps: int) -> Integers:
    """Sum of the values of each step."""
    return np.bincount(step, weights=values, minlength=num_steps).astype(np.int64)


def walk_as_arrays(course: Course, log: StepLog, num_steps: int) -> Progress:
    """``walk`` for ``num_steps`` at most, and _LONGEST."""
    num_steps = min(num_steps, _LONGEST)
    positions = course.position + course.slope * np.arange(num_steps)
    forwards_ns = np.max([intercept + slope * positions for intercept, slope in course.cost.lines], axis=0)
    dur_ns = course.fixed_ns + np.rint(forwards_ns).astype(np.int64) + course.cost.forward_ns
    ends_ns = course.now_ns + np.cumsum(dur_ns)
    new_blocks = np.array(course.needs)[np.arange(course.step, course.step + num_steps) % len(course.needs)]
    new_blocks[0] = 0  # the scheduler gave out the blocks of the first step
    kv_used = course.kv_used + np.cumsum(new_blocks)
    in_time = int(np.searchsorted(ends_ns, course.until_ns)) + 1
    with_room = int(np.searchsorted(kv_used, course.num_blocks, side="right"))
    num_run = min(num_steps, in_time, with_room)
    log.dur_ns.frombytes(dur_ns[:num_run].tobytes())
    log.kv_used.frombytes(kv_used[:num_run].astype(np.int32).tobytes())
    return num_run, int(ends_ns[num_run - 1]), int(kv_used[num_run - 1])
