"""Judges, which decide whether an answer of a model is right, and the grades that a side gets by one."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache, partial
from importlib.metadata import version
from statistics import fmean
from typing import Final

from benchctl.analysis.metrics.latency import is_completed, measured
from benchctl.analysis.statistics.intervals import pass_at
from benchctl.errors import MissingPackageError, UsageError
from benchctl.profile.files import did_you_mean
from benchctl.records.finish_reasons import is_cut, may_be_whole
from benchctl.records.loaded import LoadedRun
from benchctl.records.record import PreparedRequest

MAX_CHARS: Final = 300
"""Of one number; a longer one is none. A model that repeats a digit to its limit has answered nothing."""
_MARK: Final = re.compile(r"####([^\n]*)")
_NUMBER: Final = re.compile(r"(?:(?<![0-9).])-\$?|\$-?)?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)")
_JSON_SPACE: Final = " \t\n\r"
JUDGES: Final = ("numeric", "math-verify", "json")


@dataclass(frozen=True, slots=True)
class Judge:
    """``is_correct(text, gold)`` is true where the whole ``text`` of a model ends in the answer ``gold``.

    A judge that needs no gold answer judges the text alone, by its beginning where ``runs_on``. Its version is
    incremented whenever a judgement changes: results of two versions are not comparable.
    """

    name: str
    version: str
    is_correct: Callable[[str, str], bool]
    needs_gold: bool = True

    @property
    def share(self) -> str:
        """The name of the share of right answers."""
        return "accuracy" if self.needs_gold else "valid JSON"

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


def judge_named(name: str, *, runs_on: bool = False) -> Judge:
    """The judge of that name. Raises UsageError where it is unknown or not installed.

    With ``runs_on`` texts were forced past their end: ``json`` then judges their beginning.
    """
    if name == "numeric":
        return Judge("numeric", "2", _is_numerically_correct)
    if name == "json":
        return Judge("json", "1", partial(_is_json, runs_on=runs_on), needs_gold=False)
    if name == "math-verify":
        return _math_verify()
    hint = did_you_mean(name, JUDGES) or f"judges are {', '.join(JUDGES)}"
    raise UsageError(f"no judge is called {name!r}; {hint}")


def _is_numerically_correct(text: str, gold: str) -> bool:
    """True where the final number of ``text`` equals the gold one, as numbers and without tolerance.

    The final number is the last one behind the last ``####``, or of the whole text without that mark. A gold answer
    that is not a number is compared with what the mark holds, ignoring letter case and spaces.
    """
    answer = _answer_part(text)
    marked, expected = _MARK.findall(answer), _final_number(gold)
    if expected is None:
        return bool(marked and gold.strip()) and marked[-1].casefold().split() == gold.casefold().split()
    return _final_number(marked[-1] if marked else answer) == expected


def _final_number(text: str) -> Fraction | None:
    """The last number of a text; None without one."""
    words: list[str] = _NUMBER.findall(text)
    if not words or len(words[-1]) > MAX_CHARS:
        return None
    return Fraction(words[-1].replace(",", "").replace("$", ""))


def _answer_part(text: str) -> str:
    """The text after the reasoning that a model puts between ``<think>`` tags."""
    return text.rpartition("</think>")[2]


def _is_json(text: str, _gold: str, *, runs_on: bool) -> bool:
    """True where the text is one JSON document (RFC 8259), an object or an array, with nothing around it.

    With ``runs_on`` anything may follow the document.
    """
    stripped = text.lstrip(_JSON_SPACE)
    try:
        document, end = _DECODER.raw_decode(stripped)
    except (ValueError, RecursionError):
        return False
    return isinstance(document, dict | list) and (runs_on or not stripped[end:].strip(_JSON_SPACE))


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_DECODER: Final = json.JSONDecoder(parse_constant=_refuse_constant)


def _math_verify() -> Judge:
    """The library math-verify, with its own extraction. Its time-outs use signals, so it needs the main thread."""
    try:
        from math_verify import parse, verify  # noqa: PLC0415  # an extra, and slow to load
    except ImportError as error:
        package, purpose = "math-verify[antlr4_13_2]", "answers cannot be judged by math-verify"
        raise MissingPackageError((package,), purpose, otherwise="use --judge numeric") from error

    parse_gold = lru_cache(maxsize=4096)(parse)

    def is_correct(text: str, gold: str) -> bool:
        return bool(verify(parse_gold(f"${gold}$"), parse(_answer_part(text))))

    return Judge("math-verify", version("math-verify"), is_correct)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grades:
    """The graded answers of one side."""

    correct: dict[str, list[int]]
    """Correct answers to each question, load by load."""
    samples: Counter[str]
    """Answers to each question within one load."""
    num_answers: int
    num_failed: int
    num_truncated: int
    """Answers cut off at their token limit; they are judged by their text."""

    @property
    def num_samples(self) -> int:
        """Answers to each question within one load, by the question with the fewest."""
        return min(self.samples.values())

    def share(self, question: str) -> Fraction:
        """The share of correct answers to a question over all loads."""
        counts = self.correct[question]
        return Fraction(sum(counts), len(counts) * self.samples[question])

    def pass_at(self, k: int) -> float:
        """pass@k within a load, over questions and loads; another load repeats seeds, so it has no new samples."""
        counts = ((num, self.samples[question]) for question, nums in self.correct.items() for num in nums)
        return fmean(pass_at(k, num_correct, num_samples) for num_correct, num_samples in counts)


def grade(prepared: Iterable[PreparedRequest], runs: Sequence[LoadedRun], judge: Judge) -> Grades | None:
    """Judge all answers of ``runs``, those to requests with a gold answer where the judge needs one.

    None without such, or without runs.
    """
    questions = [request for request in prepared if request.answer is not None or not judge.needs_gold]
    if not questions or not runs:
        return None
    loads = [load for run in runs for load in run.loads]
    samples: Counter[str] = Counter()
    for request in questions:
        samples[request.source] += request.n
    correct = {question: [0] * len(loads) for question in samples}
    num_failed = num_truncated = 0
    for i, load in enumerate(loads):
        choices_of = {
            record.request_id: record.choices for record in measured(load.requests) if is_completed(record)
        }
        for request in questions:
            choices = choices_of.get(request.request_id, ())[: request.n]
            answers = [choice for choice in choices if may_be_whole(choice.finish_reason)]
            correct[request.source][i] += sum(
                judge.is_correct(answer.text, request.answer or "") for answer in answers
            )
            num_failed += request.n - len(answers)
            num_truncated += sum(is_cut(answer.finish_reason) for answer in answers)
    return Grades(
        correct=correct,
        samples=samples,
        num_answers=samples.total() * len(loads),
        num_failed=num_failed,
        num_truncated=num_truncated,
    )
