"""Guided decoding as the fork does it: the rows that a value model scores, and the work of scoring them.

A model of probabilities replaces the language model: the log-probability falls by the same ``gap`` from one
rank to the next, and the gap of a row and position is drawn from P(gap > x) = S / (S + x). ``min_p`` and
``top_p`` bound gap times rank, so the natural number of candidates is 1 + floor(bound / gap); ``top_k`` cuts it.
A large gap means certainty: on mathematical text most rows have a single candidate under min_p 0.01, skip the
value model, and lag until the next time that they are scored.

The published means imply that 9.8 % of the guided steps ran no value forward. The simulator puts them at the end,
where a batch has few rows: a natural answer of more than 1,080 tokens to a school question repeats itself, and
leaves no choice from there on. Answers of forced length do not.
"""

import heapq
import math
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Final, NamedTuple

import msgspec
import numpy as np

from benchctl.guided.params import REVISIONS_THAT_SKIP, GuidanceParams
from benchctl.records.columns import Floats, Integers
from benchctl.sim.config import SimConfig
from benchctl.sim.costs.cost_model import UNGUIDED, GuidedCounts, GuidedStep
from benchctl.sim.requests import SamplingParams
from benchctl.sim.sequences import Prefills, Sequence
from benchctl.workload.seeded import named_stream

GAP_SCALE: Final = 13.8
"""S, in nats, an assumption: with min_p 0.01 (bound 4.6 nats) three in four rows have one candidate."""
REPEATS_FROM_TOKENS: Final = 1080
"""Calibrated to the 90.2 % of guided steps with a value forward."""
VOCAB: Final = 152_064
SMALLEST_GAP: Final = 1e-6

_BISECTIONS: Final = 60
"""Halvings of the unit interval: past the last bit of a uniform number."""
_FIRST_STEPS: Final = 16
_MOST_STEPS: Final = 256
_MOST_DRAWS: Final = 1 << 15
"""Steps of the first chunk of a batch and of any chunk, and uniform numbers of one."""
_LEAD, _FOLLOWED, _PROMPT, _THRESHOLD, _BOUND, _TEMPERATURE, _TOP_K = range(7)
"""Rows of the table: a sequence's lead, the tokens followed by the value model, its prompt; its law."""


class CandidateLaw(msgspec.Struct, frozen=True, kw_only=True):
    """The number of candidates of a row and position as a function of one uniform number, with which it falls."""

    bound: float
    temperature: float
    top_k: int
    threshold: float | None
    is_full_entropy: bool

    @classmethod
    def of(cls, guidance: GuidanceParams, sampling: SamplingParams, revision: str) -> "CandidateLaw":
        return cls(
            bound=candidate_bound(sampling),
            temperature=sampling.temperature,
            top_k=sampling.top_k if sampling.top_k > 0 else VOCAB,
            threshold=guidance.value_entropy_threshold,
            is_full_entropy=revision == "V4",
        )

    def count_at(self, u: float, at_least: int = 1) -> int:
        """Candidates where the uniform number is ``u``; 1 where guidance is skipped."""
        gap = max(GAP_SCALE * u / (1 - u) / self.temperature, SMALLEST_GAP)
        count = min(max(int(min(self.bound / gap, VOCAB)) + 1, at_least), self.top_k)
        if self.threshold is not None and count > 1:
            num_ranks = VOCAB if self.is_full_entropy else count
            if candidate_entropy(gap, num_ranks) <= self.threshold:
                return 1
        return count


class GuidedRow:
    """Guidance of one sequence: its stream of gaps, and the tokens that the value model has followed."""

    __slots__ = ("_draw", "_is_opening", "law", "num_followed", "prompt_tokens", "repeats_from")

    def __init__(
        self,
        law: CandidateLaw,
        *,
        prompt_tokens: int,
        draw: Callable[[], float],
        repeats_from: int | None = None,
    ) -> None:
        self._draw = draw
        self._is_opening = True
        self.law = law
        self.prompt_tokens = prompt_tokens
        self.repeats_from = repeats_from
        """Number of tokens from which there is a single candidate, or None."""
        self.num_followed = 0
        """Tokens of this sequence in the value model's own key-value memory."""

    def num_candidates(self, num_tokens: int) -> int:
        """Candidates for the token after ``num_tokens``; 1 where guidance is skipped. The first has a choice."""
        if self.repeats_from is not None and num_tokens >= self.repeats_from:
            return 1
        at_least = 2 if self._is_opening else 1
        self._is_opening = False
        return self.law.count_at(self._draw(), at_least)


