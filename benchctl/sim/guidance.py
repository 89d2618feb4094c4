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

import math
from collections.abc import Callable, Iterable, Sequence as Items
from typing import Final

import msgspec

from benchctl.guided.params import REVISIONS_THAT_SKIP, GuidanceParams
from benchctl.sim.config import SimConfig
from benchctl.sim.costs.cost_model import UNGUIDED, GuidedStep
from benchctl.sim.requests import SamplingParams
from benchctl.sim.sequences import Prefills, Sequence
from benchctl.sim.steps import Course, Progress, StepLog
from benchctl.workload.seeded import named_stream

GAP_SCALE: Final = 13.8
"""S, in nats, an assumption: with min_p 0.01 (bound 4.6 nats) three in four rows have one candidate."""
REPEATS_FROM_TOKENS: Final = 1080
"""Calibrated to the 90.2 % of guided steps with a value forward."""
VOCAB: Final = 152_064
SMALLEST_GAP: Final = 1e-6


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

    __slots__ = (
        "_draw",
        "_is_opening",
        "law",
        "lead",
        "num_followed",
        "number",
        "prompt_tokens",
        "repeats_from",
        "slot",
    )

    def __init__(
        self,
        law: CandidateLaw,
        *,
        prompt_tokens: int,
        draw: Callable[[], float],
        repeats_from: int | None = None,
        number: int = 0,
    ) -> None:
        self._draw = draw
        self._is_opening = True
        self.law = law
        self.prompt_tokens = prompt_tokens
        self.repeats_from = repeats_from
        """Number of tokens from which there is a single candidate, or None."""
        self.num_followed = 0
        """Tokens of this sequence in the value model's own key-value memory."""
        self.number = number
        """Number of this sequence in the order of arrival."""
        self.lead = 0
        """Tokens minus steps while it decodes, as ``Sequence`` has it."""
        self.slot = -1
        """Its column in the table of rows that are drawn together, -1 outside of it."""

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
    can_fuse = scored > 0 and revision != "V1"
    return GuidedStep(
        wanted_rows=asking,
        scored_rows=scored,
        candidates=candidates,
        value_prefill_tokens=prefill,
        value_extend_tokens=extend,
        fused=(revision == "V4" or largest_lag <= 1) if can_fuse else None,
    )


class GuidedRows:
    """The decoding rows that ask for guidance, scored one by one.

    Each has a stream of its own, so that its counts do not depend on the rows beside it.
    """

    def __init__(self, config: SimConfig) -> None:
        self.config: Final = config
        self._rows: dict[GuidedRow, None] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def row_of(self, seq: Sequence) -> GuidedRow | None:
        """The guidance of a sequence at its start, None where nothing guides it."""
        request = seq.request
        law = self.law_of(request.guidance, request.sampling)
        if law is None:
            return None
        return GuidedRow(
            law,
            prompt_tokens=seq.prompt_tokens,
            draw=self._draw_of(seq),
            repeats_from=None if request.ignore_eos else seq.prompt_tokens + REPEATS_FROM_TOKENS,
            number=seq.seq_id,
        )

    def law_of(self, guidance: GuidanceParams | None, sampling: SamplingParams) -> CandidateLaw | None:
        """The law of the candidates of a request, None where nothing guides it."""
        skips = self.config.revision in REVISIONS_THAT_SKIP
        if guidance is None or sampling.is_greedy or (guidance.is_neutral and skips):
            return None
        return CandidateLaw.of(guidance, sampling, self.config.revision)

    def join(self, row: GuidedRow, lead: int, step: int) -> None:  # noqa: ARG002 - of rows that are drawn together
        """Take in a row that begins to decode with ``step``."""
        row.lead = lead
        self._rows[row] = None

    def leave(self, row: GuidedRow, step: int) -> None:  # noqa: ARG002
        """Let go of a row before ``step``."""
        del self._rows[row]

    def score(self, new: Items[tuple[GuidedRow, int]], step: int) -> GuidedStep:
        """Score the rows that sample in ``step``, and those that complete a prompt in it, with their lengths."""
        rows = [(row, row.lead + step) for row in self._rows]
        rows += new
        return score_rows(rows, self.config.revision) if rows else UNGUIDED

    def walk(self, course: Course, log: StepLog) -> Progress:
        """Run the steps of a course and append their columns; rows with streams of their own are run one by one."""
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
