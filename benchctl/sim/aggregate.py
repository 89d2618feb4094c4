"""The decoding rows that ask for guidance, drawn together in chunks of steps."""

import heapq
from collections.abc import Callable
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np

from benchctl.records.columns import Floats, Integers
from benchctl.sim.config import SimConfig
from benchctl.sim.costs.cost_model import GuidedCounts, GuidedDecodeCost
from benchctl.sim.guidance import GAP_SCALE, SMALLEST_GAP, VOCAB, CandidateLaw, GuidedStep, score_rows
from benchctl.sim.guided_rows import GuidedRows, sampling_rows
from benchctl.sim.sequences import Prefills, Sequence
from benchctl.sim.steps import StepLog
from benchctl.sim.walk import Course, Progress, forwards_ns, steps_in_bounds
from benchctl.workload.seeded import named_stream

_BISECTIONS: Final = 60
"""Halvings of the unit interval: past the last bit of a uniform number."""


class RowColumns(NamedTuple):
    """Guided rows as arrays: their length at the first step, the tokens followed, and their laws of candidates."""

    tokens: Integers
    followed: Integers
    prompt: Integers
    threshold: Floats
    bound: Floats
    temperature: Floats
    top_k: Floats


class GuidedDraws(NamedTuple):
    """Counts of each step, and every scored row and step behind them, a row after the other."""

    counts: GuidedCounts
    rows: Integers
    steps: Integers


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


def draw_steps(random: np.random.Generator, rows: RowColumns, num_steps: int, revision: str) -> GuidedDraws:
    """Score the rows in each of ``num_steps`` steps.

    A row is scored where its uniform number is below its threshold, independently of all else, as
    ``GuidedRow`` does it; the sums over the rows so have the distribution that single rows give them.
    """
    uniform = random.random((len(rows.tokens), num_steps))
    hits = np.flatnonzero(uniform < rows.threshold[:, None])
    row, step = np.divmod(hits, num_steps)
    candidates = _candidates(uniform.ravel()[hits], rows, row)
    end = rows.tokens[row] + step
    previous = np.empty_like(end)
    previous[1:] = end[:-1]
    is_first = np.empty(len(row), dtype=bool)
    is_first[:1] = True
    is_first[1:] = row[1:] != row[:-1]
    previous[is_first] = rows.followed[row[is_first]]
    prompt = np.maximum(rows.prompt[row] - previous, 0)
    scored = np.bincount(step, minlength=num_steps)
    is_fused = np.full(num_steps, revision == "V4")
    if revision == "V2":
        is_fused = np.bincount(step[end - previous > 1], minlength=num_steps) == 0
    counts = GuidedCounts(
        scored_rows=scored,
        candidates=_sums(step, candidates, num_steps),
        value_prefill_tokens=_sums(step, prompt, num_steps),
        value_extend_tokens=_sums(step, end - previous - prompt, num_steps),
        is_fused=is_fused.astype(np.int64),
    )
    return GuidedDraws(counts, row, step)


def no_draws(num_steps: int) -> GuidedDraws:
    """Steps in which no row has a choice."""
    none = np.zeros(num_steps, dtype=np.int64)
    return GuidedDraws(GuidedCounts(none, none, none, none, none), none[:0], none[:0])


def _candidates(uniform: Floats, rows: RowColumns, row: Integers) -> Floats:
    """Candidates of scored rows, ``CandidateLaw.count_at`` for many."""
    gap = np.maximum(GAP_SCALE * uniform / (1 - uniform) / rows.temperature[row], SMALLEST_GAP)
    count = np.floor(np.minimum(rows.bound[row] / gap, VOCAB)) + 1
    candidates: Floats = np.minimum(count, rows.top_k[row])
    return candidates


def _sums(step: Integers, values: Integers | Floats, num_steps: int) -> Integers:
    """Sum of the values of each step."""
    return np.bincount(step, weights=values, minlength=num_steps).astype(np.int64)


_FIRST_STEPS: Final = 16
_MOST_STEPS: Final = 256
_MOST_DRAWS: Final = 1 << 15
"""Steps of the first chunk of a batch and of any chunk, and uniform numbers of one."""


class _Chunk(NamedTuple):
    begin: int
    num_steps: int
    draws: GuidedDraws


