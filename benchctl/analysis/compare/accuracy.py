"""Answers of two sides: accuracy paired question by question, and where their texts part."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import median
from typing import Final, Literal, NamedTuple, TypeAlias

from benchctl.analysis.compare.judge import Judge, grade
from benchctl.analysis.metrics.latency import choice_tokens, is_completed, known_values, measured
from benchctl.analysis.statistics.intervals import (
    mean_interval,
    minimum_detectable_difference,
    newcombe_interval,
    sign_flip_p,
)
from benchctl.records.loaded import LoadedRun
from benchctl.records.record import ChoiceRecord, PreparedRequest, RequestRecord


class Parting(NamedTuple):
    """Two texts of one choice of one request."""

    after_chars: int | None
    """Characters before the first difference; None for identical texts."""
    after_tokens: int | None
    """Tokens before it; None for identical texts, and where the token of a character is unknown."""
    longer_tokens: int | None
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
    one, other = (next(each for each in request.choices if each.index == index) for request in (a, b))
    lengths = choice_tokens(a, one), choice_tokens(b, other)
    longer = None if lengths[0] is None or lengths[1] is None else lengths[1] - lengths[0]
    if one.text == other.text:
        return Parting(None, None, longer)
    differing = (i for i, (x, y) in enumerate(zip(one.text, other.text, strict=False)) if x != y)
    after_chars = next(differing, min(len(one.text), len(other.text)))
    tokens = known_values(_tokens_before(choice, after_chars) for choice in (one, other))
    return Parting(after_chars, max(tokens, default=None), longer)


def _tokens_before(choice: ChoiceRecord, after_chars: int) -> int | None:
    """Tokens of the chunks that end before a character; None where a chunk's tokens or characters are unknown."""
    tokens = choice.chunk_tokens
    if tokens is None and choice.output_tokens == len(choice.chunk_ns):
        tokens = (1,) * len(choice.chunk_ns)
    if tokens is None or choice.chunk_chars is None or len(choice.chunk_chars) != len(tokens):
        return None
    ends = accumulate(choice.chunk_chars)
    return sum(count for count, end in zip(tokens, ends, strict=True) if end <= after_chars)


def _divergence(runs: Iterable[tuple[LoadedRun, LoadedRun]]) -> Divergence:
    partings: list[Parting] = []
    num_missing = 0
    loads = (pair for a_run, b_run in runs for pair in zip(a_run.loads, b_run.loads, strict=False))
    for a_run, b_run in loads:
        b_records = {record.request_id: record for record in measured(b_run.requests)}
        for a in (each for each in measured(a_run.requests) if not each.turn):  # later turns go on from answers
            b = b_records.get(a.request_id)
            shared: set[int] = set()
            if b is not None and is_completed(a) and is_completed(b):
                shared = {choice.index for choice in a.choices} & {choice.index for choice in b.choices}
                partings += [compare_texts(a, b, index) for index in sorted(shared)]
            num_missing += max(len(a.choices), len(b.choices) if b else 0, 1) - len(shared)
    apart = [parting for parting in partings if parting.after_chars is not None]
    return Divergence(
        num_pairs=len(partings),
        num_identical=len(partings) - len(apart),
        num_missing=num_missing,
        median_after_tokens=_median([parting.after_tokens for parting in apart]),
        median_after_chars=_median([parting.after_chars for parting in apart]),
        median_longer_tokens=_median([parting.longer_tokens for parting in partings]),
    )


def _median(values: Sequence[int | None]) -> float | None:
    """None where any value is unknown: a median of the others would be that of a selection."""
    numbers = known_values(values)
    return float(median(numbers)) if numbers and len(numbers) == len(values) else None