def candidate_bound(sampling: SamplingParams) -> float:
    """Largest gap times rank that the filters keep: min(-ln min_p, -ln(1 - top_p)).

    min_p keeps p_r >= min_p p_1; top_p keeps a rank while the mass before it, 1 - exp(-gap (r - 1)), is at most
    top_p. Infinite where neither filters.
    """
    by_min_p = -math.log(sampling.min_p) if sampling.min_p > 0 else math.inf
    by_top_p = -math.log(1 - sampling.top_p) if sampling.top_p < 1 else math.inf
    return min(by_min_p, by_top_p)


def candidate_entropy(gap: float, count: int) -> float:
    """Entropy in nats of ``count`` ranks whose probabilities fall by exp(-gap): ln Z + gap E[rank]."""
    ratio, last = math.exp(-gap), math.exp(-gap * count)
    if last == 1:
        return math.log(count)
    total = math.expm1(-gap * count) / math.expm1(-gap)
    mean_rank = ratio / -math.expm1(-gap) - count * last / -math.expm1(-gap * count)
    return math.log(total) + gap * mean_rank


def score_rows(rows: Iterable[tuple[GuidedRow, int]], revision: str) -> GuidedStep:
    """Advance the guided rows of one step, given with the length of each.

    A scored row first brings the value model up to its length: prompt tokens are prefill, later ones extend. V2
    fuses extending and scoring when every scored row lags by one token at most; V4 always; V1 never.
    """
    asking = scored = candidates = prefill = extend = largest_lag = 0
    for row, num_tokens in rows:
        asking += 1
        count = row.num_candidates(num_tokens)
        if count < 2:
            continue
        scored += 1
        candidates += count
        lag = num_tokens - row.num_followed
        prompt = max(0, row.prompt_tokens - row.num_followed)
        prefill += prompt
        extend += lag - prompt
        largest_lag = max(largest_lag, lag)
        row.num_followed = num_tokens
    fused = None
    if scored and revision != "V1":
        fused = revision == "V4" or largest_lag <= 1
    return GuidedStep(
        wanted_rows=asking,
        scored_rows=scored,
        candidates=candidates,
        value_prefill_tokens=prefill,
        value_extend_tokens=extend,
        fused=fused,
    )


class GuidedRows:
    """The decoding rows that ask for guidance, scored one by one.

    Each has a stream of its own, so that its counts do not depend on the rows beside it.
    """

    def __init__(self, config: SimConfig) -> None:
        self.config: Final = config
        self._rows: dict[Sequence, None] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def row_of(self, seq: Sequence) -> GuidedRow | None:
        """The guidance of a sequence at its start, None where nothing guides it."""
        request, guidance = seq.request, seq.request.guidance
        if (
            guidance is None
            or seq.is_greedy
            or (guidance.is_neutral and self.config.revision in REVISIONS_THAT_SKIP)
        ):
            return None
        return GuidedRow(
            CandidateLaw.of(guidance, request.sampling, self.config.revision),
            prompt_tokens=seq.prompt_tokens,
            draw=self._draw_of(seq),
            repeats_from=None if request.ignore_eos else seq.prompt_tokens + REPEATS_FROM_TOKENS,
        )

    def join(self, seq: Sequence) -> None:
        """Take in a row that begins to decode."""
        self._rows[seq] = None

    def leave(self, seq: Sequence) -> None:
        """Let go of a row, if it is one of these."""
        self._rows.pop(seq, None)

    def score(self, prefills: Prefills) -> GuidedStep:
        """Score the rows that sample in the next step, those of ``prefills`` that complete a prompt among them."""
        rows = [(seq.guided, seq.num_tokens) for seq in self._rows if seq.guided is not None]
        rows += sampling_rows(prefills)
        return score_rows(rows, self.config.revision) if rows else UNGUIDED

    def counts_of(self, step: int, num_steps: int) -> GuidedCounts:
        """Counts of at most ``num_steps`` steps from ``step`` on; rows with their own streams have none ahead."""
        raise NotImplementedError

    def _draw_of(self, seq: Sequence) -> Callable[[], float]:
        request = seq.request
        return named_stream(request.seed, f"candidates:{request.prompt.digest}:{seq.choice}").random


def sampling_rows(prefills: Prefills) -> list[tuple[GuidedRow, int]]:
    """The guided rows whose prompts end in this step."""
    return [
        (seq.guided, seq.num_tokens)
        for seq, num_tokens in prefills
        if seq.guided is not None and seq.num_computed + num_tokens == seq.num_tokens
    ]


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
