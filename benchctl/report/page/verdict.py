"""The verdicts of the page: every other variant against the baseline, or one side against another.

A comparison that cannot be made does not prevent the page: the reason is at its top.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from benchctl.analysis.analyzed import AnalyzedExperiment
from benchctl.analysis.bonus import bonus_headline
from benchctl.analysis.compare.compare import CompareOptions, compare_experiments
from benchctl.analysis.compare.result import EXIT_CODES, Comparison, first_verdict
from benchctl.analysis.compare.words import verdict_sentence
from benchctl.analysis.experiment.pairing import Side
from benchctl.errors import InvalidDataError, NotComparableError, UsageError
from benchctl.units import in_a_row

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
        is_refused = isinstance(error, NotComparableError)
        return ComparisonVerdict(
            a_name=a_name,
            b_name=b_name,
            word="not comparable" if is_refused else "invalid",
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
