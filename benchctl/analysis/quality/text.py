"""Quality and divergence in sentences."""

from collections.abc import Iterator

from benchctl.analysis.quality.accuracy import MCNEMAR, QualityComparison
from benchctl.analysis.quality.divergence import Divergence, DivergenceComparison


def quality_lines(quality: QualityComparison) -> Iterator[str]:
    """Accuracy first, then the limits of it."""
    yield accuracy_sentence(quality)
    if len(quality.pass_at) > 1:
        shares = (f"pass@{k} {a * 100:.1f} % against {b * 100:.1f} %" for k, (a, b) in quality.pass_at.items())
        yield f"{', '.join(shares)} (samples of one run)"
    if quality.a_failed or quality.b_failed:
        yield _counts("answers that never arrived, counted as wrong", quality, quality.a_failed, quality.b_failed)
    if quality.a_truncated or quality.b_truncated:
        yield _counts("answers cut off at the token limit", quality, quality.a_truncated, quality.b_truncated)
    if quality.note:
        yield quality.note


def accuracy_sentence(quality: QualityComparison) -> str:
    """Both accuracies, the difference with its interval, the test, and the minimum detectable effect."""
    test = "McNemar" if quality.method == MCNEMAR else "sign-flip"
    return (
        f"{quality.share} {quality.a_accuracy * 100:.1f} % against {quality.b_accuracy * 100:.1f} %"
        f"{_answers(quality)}: "
        f"{quality.difference_points:+.1f} points [{quality.ci_low:+.1f}, {quality.ci_high:+.1f}], "
        f"{test} p {quality.p_value:.2g}, {quality.num_questions:,} questions "
        f"({quality.only_a} better in A, {quality.only_b} in B); "
        f"minimum detectable effect {quality.minimum_detectable_points:.1f}; "
        f"{quality.verdict} at a margin of {quality.margin_points:g}; judge {quality.judge}"
    )


def _answers(quality: QualityComparison) -> str:
    """The numbers of right answers where they are counted rather than known by questions."""
    if quality.share == "accuracy":
        return ""
    right = (round(quality.a_accuracy * quality.a_answers), round(quality.b_accuracy * quality.b_answers))
    return f" ({right[0]:,} of {quality.a_answers:,} against {right[1]:,} of {quality.b_answers:,} answers)"


def _counts(what: str, quality: QualityComparison, num_a: int, num_b: int) -> str:
    return f"{what}: {num_a:,} of {quality.a_answers:,} against {num_b:,} of {quality.b_answers:,}"


def divergence_sentence(comparison: DivergenceComparison) -> str:
    """The share of identical texts, that between two blocks of A, and where the other texts part."""
    b_against_a, a_against_a = comparison.b_against_a, comparison.a_against_a
    sentence = f"identical texts {_share(b_against_a)}, {_among_a(a_against_a)}"
    if parts := _parts(b_against_a):
        sentence += f"; others part {parts}"
        among_a = _parts(a_against_a) if a_against_a else ""
        sentence += f", those of A and A {among_a}" if among_a else ""
    if b_against_a.num_missing:
        sentence += f"; {b_against_a.num_missing:,} answers not compared, because a side has none"
    if comparison.temperature is None or comparison.temperature > 0:
        temperature = "" if comparison.temperature is None else f" (temperature {comparison.temperature:g})"
        sentence += f"; sampled tokens{temperature} differ between variants even where nothing else does"
    return sentence


def _share(divergence: Divergence) -> str:
    share = divergence.identical_frac
    percent = "unknown" if share is None else f"{share * 100:.1f} %"
    return f"{percent} ({divergence.num_identical:,} of {divergence.num_pairs:,})"


def _among_a(divergence: Divergence | None) -> str:
    if divergence is None or divergence.num_pairs == 0:
        return "A against itself unknown without a second block"
    return f"A against itself in the next block {_share(divergence)}"


def _parts(divergence: Divergence) -> str:
    """Median length of text before the texts part; empty where none does."""
    if divergence.median_after_chars is None:
        return ""
    if divergence.median_after_tokens is not None:
        return f"after {divergence.median_after_tokens:g} tokens (median)"
    return f"after {divergence.median_after_chars:g} characters (median; tokens unknown)"