class AggregateRows(GuidedRows):
    """Arrays with one slot for each row that may be scored; the last row moves into the slot of one that leaves."""

    def __init__(self, config: SimConfig) -> None:
        super().__init__(config)
        seed = named_stream(config.noise_seed, "guided-rows").getrandbits(128)
        self._random: Final = np.random.Generator(np.random.PCG64(seed))
        self._active: list[Sequence] = []
        self._slots: dict[Sequence, int] = {}
        self._counts = np.zeros((3, 64), dtype=np.int64)
        """Lead, tokens followed, and tokens of the prompt."""
        self._laws = np.zeros((4, 64))
        """Threshold, bound, temperature and top_k."""
        self._repeats: list[tuple[int, int, Sequence]] = []
        """Heap of the steps from which a row has no choice; rows that left stay in it."""
        self._chunk: _Chunk | None = None
        self._num_next = _FIRST_STEPS

    def join(self, seq: Sequence) -> None:
        super().join(seq)
        row, step = seq.guided, seq.num_tokens - seq.lead
        if row is None or (row.repeats_from is not None and seq.num_tokens >= row.repeats_from):
            return
        self._settle(step)
        slot = len(self._active)
        if slot == self._laws.shape[1]:
            self._counts = np.concatenate((self._counts, self._counts), axis=1)
            self._laws = np.concatenate((self._laws, self._laws), axis=1)
        self._active.append(seq)
        self._slots[seq] = slot
        self._counts[:, slot] = seq.lead, row.num_followed, row.prompt_tokens
        self._laws[:, slot] = scoring_threshold(row.law), row.law.bound, row.law.temperature, row.law.top_k
        if row.repeats_from is not None:
            heapq.heappush(self._repeats, (row.repeats_from - seq.lead, seq.seq_id, seq))

    def leave(self, seq: Sequence) -> None:
        super().leave(seq)
        if seq in self._slots:
            self._settle(seq.num_tokens - seq.lead)
            self._vacate(seq)

    def score(self, prefills: Prefills) -> GuidedStep:
        new = score_rows(sampling_rows(prefills), self.config.revision)
        wanted_rows = len(self) + new.wanted_rows
        if not len(self):
            return new
        step = self._step()
        chunk = self._chunk_at(step)
        at = step - chunk.begin
        old = GuidedCounts(*(column[at] for column in chunk.draws.counts))
        scored_rows = int(old.scored_rows) + new.scored_rows
        fused = None
        if scored_rows and self.config.revision != "V1":
            fused = bool(old.is_fused or not old.scored_rows) and new.fused is not False
        return GuidedStep(
            wanted_rows=wanted_rows,
            scored_rows=scored_rows,
            candidates=int(old.candidates) + new.candidates,
            value_prefill_tokens=int(old.value_prefill_tokens) + new.value_prefill_tokens,
            value_extend_tokens=int(old.value_extend_tokens) + new.value_extend_tokens,
            fused=fused,
        )

    def walk(self, course: Course, cost: GuidedDecodeCost, log: StepLog) -> Progress:
        """Run decode steps of the present batch, up to the end of a chunk, and append their columns."""
        chunk = self._chunk_at(course.step)
        at = course.step - chunk.begin
        num_steps = min(course.num_steps, chunk.num_steps - at)
        counts = GuidedCounts(*(column[at : at + num_steps] for column in chunk.draws.counts))
        is_scored = counts.scored_rows > 0
        value_ns = np.rint(cost.value_forward_ns(counts)).astype(np.int64)
        dur_ns = (
            course.fixed_ns + forwards_ns(course, num_steps) + np.where(is_scored, cost.scored_ns + value_ns, 0)
        )
        progress = steps_in_bounds(course, dur_ns, log)
        fused = np.where(is_scored & (self.config.revision != "V1"), counts.is_fused, -1)
        columns = (*counts[:4], fused, np.where(is_scored, value_ns, -1))
        for column, values in zip(log.guided.values(), columns, strict=True):
            column.frombytes(values[: progress.num_steps].tobytes())
        return progress

    def _draw_of(self, seq: Sequence) -> Callable[[], float]:  # noqa: ARG002 - one stream for all
        return self._random.random

    def _step(self) -> int:
        seq = next(iter(self._rows))
        return seq.num_tokens - seq.lead

    def _chunk_at(self, step: int) -> _Chunk:
        """The chunk that this step belongs to, drawn where the last one is over."""
        chunk = self._chunk
        if chunk is not None and step < chunk.begin + chunk.num_steps:
            return chunk
        num_next = min(2 * self._num_next, _MOST_STEPS) if chunk is not None else _FIRST_STEPS
        self._settle(step)
        while self._repeats and (self._repeats[0][0] <= step or self._repeats[0][2] not in self._slots):
            seq = heapq.heappop(self._repeats)[2]
            row = seq.guided
            if seq in self._slots and row is not None and seq.num_tokens >= (row.repeats_from or 0):
                self._vacate(seq)
        num_active = len(self._active)
        self._num_next = num_next
        num_steps = max(1, min(num_next, _MOST_DRAWS // max(num_active, 1)))
        if self._repeats:
            num_steps = min(num_steps, self._repeats[0][0] - step)
        if num_active:
            lead, followed, prompt = self._counts[:, :num_active]
            rows = RowColumns(lead + step, followed, prompt, *self._laws[:, :num_active])
            draws = draw_steps(self._random, rows, num_steps, self.config.revision)
        else:
            draws = no_draws(num_steps)
        self._chunk = _Chunk(step, num_steps, draws)
        return self._chunk

    def _settle(self, step: int) -> None:
        """End the chunk before ``step``: what was scored until then has been followed."""
        if self._chunk is None:
            return
        begin, _, (_, rows, steps) = self._chunk
        is_past = steps < step - begin
        past_rows = rows[is_past]
        self._counts[1, past_rows] = self._counts[0, past_rows] + begin + steps[is_past]
        self._chunk = None

    def _vacate(self, seq: Sequence) -> None:
        slot, last = self._slots.pop(seq), self._active.pop()
        if seq.guided is not None:
            seq.guided.num_followed = int(self._counts[1, slot])
        if last is not seq:
            end = len(self._active)
            self._active[slot] = last
            self._slots[last] = slot
            self._counts[:, slot] = self._counts[:, end]
            self._laws[:, slot] = self._laws[:, end]
