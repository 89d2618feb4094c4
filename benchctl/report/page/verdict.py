"""The verdicts of the page: every other variant against the baseline, or one side against another.

A comparison that cannot be made does not prevent the page: the reason is at its top.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from benchctl.analysis.bonus import MeasuredBonus, bonus_headline
from benchctl.analysis.compare.compare import CompareOptions, compare_experiments
from benchctl.analysis.compare.result import EXIT_CODES, Comparison, OverallVerdict, first_verdict
from benchctl.analysis.compare.words import verdict_sentence
from benchctl.analysis.experiment.pairing import Side
from benchctl.analysis.summary.analyzed import AnalyzedExperiment
from benchctl.errors import InvalidDataError, NotComparableError, UsageError
from benchctl.formats import in_a_row

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
    """The verdict of the whole page. ``deciding`` are the comparisons that it rests on, ``controls`` the others."""

    word: str
    sentence: str
    exit_code: int
    deciding: tuple[ComparisonVerdict, ...]
    controls: tuple[ComparisonVerdict, ...] = ()
    notes: tuple[str, ...] = ()
    """Limits that a reader must know before the verdict: unfinished, damaged."""
    is_on_backfill: bool = False
    """The word and the sentence are those on ways of backfill; ``deciding`` then compares modes of a pass."""

    @property
    def all(self) -> tuple[ComparisonVerdict, ...]:
        return (*self.deciding, *self.controls)

    @property
    def comparisons(self) -> tuple[Comparison, ...]:
        return tuple(one.comparison for one in self.all if one.comparison is not None)


def directory_verdict(analysis: AnalyzedExperiment, options: CompareOptions | None = None) -> PageVerdict:
    """Every other variant of a directory against its baseline."""
    results = analysis.results
    baseline, options = results.manifest.baseline, options or CompareOptions()
    variants = dict.fromkeys(planned.variant for planned in results.plan.runs)
    in_profile = {} if analysis.profile is None else analysis.profile.variants
    controls = {name for name, variant in in_profile.items() if variant.control is not None}
    a = (analysis, Side(results.path, baseline))
    verdicts = [
        _compare(a, (analysis, Side(results.path, name)), options, is_control=name in controls)
        for name in variants
        if name != baseline
    ]
    whole = _whole(verdicts, baseline, _notes([analysis]))
    return whole if analysis.bonus is None else _on_backfill(whole, analysis.bonus)


def sides_verdict(
    a: AnalyzedSide, b: AnalyzedSide, options: CompareOptions | None = None, comparison: Comparison | None = None
) -> PageVerdict:
    """Two sides, as ``benchctl compare`` judges them; of one directory, the same analysis twice.

    ``comparison`` is theirs where it was already made.
    """
    verdict = _compare(a, b, options or CompareOptions()) if comparison is None else _made(comparison)
    analyses = [a[0]] if a[0] is b[0] else [a[0], b[0]]
    return _whole([verdict], verdict.a_name, _notes(analyses))


def made_verdict(comparison: Comparison) -> PageVerdict:
    """The verdict of a comparison that was already made."""
    return _whole([_made(comparison)], comparison.a_name, ())


def _made(comparison: Comparison, *, is_control: bool = False) -> ComparisonVerdict:
    return ComparisonVerdict(
        a_name=comparison.a_name,
        b_name=comparison.b_name,
        word=comparison.verdict,
        sentence=verdict_sentence(comparison).removeprefix(f"{comparison.verdict}: "),
        exit_code=comparison.exit_code,
        comparison=comparison,
        is_control=is_control,
    )


def _compare(
    a: AnalyzedSide, b: AnalyzedSide, options: CompareOptions, *, is_control: bool = False
) -> ComparisonVerdict:
    (a_analysis, a_side), (b_analysis, b_side) = a, b
    try:
        comparison = compare_experiments((a_analysis.experiment, a_side), (b_analysis.experiment, b_side), options)
    except (InvalidDataError, UsageError) as error:
        a_name, b_name = a_side.variant or str(a_side), b_side.variant or str(b_side)
        problem = f"{b_name} against {a_name}: {error}"
        return ComparisonVerdict(
            a_name=a_name,
            b_name=b_name,
            word="not comparable" if isinstance(error, NotComparableError) else "invalid",
            sentence=problem.splitlines()[0],
            exit_code=error.exit_code,
            problem=problem,
            differences=error.differences if isinstance(error, NotComparableError) else (),
            is_control=is_control,
        )
    return _made(comparison, is_control=is_control)


def _whole(verdicts: Sequence[ComparisonVerdict], baseline: str, notes: tuple[str, ...]) -> PageVerdict:
    deciding = tuple(one for one in verdicts if not one.is_control)
    word, exit_code = "no verdict", EXIT_CODES["inconclusive"]
    sentence = f"only {baseline} was planned, so there is nothing to compare it with"
    if len(deciding) == 1:
        word, sentence, exit_code = deciding[0].word, deciding[0].sentence, deciding[0].exit_code
    elif deciding:
        words: list[OverallVerdict] = [
            "invalid" if one.comparison is None else one.comparison.verdict for one in deciding
        ]
        word = first_verdict(words)
        names = [one.b_name for one, each in zip(deciding, words, strict=True) if each == word]
        sentence = f"{len(names)} of {len(deciding)} variants against {baseline}: {in_a_row(names)}"
        exit_code = EXIT_CODES[word]
    return PageVerdict(
        word=word,
        sentence=sentence,
        exit_code=exit_code,
        deciding=deciding,
        controls=tuple(one for one in verdicts if one.is_control),
        notes=notes,
    )


def _on_backfill(whole: PageVerdict, bonus: MeasuredBonus) -> PageVerdict:
    """The same page with the verdict that was asked for, in the words and with the exit code of ``micro bonus``."""
    word, exit_code = ("decided", 0) if bonus.is_decided else ("inconclusive", EXIT_CODES["inconclusive"])
    return replace(whole, word=word, sentence=bonus_headline(bonus), exit_code=exit_code, is_on_backfill=True)


def _notes(analyses: Iterable[AnalyzedExperiment]) -> tuple[str, ...]:
    """Sentences about what is unfinished or damaged."""
    notes = []
    for analysis in analyses:
        planned, manifest = analysis.results.plan.runs, analysis.results.manifest
        states = [run.record.state for run in analysis.runs]
        if manifest.state in {"planned", "running", "interrupted"}:
            notes.append(
                f"Unfinished: {states.count('done')} of {len(planned)} runs of {manifest.profile} are done."
            )
        for state in ("failed", "suspect"):
            if number := states.count(state):
                verb = "run of" if number == 1 else "runs of"
                notes.append(f"{number} {verb} {len(planned)} {'is' if number == 1 else 'are'} {state}.")
        notes += [f"Damaged: {message}" for message in analysis.damage]
    return tuple(notes)
