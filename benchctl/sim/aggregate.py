"""Many decode steps at once, in arrays: their prices, and guided rows that are drawn together.

What needs numpy is here: a server, which runs one step after the other, starts without it.
"""

import heapq
from collections.abc import Callable
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np

from benchctl.records.columns import Floats, Integers
from benchctl.sim.config import SimConfig
from benchctl.sim.costs.cost_model import GuidedCounts, GuidedStep
from benchctl.sim.guidance import (
    GAP_SCALE,
    SMALLEST_GAP,
    VOCAB,
    CandidateLaw,
    GuidedRows,
    sampling_rows,
    score_rows,
)
from benchctl.sim.sequences import Prefills, Sequence
from benchctl.sim.steps import Course, Progress, StepLog
from benchctl.workload.seeded import named_stream

_BISECTIONS: Final = 60
"""Halvings of the unit interval: past the last bit of a uniform number."""
_FIRST_STEPS: Final = 16
_MOST_STEPS: Final = 256
_MOST_DRAWS: Final = 1 << 15
"""Steps of the first chunk of a batch and of any chunk, and uniform numbers of one."""
_LEAD, _FOLLOWED, _PROMPT, _THRESHOLD, _BOUND, _TEMPERATURE, _TOP_K = range(7)
"""Rows of the table: a sequence's lead, the tokens followed by the value model, its prompt; its law."""
_LONGEST: Final = 8192


class _Chunk(NamedTuple):
    """Uniform numbers of the rows, in the order of the table, in the steps from ``begin`` on."""

    begin: int
    uniform: Floats


