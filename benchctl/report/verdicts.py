"""The verdicts of the page, their shapes, and the explanations of words and numbers, which appear on hover or tap.

A comparison that cannot be made does not prevent the page: the reason is at its top. Every verdict has a word, a
shape and a colour, so that none depends on the colour alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

from benchctl.analysis.analyzed import AnalyzedExperiment
from benchctl.analysis.bonus import bonus_headline
from benchctl.analysis.compare.answer import verdict_sentence
from benchctl.analysis.compare.compare import CompareOptions, compare_experiments
from benchctl.analysis.compare.metric import MetricComparison
from benchctl.analysis.compare.result import EXIT_CODES, Comparison, first_verdict
from benchctl.analysis.experiment.pairing import Side
from benchctl.analysis.metrics.table import METRICS, OF_SLO, Metric
from benchctl.errors import InvalidDataError, NotComparableError, UsageError
from benchctl.report.table import table_of
from benchctl.units import count_of, in_a_row, percentage

AnalyzedSide: TypeAlias = tuple[AnalyzedExperiment, Side]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonVerdict:
    """One comparison, or the problem that left none. Exactly one of ``comparison`` and ``problem`` is set."""

    a_name: str
    b_name: str
    word: str
    """The verdict in one word."""
    sentence: str
    """What follows the word."""
    exit_code: int
    """That of ``benchctl compare`` of the two sides."""
    comparison: Comparison | None = None
    problem: str | None = None
    differences: tuple[str, ...] = ()
    """Settings that differ and were not allowed to."""
    is_control: bool = False
    """A step of a ladder of controls, which does not decide the verdict of the whole."""

    @property
    def sides(self) -> str:
        """Both sides in words: ``guided against baseline``."""
        return f"{self.b_name} against {self.a_name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PageVerdict:
    """The verdict of the whole page, which rests on those of ``all`` that are no controls."""

    word: str
    sentence: str
    exit_code: int
    all: tuple[ComparisonVerdict, ...]
    """Those that decide, then the controls."""
    notes: tuple[str, ...] = ()
    """Limits that a reader must know before the verdict: unfinished, damaged."""
    is_on_backfill: bool = False
    """The word and the sentence are those on ways of backfill; ``deciding`` then compares modes of a pass."""
    precision: str | None = None
    """What a precision costs: see ``AnalyzedExperiment``. None for two experiments."""

    @property
    def deciding(self) -> tuple[ComparisonVerdict, ...]:
        return tuple(one for one in self.all if not one.is_control)

    @property
    def comparisons(self) -> tuple[Comparison, ...]:
        return tuple(one.comparison for one in self.all if one.comparison is not None)


def directory_verdict(analysis: AnalyzedExperiment, options: CompareOptions | None = None) -> PageVerdict:
    """Every other variant of a directory against its baseline.

    Where ways of backfill are compared, the verdict on them, as ``micro bonus`` words it.
    """
    results, bonus = analysis.results, analysis.bonus
    baseline, in_profile = results.manifest.baseline, {} if analysis.profile is None else analysis.profile.variants
    controls = {name for name, variant in in_profile.items() if variant.control is not None}
    a = (analysis, Side(results.path, baseline))
    verdicts = [
        replace(verdict_of_sides(a, (analysis, Side(results.path, name)), options), is_control=name in controls)
        for name in dict.fromkeys(planned.variant for planned in results.plan.runs)
        if name != baseline
    ]
    whole = page_verdict(verdicts, baseline, [analysis])
    failures = [run.record.failure for run in analysis.runs if run.record.failure is not None]
    if failures and len(failures) == len(analysis.runs):
        return replace(whole, word="invalid", sentence=f"every run failed: {failures[0].reason}")
    if bonus is None:
        return whole
    word, exit_code = ("decided", 0) if bonus.is_decided else ("inconclusive", EXIT_CODES["inconclusive"])
    return replace(whole, word=word, sentence=bonus_headline(bonus), exit_code=exit_code, is_on_backfill=True)


def verdict_of(comparison: Comparison) -> ComparisonVerdict:
    """The verdict of a comparison that was made."""
    return ComparisonVerdict(
        a_name=comparison.a_name,
        b_name=comparison.b_name,
        word=comparison.verdict,
        sentence=verdict_sentence(comparison).removeprefix(f"{comparison.verdict}: "),
        exit_code=comparison.exit_code,
        comparison=comparison,
    )


def verdict_of_sides(a: AnalyzedSide, b: AnalyzedSide, options: CompareOptions | None = None) -> ComparisonVerdict:
    """Two sides, as ``benchctl compare`` judges them; of one directory, the same analysis twice."""
    sides = ((a[0].experiment, a[1]), (b[0].experiment, b[1]))
    try:
        return verdict_of(compare_experiments(*sides, options or CompareOptions()))
    except (InvalidDataError, UsageError) as error:
        a_name, b_name = (side.variant or str(side) for _, side in sides)
        problem = f"{b_name} against {a_name}: {error}"
        return ComparisonVerdict(
            a_name=a_name,
            b_name=b_name,
            word="not comparable" if isinstance(error, NotComparableError) else "invalid",
            sentence=problem.splitlines()[0],
            exit_code=error.exit_code,
            problem=problem,
            differences=error.differences if isinstance(error, NotComparableError) else (),
        )


def page_verdict(
    verdicts: Sequence[ComparisonVerdict], baseline: str, analyses: Sequence[AnalyzedExperiment] = ()
) -> PageVerdict:
    """The verdict on all of them, with what is unfinished or damaged in the directories."""
    deciding = [one for one in verdicts if not one.is_control]
    word, exit_code = "no verdict", EXIT_CODES["inconclusive"]
    sentence = f"only {baseline} was planned, so there is nothing to compare it with"
    if len(deciding) == 1:
        word, sentence, exit_code = deciding[0].word, deciding[0].sentence, deciding[0].exit_code
    elif deciding:
        words = ["invalid" if one.comparison is None else one.comparison.verdict for one in deciding]
        overall = first_verdict(words)
        names = [one.b_name for one, each in zip(deciding, words, strict=True) if each == overall]
        sentence = f"{len(names)} of {len(deciding)} variants against {baseline}: {in_a_row(names)}"
        word, exit_code = overall, EXIT_CODES[overall]
    return PageVerdict(
        word=word,
        sentence=sentence,
        exit_code=exit_code,
        all=(*deciding, *(one for one in verdicts if one.is_control)),
        notes=tuple(note for analysis in analyses for note in _notes(analysis)),
        precision=analyses[0].precision if len(analyses) == 1 else None,
    )


def _notes(analysis: AnalyzedExperiment) -> Iterator[str]:
    """Sentences about what is unfinished or damaged."""
    num_planned, manifest = len(analysis.results.plan.runs), analysis.results.manifest
    states = [run.record.state for run in analysis.runs]
    if manifest.state in {"planned", "running", "interrupted"}:
        yield f"Unfinished: {states.count('done')} of {num_planned} runs of {manifest.profile} are done."
    for state in ("failed", "suspect"):
        if number := states.count(state):
            run_is = ("run", "is") if number == 1 else ("runs", "are")
            yield f"{number} {run_is[0]} of {num_planned} {run_is[1]} {state}."
    yield from (f"Damaged: {message}" for message in analysis.damage)


def metric_term(metric: Metric) -> str:
    """Formula, unit and better direction."""
    better = "" if metric.direction == "none" else f"; {metric.direction} is better"
    return f"{metric.name} = {metric.formula} [{metric.unit}]{better}"


def value_term(metric: MetricComparison, name: str, num_blocks: int) -> str:
    """Formula, unit, centre and scatter of the value of one side."""
    is_paired = metric.estimate is not None and metric.estimate.is_paired
    return (
        f"{metric.metric.name} of {name}: {metric.metric.formula} [{metric.metric.unit}]. Centre ± scatter of "
        f"{count_of(num_blocks, 'block')}: mean and standard deviation of their logarithms, "
        f"{'weighted as in the change' if is_paired else 'each counting the same'}"
    )


def change_term(metric: MetricComparison) -> str:
    """The ratio behind a change, its estimator and its interval."""
    name = metric.metric.name
    if metric.estimate is None:
        return f"{name} is compared exactly, block by block: a count without noise"
    estimator = {
        "robust": "weighted mean over blocks of ln(other / baseline), in which outlying blocks count little",
        "mean": "mean over blocks of ln(other / baseline)",
        None: "median of all differences of logarithms",
    }[metric.estimate.estimator]
    return (
        f"Ratio of {name} ({metric.metric.formula}), minus 1. Ratio = exp({estimator}), in brackets its "
        f"{percentage(metric.estimate.confidence)} interval over {metric.estimate.num_blocks} blocks"
    )


def p_term(metric: MetricComparison) -> str:
    """The test that the p value belongs to."""
    if metric.estimate is not None and not metric.estimate.is_paired:
        return "p of no difference between the two sides (Mann-Whitney test, which the interval inverts)"
    return (
        "the smallest alpha at which the interval of 1 - alpha excludes no change (the interval inverts the test)"
    )


def verdict_term(metric: MetricComparison) -> str:
    """The reason for the verdict: margin or noise floor, and the confidence that several tests ask for."""
    if metric.reason:
        return metric.reason
    floor = "noise floor" if metric.margins.is_noise_floor else "margin"
    margin = f"the {floor} of {percentage(metric.margins.change_frac)}"
    inside = f"the margin of {percentage(metric.margins.equivalence_frac)}"
    estimate, judged = metric.estimate, metric.judged_confidence
    is_higher = estimate is not None and judged is not None and judged > estimate.confidence
    interval = f"the whole {f'{percentage(judged or 0, 4)} ' if is_higher else ''}interval"
    return {
        "regression": f"{interval} is worse than {margin}",
        "improvement": f"{interval} is better than {margin}",
        "equivalent": f"{interval} is inside {inside}",
        "changed": f"{interval} is beyond {margin}; neither direction is better",
        "equal": "the same in every block",
        "different": "not the same in every block",
    }.get(metric.verdict, f"the interval reaches across {margin}")


_WORDS: Final = {
    "variant": "One named server configuration; every other one is compared with the baseline.",
    "cell": "One point of the sweep: a value for each swept factor.",
    "block": "One complete replicate: the baseline and every cell once, each on a fresh server (forward passes: in "
    "one process of the block), in a balanced order. The unit of statistics: requests and steps of one server "
    "share its luck and are not replicates.",
    "ratio": "Value of the other side divided by that of the baseline. A change is the ratio minus 1.",
    "interval": "The range of ratios that the blocks are compatible with, at the stated confidence.",
    "threshold": "The smallest change that matters: a factor of 1 + threshold either way.",
    "noise floor": "The change that identical servers of this machine could not rule out, from an A/A experiment.",
    "margin": "Of a change: the threshold, or the noise floor where that is larger. Of equivalence: the threshold, "
    "or a margin that was named; noise never widens it.",
    "regression": "The whole interval is beyond the margin of a change, on the worse side.",
    "improvement": "The whole interval is beyond the margin of a change, on the better side.",
    "equivalent": "The whole interval is inside the margin of equivalence: shown to be the same, not assumed.",
    "inconclusive": "None of these: more blocks are needed, or, between threshold and noise floor, less noise.",
    "invalid": "Something failed or differs that makes any verdict worthless; the reasons are given.",
}
_METHODS: Final = {
    "t": (
        "method t: take d = ln(b_blocks[k] / a_blocks[k]) for each block k. Where position_effect is known, x is "
        "positions of its cell; the ratio is exp(sum of block_weights * (d - position_effect * x)). With n blocks "
        "its interval is exp(mu - t * se) to exp(mu + t * se), t the quantile of Student's distribution at (1 + "
        "confidence) / 2: with n - 1 degrees of freedom and se^2 = s^2 / n without positions, with n - 2 and "
        "se^2 = s^2 * (1/n + mean(x)^2 / sum((x - mean(x))^2)) where these blocks gave the effect."
    ),
    "robust": (
        "method robust: d and x as with method t. Where runs of other arms helped to know position_effect, the "
        "ratio is exp(sum of block_weights * (d - position_effect * x)); where only these blocks gave it, the "
        "weights remove it and the ratio is exp(sum of block_weights * d). Weights and interval are those of a "
        "mixture of t distributions, one for each choice of blocks that may be far off (Box and Tiao, Biometrika "
        "55, 1968, with probability 0.2 and 16 times the scatter; fewer than half of the blocks, less one)."
    ),
    "hodges-lehmann": (
        "method hodges-lehmann: the ratio is exp(median of ln(b) - ln(a)) over all pairs of a block of a and one "
        "of b; the interval is from the k-th smallest to the k-th largest of these differences, where k comes from "
        "the Mann-Whitney distribution."
    ),
}


def definition_values(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """Words, metrics with their formulas, and the methods that the estimates of the comparisons used."""
    compared = [metric for comparison in comparisons for cell in comparison.cells for metric in cell.metrics]
    methods = {metric.estimate.method for metric in compared if metric.estimate is not None}
    lacking = OF_SLO.difference(metric.metric.name for metric in compared)
    defined = (metric for name, metric in METRICS.items() if name not in lacking)
    headings = ("metric", "unit", "formula", "better", "needs")
    return {
        "words": _WORDS,
        "metrics": table_of(
            headings, ((m.name, m.unit, m.formula, m.direction, m.needs) for m in defined), left=headings
        ),
        "methods": [text for method, text in _METHODS.items() if method in methods],
    }


SHAPES: Final = {
    "regression": "M8 1.2 15.2 14.2H.8Z",
    "improvement": "M8 .8a7.2 7.2 0 1 0 0 14.4A7.2 7.2 0 1 0 8 .8Z",
    "equivalent": "M1.8 1.8h12.4v12.4H1.8Z",
    "inconclusive": "M8 .4 15.6 8 8 15.6.4 8Z",
    "invalid": "M5 .8h6L15.2 5v6L11 15.2H5L.8 11V5Z",
}
"""Outlines as SVG paths in a square of 16."""
SIGNS: Final = {
    "regression": "M8 5.4v4.4M8 11.6v.6",
    "improvement": "M4.8 8.2l2.3 2.3 4.2-4.6",
    "equivalent": "M4.8 6.3h6.4M4.8 9.7h6.4",
    "inconclusive": "M4.9 8h.01M8 8h.01M11.1 8h.01",
    "invalid": "M5.6 5.6l4.8 4.8M10.4 5.6l-4.8 4.8",
}
"""The signs inside the outlines."""
_KINDS: Final = {
    "equal": "equivalent",
    "decided": "equivalent",
    "different": "invalid",
    "changed": "inconclusive",
    "unknown": "inconclusive",
    "not-comparable": "invalid",
    "damaged": "invalid",
    "nothing to compare": "inconclusive",
    "unfinished": "inconclusive",
}


def kind_of(word: str) -> str:
    """The verdict whose colour and shape a word has; inconclusive for words without one of their own."""
    kind = _KINDS.get(word, word)
    return kind if kind in SHAPES else "inconclusive"
