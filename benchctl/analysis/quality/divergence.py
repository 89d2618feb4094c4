"""Divergence of the texts of two sides: equal texts, and where the others part, choice by choice.

Speculative decoding claims to change nothing; guidance changes tokens on purpose. Neither can be judged alone,
because batches of another shape change the last bits of a logit, and so greedy output, without any other change. So
A against B is shown with A against A, each block of A against the next one. With sampling (a temperature above 0)
equal seeds promise nothing across variants: another kernel or another set of candidates uses random numbers
differently, and texts part although their distribution is the same. Identity says nothing about quality: see
``accuracy``.

Texts part after a number of output tokens, those before the first character that differs. A chunk of several tokens
gives a lower bound, the tokens before that chunk; of two sides the higher bound counts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import median

from benchctl.analysis.metrics.latency import choice_tokens, is_completed, measured
from benchctl.records.loaded import LoadedRun
from benchctl.records.record import ChoiceRecord, RequestRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Parting:
    """Two texts of one choice of one request."""

    is_identical: bool
    after_chars: int | None = None
    """Characters before the first difference; None for identical texts."""
    after_tokens: int | None = None
    """Tokens before it; None for identical texts, and where the token of a character is unknown."""
    longer_tokens: int | None = None
    """Length of the second text minus that of the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Two sides over all answers that both gave. Medians are over answers that part, that of lengths over all."""

    num_pairs: int
    num_identical: int
    num_missing: int
    """Answers that at least one side did not complete."""
    median_after_tokens: float | None
    median_after_chars: float | None
    median_longer_tokens: float | None

    @property
    def identical_frac(self) -> float | None:
        return self.num_identical / self.num_pairs if self.num_pairs else None


@dataclass(frozen=True, slots=True, kw_only=True)
class DivergenceComparison:
    """B against A, and A against itself in the next block."""

    b_against_a: Divergence
    a_against_a: Divergence | None
    """None with fewer than two blocks."""
    temperature: float | None = None
    """Sampling temperature of both sides; None where it is unknown or differs."""


def compare_divergence(
    a_runs: Sequence[LoadedRun], b_runs: Sequence[LoadedRun], temperature: float | None = None
) -> DivergenceComparison | None:
    """Compare the texts of runs in their order; None where no answer was given by both sides, or no text stored.

    Sides of different numbers of runs are compared as far as the shorter one reaches.
    """
    against_b = _divergence(zip(a_runs, b_runs, strict=False))
    if against_b.num_pairs == 0:
        return None
    return DivergenceComparison(
        b_against_a=against_b,
        a_against_a=_divergence(pairwise(a_runs)) if len(a_runs) > 1 else None,
        temperature=temperature,
    )


def compare_texts(a: RequestRecord, b: RequestRecord, index: int) -> Parting:
    """Compare the texts of choice ``index``, which both requests have."""
    one, other = _choice(a, index), _choice(b, index)
    lengths = choice_tokens(a, one), choice_tokens(b, other)
    longer = None if lengths[0] is None or lengths[1] is None else lengths[1] - lengths[0]
    if one.text == other.text:
        return Parting(is_identical=True, longer_tokens=longer)
    after_chars = _common_chars(one.text, other.text)
    tokens = [num for choice in (one, other) if (num := _tokens_before(choice, after_chars)) is not None]
    return Parting(
        is_identical=False,
        after_chars=after_chars,
        after_tokens=max(tokens, default=None),
        longer_tokens=longer,
    )


def _common_chars(one: str, other: str) -> int:
    """Length of the common beginning of two texts."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(one), len(other)))


def _tokens_before(choice: ChoiceRecord, after_chars: int) -> int | None:
    """Tokens of the chunks that end before a character; None where a chunk's tokens or characters are unknown."""
    tokens = choice.chunk_tokens
    if tokens is None and choice.output_tokens == len(choice.chunk_ns):
        tokens = (1,) * len(choice.chunk_ns)
    if tokens is None or choice.chunk_chars is None or len(choice.chunk_chars) != len(tokens):
        return None
    ends = accumulate(choice.chunk_chars)
    return sum(count for count, end in zip(tokens, ends, strict=True) if end <= after_chars)


def _divergence(runs: Iterator[tuple[LoadedRun, LoadedRun]]) -> Divergence:
    partings: list[Parting] = []
    num_missing = 0
    for a_run, b_run in runs:
        b_records = {record.request_id: record for record in measured(b_run.requests)}
        for a in measured(a_run.requests):
            b = b_records.get(a.request_id)
            shared = _shared(a, b)
            num_missing += max(len(a.choices), len(b.choices) if b else 0, 1) - len(shared)
            if b is not None:
                partings += [compare_texts(a, b, index) for index in shared]
    apart = [one for one in partings if not one.is_identical]
    return Divergence(
        num_pairs=len(partings),
        num_identical=len(partings) - len(apart),
        num_missing=num_missing,
        median_after_tokens=_median([one.after_tokens for one in apart]),
        median_after_chars=_median([one.after_chars for one in apart]),
        median_longer_tokens=_median([one.longer_tokens for one in partings]),
    )


def _shared(a: RequestRecord, b: RequestRecord | None) -> list[int]:
    """Choices that both requests completed."""
    if b is None or not (is_completed(a) and is_completed(b)):
        return []
    return sorted({choice.index for choice in a.choices} & {choice.index for choice in b.choices})


def _choice(request: RequestRecord, index: int) -> ChoiceRecord:
    return next(choice for choice in request.choices if choice.index == index)


def _median(values: Sequence[int | None]) -> float | None:
    """None where any value is unknown: a median of the others would be that of a selection."""
    numbers = [value for value in values if value is not None]
    return float(median(numbers)) if numbers and len(numbers) == len(values) else None