QualityVerdict: TypeAlias = Literal["regression", "improvement", "equivalent", "inconclusive"]
MARGIN_POINTS: Final = 1.0
"""Default margin, with which quality is reported and decides nothing."""
MCNEMAR: Final = "McNemar exact, Newcombe"
SIGN_FLIP: Final = "sign-flip exact, t over questions"


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityComparison:
    """Accuracies in [0, 1]; differences, bounds, margin and detectable difference in percentage points.

    Invariant: ``ci_low <= difference_points <= ci_high``. ``only_a`` counts questions that A answers correctly more
    often than B, ``only_b`` the reverse; with one answer per question these are the discordant pairs.
    """

    judge: str
    """Name and version."""
    num_questions: int
    a_answers: int
    """Judged answers of A over all questions, samples and blocks, including those that never arrived."""
    b_answers: int
    a_accuracy: float
    b_accuracy: float
    difference_points: float
    ci_low: float
    ci_high: float
    confidence: float
    p_value: float
    method: str
    only_a: int
    only_b: int
    minimum_detectable_points: float
    margin_points: float
    verdict: QualityVerdict
    pass_at: dict[int, tuple[float, float]]
    """pass@k of A and B for each k that the samples of one run allow."""
    a_truncated: int
    b_truncated: int
    a_failed: int
    b_failed: int
    note: str | None = None
    """Limits of the figures."""
    share: str = "accuracy"
    """Name of what the accuracies are shares of."""


def compare_quality(
    prepared: Sequence[PreparedRequest],
    a_runs: Sequence[LoadedRun],
    b_runs: Sequence[LoadedRun],
    judge: Judge,
    margin_points: float = MARGIN_POINTS,
    confidence: float = 0.95,
) -> QualityComparison | None:
    """Judge both sides' answers to the same request set; None where nothing has a gold answer or a side no run."""
    a, b = grade(prepared, a_runs, judge), grade(prepared, b_runs, judge)
    if a is None or b is None:
        return None
    a_shares, b_shares = ([side.share(question) for question in a.correct] for side in (a, b))
    differences = [of_b - of_a for of_a, of_b in zip(a_shares, b_shares, strict=True)]
    num_questions = len(differences)
    only_a, only_b = sum(value < 0 for value in differences), sum(value > 0 for value in differences)
    is_single = a.num_answers == b.num_answers == num_questions
    if is_single:
        both = int(sum(a_shares)) - only_a
        interval = newcombe_interval(both, only_a, only_b, num_questions - both - only_a - only_b, confidence)
    else:
        interval = mean_interval(differences, confidence)
    notes = []
    if a.num_truncated * b.num_answers != b.num_truncated * a.num_answers:
        notes.append("answers cut off at the token limit are judged by their text, and one side has more of them")
    if a.num_answers != b.num_answers:
        notes.append("the sides asked each question a different number of times, which makes the test approximate")
    difference = 100 * float(sum(differences) / num_questions)
    low, high = min(100 * interval[0], difference), max(100 * interval[1], difference)
    return QualityComparison(
        judge=str(judge),
        num_questions=num_questions,
        a_answers=a.num_answers,
        b_answers=b.num_answers,
        a_accuracy=float(sum(a_shares) / num_questions),
        b_accuracy=float(sum(b_shares) / num_questions),
        difference_points=difference,
        ci_low=low,
        ci_high=high,
        confidence=confidence,
        p_value=sign_flip_p(differences),
        method=MCNEMAR if is_single else SIGN_FLIP,
        only_a=only_a,
        only_b=only_b,
        minimum_detectable_points=100 * minimum_detectable_difference(differences, confidence),
        margin_points=margin_points,
        verdict=quality_verdict(low, high, margin_points),
        pass_at={k: (a.pass_at(k), b.pass_at(k)) for k in _sample_sizes(min(a.num_samples, b.num_samples))},
        a_truncated=a.num_truncated,
        b_truncated=b.num_truncated,
        a_failed=a.num_failed,
        b_failed=b.num_failed,
        note="; ".join(notes) or None,
        share=judge.share,
    )


def quality_verdict(ci_low: float, ci_high: float, margin_points: float) -> QualityVerdict:
    """The interval against the margin: wholly below -margin, above it, inside, or none of these."""
    if -margin_points <= ci_low and ci_high <= margin_points:
        return "equivalent"
    if ci_high < -margin_points:
        return "regression"
    return "improvement" if ci_low > margin_points else "inconclusive"