class _Piece(NamedTuple):
    """Steps of a chunk from ``begin`` on: their counts, and every scored row and step, a row after the other."""

    begin: int
    counts: GuidedCounts
    rows: Integers
    steps: Integers


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
        self._random: Final = np.random.Generator(np.random.PCG64(seed))
        self._table = np.zeros((7, 64))
        self._active: list[Sequence] = []
        """The row in each column of the table."""
        self._slots: dict[Sequence, int] = {}
        self._repeats: list[tuple[int, int, Sequence]] = []
        """Heap of the steps from which a row has no choice; rows that left stay in it."""
        self._chunk: _Chunk | None = None
        self._piece: _Piece | None = None
        self._num_next = _FIRST_STEPS

    def join(self, seq: Sequence) -> None:
        super().join(seq)
        row, step = seq.guided, seq.num_tokens - seq.lead
        if row is None or (row.repeats_from is not None and seq.num_tokens >= row.repeats_from):
            return
        self._settle(step)
        slot, law = len(self._active), row.law
        if slot == self._table.shape[1]:
            self._table = np.concatenate((self._table, self._table), axis=1)
        self._active.append(seq)
        self._slots[seq] = slot
        numbers = (scoring_threshold(law), law.bound, law.temperature, law.top_k)
        self._table[:, slot] = (seq.lead, row.num_followed, row.prompt_tokens, *numbers)
        if row.repeats_from is not None:
            heapq.heappush(self._repeats, (row.repeats_from - seq.lead, seq.seq_id, seq))

    def leave(self, seq: Sequence) -> None:
        super().leave(seq)
        if seq in self._slots:
            self._settle(seq.num_tokens - seq.lead)
            self._vacate(seq)

    def score(self, prefills: Prefills) -> GuidedStep:
        new = score_rows(sampling_rows(prefills), self.config.revision)
        if not len(self):
            return new
        seq = next(iter(self._rows))
        counts = self.counts_of(seq.num_tokens - seq.lead, 1)
        scored, candidates, prefill, extend, fused = (int(column[0]) for column in counts)
        can_fuse = scored + new.scored_rows and self.config.revision != "V1"
        return GuidedStep(
            wanted_rows=len(self) + new.wanted_rows,
            scored_rows=scored + new.scored_rows,
            candidates=candidates + new.candidates,
            value_prefill_tokens=prefill + new.value_prefill_tokens,
            value_extend_tokens=extend + new.value_extend_tokens,
            fused=(fused != 0 and new.fused is not False) if can_fuse else None,
        )

    def counts_of(self, step: int, num_steps: int) -> GuidedCounts:
        """Counts of the steps from ``step`` on, ``num_steps`` or as many as the chunk has left."""
        self._follow(step)
        begin, uniform = self._chunk_at(step)
        columns, table = uniform[:, step - begin :][:, :num_steps], self._table[:, : len(self._active)]
        self._piece = _score(columns, table, step, self.config.revision)
        return self._piece.counts

    def walk(self, course: Course, log: StepLog) -> Progress:
        return _walk_guided(course, self.counts_of(course.step, course.num_steps), log)

    def _draw_of(self, seq: Sequence) -> Callable[[], float]:  # noqa: ARG002 - one stream for all
        return self._random.random

    def _chunk_at(self, step: int) -> _Chunk:
        """The chunk that this step belongs to, drawn where the last one is over."""
        chunk = self._chunk
        if chunk is not None and step < chunk.begin + chunk.uniform.shape[1]:
            return chunk
        self._num_next = _FIRST_STEPS if chunk is None else min(2 * self._num_next, _MOST_STEPS)
        while self._repeats and (self._repeats[0][0] <= step or self._repeats[0][2] not in self._slots):
            seq = heapq.heappop(self._repeats)[2]
            row = seq.guided
            if seq in self._slots and row is not None and seq.num_tokens >= (row.repeats_from or 0):
                self._vacate(seq)
        num_active = len(self._active)
        num_steps = max(1, min(self._num_next, _MOST_DRAWS // max(num_active, 1)))
        if self._repeats:
            num_steps = min(num_steps, self._repeats[0][0] - step)
        self._chunk = _Chunk(step, self._random.random((num_active, num_steps)))
        return self._chunk

    def _settle(self, step: int) -> None:
        """End the chunk before ``step``."""
        self._follow(step)
        self._chunk = None

    def _follow(self, step: int) -> None:
        """End the piece before ``step``: what was scored until then has been followed."""
        piece = self._piece
        if piece is not None:
            is_past = piece.steps < step - piece.begin
            rows = piece.rows[is_past]
            self._table[_FOLLOWED, rows] = self._table[_LEAD, rows] + piece.begin + piece.steps[is_past]
            self._piece = None

    def _vacate(self, seq: Sequence) -> None:
        slot, last = self._slots.pop(seq), self._active.pop()
        if seq.guided is not None:
            seq.guided.num_followed = int(self._table[_FOLLOWED, slot])
        if last is not seq:
            self._active[slot] = last
            self._slots[last] = slot
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


def _score(uniform: Floats, table: Floats, begin: int, revision: str) -> _Piece:
    """Score the rows of the table in a step for each column of ``uniform``.

    A row is scored where its uniform number is below its threshold, independently of all else, as
    ``GuidedRow`` does it; the sums over the rows so have the distribution that single rows give them.
    """
    num_steps = uniform.shape[1]
    hits = np.flatnonzero(uniform < table[_THRESHOLD][:, None])
    row, step = np.divmod(hits, num_steps)
    lead, previous, prompts, _, *laws = table[:, row]
    candidates = _candidates(uniform.ravel()[hits], *laws)
    end = lead + (begin + step)
    if num_steps > 1:
        again = np.flatnonzero(row[1:] == row[:-1])
        previous[again + 1] = end[again]
    prompt = np.maximum(prompts - previous, 0)
    scored = np.bincount(step, minlength=num_steps)
    is_fused = np.full(num_steps, revision == "V4")
    if revision == "V2":
        is_fused = np.bincount(step[end - previous > 1], minlength=num_steps) == 0
    counts = GuidedCounts(
        scored_rows=scored,
        candidates=_sums(step, candidates, num_steps),
        value_prefill_tokens=_sums(step, prompt, num_steps),
        value_extend_tokens=_sums(step, end - previous - prompt, num_steps),
        fused=np.where((scored > 0) & (revision != "V1"), is_fused, -1),
    )
    return _Piece(begin, counts, row, step)


def _candidates(uniform: Floats, bound: Floats, temperature: Floats, top_k: Floats) -> Floats:
    """Candidates of scored rows, ``CandidateLaw.count_at`` for many."""
    gap = np.maximum(GAP_SCALE * uniform / (1 - uniform) / temperature, SMALLEST_GAP)
    count = np.floor(np.minimum(bound / gap, VOCAB)) + 1
    candidates: Floats = np.minimum(count, top_k)
    return candidates


def _sums(step: Integers, values: Integers | Floats, num_steps: int) -> Integers:
    """Sum of the values of each step."""
    return np.bincount(step, weights=values, minlength=num_steps).astype(np.int64)


def walk_as_arrays(course: Course, log: StepLog, num_steps: int) -> Progress:
    """``walk`` for ``num_steps`` at most, and _LONGEST."""
    forwards_ns = _forwards_ns(course, min(num_steps, _LONGEST))
    return _steps_in_bounds(course, course.fixed_ns + forwards_ns, log)


def _walk_guided(course: Course, counts: GuidedCounts, log: StepLog) -> Progress:
    """Steps of a batch with guided rows, which were drawn: as many as ``counts`` has."""
    cost = course.cost
    if cost.scored_rest is None or cost.value_forward_ns is None:
        raise TypeError("this price has no guided rows")
    is_scored = counts.scored_rows > 0
    value_ns = np.rint(cost.value_forward_ns(counts)).astype(np.int64)
    scored_ns = cost.scored_rest.total_ns() - cost.rest.total_ns() + value_ns
    dur_ns = course.fixed_ns + _forwards_ns(course, len(is_scored)) + np.where(is_scored, scored_ns, 0)
    progress = _steps_in_bounds(course, dur_ns, log)
    columns = (*counts, np.where(is_scored, value_ns, -1))
    for column, values in zip(log.extra.values(), columns, strict=True):
        column.frombytes(values[: progress[0]].tobytes())
    return progress


def _forwards_ns(course: Course, num_steps: int) -> Integers:
    """model_forward of each of the next steps."""
    positions = course.position + course.slope * np.arange(num_steps)
    forward_ns = np.max([intercept + slope * positions for intercept, slope in course.cost.lines], axis=0)
    whole_ns: Integers = np.rint(forward_ns).astype(np.int64) + course.cost.forward_ns
    return whole_ns


def _steps_in_bounds(course: Course, dur_ns: Integers, log: StepLog) -> Progress:
    """Append the steps of these durations that are within the bounds of the course."""
    num_steps = len(dur_ns)
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
