"""Do two sides say the same? Request by request, choice by choice: equal texts, and where they part.

Speculative decoding claims to change nothing, guidance changes tokens on purpose. Neither can be judged alone,
as batches of another shape change the last bits of a logit, and so greedy output, without any other change. So
A against B stands beside A against A, each block of A against the next one. With sampling (a temperature above 0)
equal seeds promise nothing across variants: another kernel or another set of candidates uses random numbers
differently, and texts part although their distribution is the same. Identity says nothing of quality: see
``quality``.

A place is the number of output tokens before the first character that differs. A chunk of several tokens gives a
lower bound, the tokens before that chunk; of two sides the higher bound counts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import median

from benchctl.analysis.metrics.request_timing import choice_tokens, is_completed, measured
from benchctl.records.loaded import LoadedRun
from benchctl.records.request import ChoiceRecord, RequestRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Parting:
    """Two texts of one choice of one request. All None and ``is_identical`` where they are equal.

    ``after_tokens`` is None where nobody knows which token a character belongs to. ``longer_tokens`` is the length
    of the second less that of the first, known of identical texts, too.
    """

    is_identical: bool
    after_chars: int | None = None
    after_tokens: int | None = None
    longer_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Two sides, over all answers that both gave. Medians are over the answers that part; lengths over all."""

    num_pairs: int
    num_identical: int
    num_missing: int
    """Answers that one side or both did not give to the end."""
    median_after_tokens: float | None
    median_after_chars: float | None
    median_longer_tokens: float | None

    @property
    def identical_frac(self) -> float | None:
        return self.num_identical / self.num_pairs if self.num_pairs else None


@dataclass(frozen=True, slots=True, kw_only=True)
class DivergenceComparison:
    """B against A, and A against itself in the next block: None with fewer than two blocks.

    ``temperature`` is the one that both sides were asked with, None where it is unknown or differs.
    """

    b_against_a: Divergence
    a_against_a: Divergence | None
    temperature: float | None = None


def compare_divergence(
    a_runs: Sequence[LoadedRun], b_runs: Sequence[LoadedRun], temperature: float | None = None
) -> DivergenceComparison | None:
    """Compare the texts of runs in their order; None where no answer was given by both sides, or no text kept.

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


def parting(a: RequestRecord, b: RequestRecord, index: int) -> Parting:
    """Where choice ``index``, which both requests have, parts."""
    one, other = _choice(a, index), _choice(b, index)
    lengths = choice_tokens(a, one), choice_tokens(b, other)
    longer = None if lengths[0] is None or lengths[1] is None else lengths[1] - lengths[0]
    if one.text == other.text:
        return Parting(is_identical=True, longer_tokens=longer)
    after_chars = _common_chars(one.text, other.text)
    places = [place for choice in (one, other) if (place := _tokens_before(choice, after_chars)) is not None]
    return Parting(
        is_identical=False,
        after_chars=after_chars,
        after_tokens=max(places, default=None),
        longer_tokens=longer,
    )


def _common_chars(one: str, other: str) -> int:
    """Length of what two texts begin with alike."""
    alike = (x == y for x, y in zip(one, other, strict=False))
    shorter = min(len(one), len(other))
    return next((i for i, is_alike in enumerate(alike) if not is_alike), shorter)


def _tokens_before(choice: ChoiceRecord, after_chars: int) -> int | None:
    """Tokens of the chunks that lie wholly before a character; None where either is not known of each chunk."""
    tokens = choice.chunk_tokens
    if tokens is None and choice.output_tokens == len(choice.chunk_ns):
        tokens = (1,) * len(choice.chunk_ns)
    if tokens is None or choice.chunk_chars is None or len(choice.chunk_chars) != len(tokens):
        return None
    ends = accumulate(choice.chunk_chars)
    return sum(count for count, end in zip(tokens, ends, strict=True) if end <= after_chars)


def _divergence(runs: Iterator[tuple[LoadedRun, LoadedRun]]) -> Divergence:
    found: list[Parting] = []
    num_missing = 0
    for a_run, b_run in runs:
        b_records = {record.request_id: record for record in measured(b_run.requests)}
        for a in measured(a_run.requests):
            b = b_records.get(a.request_id)
            shared = _shared(a, b)
            num_missing += max(len(a.choices), len(b.choices) if b else 0, 1) - len(shared)
            if b is not None:
                found += [parting(a, b, index) for index in shared]
    apart = [one for one in found if not one.is_identical]
    return Divergence(
        num_pairs=len(found),
        num_identical=len(found) - len(apart),
        num_missing=num_missing,
        median_after_tokens=_median([one.after_tokens for one in apart]),
        median_after_chars=_median([one.after_chars for one in apart]),
        median_longer_tokens=_median([one.longer_tokens for one in found]),
    )


def _shared(a: RequestRecord, b: RequestRecord | None) -> list[int]:
    """Choices that both requests answered to the end."""
    if b is None or not (is_completed(a) and is_completed(b)):
        return []
    return sorted({choice.index for choice in a.choices} & {choice.index for choice in b.choices})


def _choice(request: RequestRecord, index: int) -> ChoiceRecord:
    return next(choice for choice in request.choices if choice.index == index)


def _median(values: Sequence[int | None]) -> float | None:
    """None where one of the values is unknown: a median of the others would be that of a selection."""
    known = [value for value in values if value is not None]
    return float(median(known)) if known and len(known) == len(values) else None