def _sample_sizes(num_samples: int) -> list[int]:
    """The k for which pass@k is reported: powers of two below the number of samples, and that number."""
    powers = (1 << i for i in range(num_samples.bit_length()))
    return [*(k for k in powers if k < num_samples), num_samples]


def quality_lines(quality: QualityComparison) -> Iterator[str]:
    """Accuracy first, then the limits of it."""
    yield accuracy_sentence(quality)
    if len(quality.pass_at) > 1:
        shares = (f"pass@{k} {a * 100:.1f} % against {b * 100:.1f} %" for k, (a, b) in quality.pass_at.items())
        yield f"{', '.join(shares)} (samples of one run)"
    counts = {
        "answers that never arrived, counted as wrong": (quality.a_failed, quality.b_failed),
        "answers cut off at the token limit": (quality.a_truncated, quality.b_truncated),
    }
    for what, (num_a, num_b) in counts.items():
        if num_a or num_b:
            yield f"{what}: {num_a:,} of {quality.a_answers:,} against {num_b:,} of {quality.b_answers:,}"
    if quality.note:
        yield quality.note


def accuracy_sentence(quality: QualityComparison) -> str:
    """Both accuracies, the difference with its interval, the test, and the minimum detectable effect."""
    test = "McNemar" if quality.method == MCNEMAR else "sign-flip"
    counts = ""
    if quality.share != "accuracy":  # right answers are counted, not known by questions
        right = round(quality.a_accuracy * quality.a_answers), round(quality.b_accuracy * quality.b_answers)
        counts = f" ({right[0]:,} of {quality.a_answers:,} against {right[1]:,} of {quality.b_answers:,} answers)"
    return (
        f"{quality.share} {quality.a_accuracy * 100:.1f} % against {quality.b_accuracy * 100:.1f} %{counts}: "
        f"{quality.difference_points:+.1f} points [{quality.ci_low:+.1f}, {quality.ci_high:+.1f}], "
        f"{test} p {quality.p_value:.2g}, {quality.num_questions:,} questions "
        f"({quality.only_a} better in A, {quality.only_b} in B); "
        f"minimum detectable effect {quality.minimum_detectable_points:.1f}; "
        f"{quality.verdict} at a margin of {quality.margin_points:g}; judge {quality.judge}"
    )


def divergence_sentence(comparison: DivergenceComparison) -> str:
    """The share of identical texts, that between two blocks of A, and where the other texts part."""
    of_b, of_a = comparison.b_against_a, comparison.a_against_a
    among_a = "A against itself unknown without a second block"
    if of_a is not None and of_a.num_pairs:
        among_a = f"A against itself in the next block {_identical_text(of_a)}"
    sentence = f"identical texts {_identical_text(of_b)}, {among_a}"
    if of_b.median_after_chars is not None:
        sentence += f"; others part {_parting_text(of_b)}"
        if of_a is not None and of_a.median_after_chars is not None:
            sentence += f", those of A and A {_parting_text(of_a)}"
    if of_b.num_missing:
        sentence += f"; {of_b.num_missing:,} answers not compared, because a side has none"
    if comparison.temperature is None or comparison.temperature > 0:
        temperature = "" if comparison.temperature is None else f" (temperature {comparison.temperature:g})"
        sentence += f"; sampled tokens{temperature} differ between variants even where nothing else does"
    return sentence


def _identical_text(divergence: Divergence) -> str:
    share = divergence.identical_frac
    percent = "unknown" if share is None else f"{share * 100:.1f} %"
    return f"{percent} ({divergence.num_identical:,} of {divergence.num_pairs:,})"


def _parting_text(divergence: Divergence) -> str:
    """Median length of text before the texts part."""
    if divergence.median_after_tokens is not None:
        return f"after {divergence.median_after_tokens:g} tokens (median)"
    return f"after {divergence.median_after_chars:g} characters (median; tokens unknown)"
