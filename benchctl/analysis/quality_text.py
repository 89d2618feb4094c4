"""Quality and divergence in lines that a person reads."""

from collections.abc import Iterator

from benchctl.analysis.quality import MCNEMAR, QualityComparison


def quality_lines(quality: QualityComparison) -> Iterator[str]:
    """Accuracy first, then what must be known to trust it."""
    yield accuracy_sentence(quality)
    if len(quality.pass_at) > 1:
        shares = (f"pass@{k} {a * 100:.1f} % against {b * 100:.1f} %" for k, (a, b) in quality.pass_at.items())
        yield f"{', '.join(shares)} (samples of one run)"
    if quality.a_failed or quality.b_failed:
        yield _counts("answers that never came, counted as wrong", quality, quality.a_failed, quality.b_failed)
    if quality.a_truncated or quality.b_truncated:
        yield _counts("answers cut off at the token limit", quality, quality.a_truncated, quality.b_truncated)
    if quality.note:
        yield quality.note


def accuracy_sentence(quality: QualityComparison) -> str:
    """Both accuracies, the difference with its interval, the test, and what could have been seen."""
    test = "McNemar" if quality.method == MCNEMAR else "sign-flip"
    return (
        f"accuracy {quality.a_accuracy * 100:.1f} % against {quality.b_accuracy * 100:.1f} %: "
        f"{quality.difference_points:+.1f} points [{quality.ci_low:+.1f}, {quality.ci_high:+.1f}], "
        f"{test} p {quality.p_value:.2g}, {quality.num_questions:,} questions "
        f"({quality.only_a} better in A, {quality.only_b} in B); "
        f"smallest detectable {quality.detectable_points:.1f}; "
        f"{quality.verdict} at a margin of {quality.margin_points:g}; judge {quality.judge}"
    )


def _counts(what: str, quality: QualityComparison, num_a: int, num_b: int) -> str:
    return f"{what}: {num_a:,} of {quality.a_answers:,} against {num_b:,} of {quality.b_answers:,}"
