"""Judges, which decide whether an answer of a model is right, and the grades that a side gets by one."""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from importlib.metadata import version
from typing import Final, Literal, TypeAlias, get_args

from benchctl.analysis.metrics.latency import is_completed, measured
from benchctl.analysis.statistics.intervals import pass_at
from benchctl.errors import MissingPackageError, UsageError
from benchctl.profile.files import did_you_mean
from benchctl.records.finish_reasons import is_cut, may_be_whole
from benchctl.records.loaded import LoadedRun
from benchctl.records.record import PreparedRequest, RequestRecord

MAX_CHARS: Final = 300
"""Of one number; a longer one is none. A model that repeats a digit to its limit has answered nothing."""
_MARK: Final = re.compile(r"####([^\n]*)")
_NUMBER: Final = re.compile(r"(?:(?<![0-9).])-\$?|\$-?)?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)")

JudgeName: TypeAlias = Literal["numeric", "math-verify", "json"]
JUDGES: Final[tuple[JudgeName, ...]] = get_args(JudgeName)
NUMERIC_VERSION: Final = "2"
"""Incremented whenever a judgement changes: results of two versions are not comparable."""
JSON_VERSION: Final = "1"
"""The same for the judge ``json``."""


@dataclass(frozen=True, slots=True)
class Judge:
    """``is_correct(text, gold)`` is true where the whole ``text`` of a model ends in the answer ``gold``.

    A judge that needs no gold answer judges the text alone, by its beginning where ``runs_on``.
    """

    name: JudgeName
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
        return Judge("numeric", NUMERIC_VERSION, is_numerically_correct)
    if name == "math-verify":
        return _math_verify()
    if name == "json":
        return Judge("json", JSON_VERSION, begins_with_json if runs_on else is_json, needs_gold=False)
    hint = did_you_mean(name, JUDGES) or f"judges are {', '.join(JUDGES)}"
    raise UsageError(f"no judge is called {name!r}; {hint}")


def is_numerically_correct(text: str, gold: str) -> bool:
    """True where the final number of ``text`` equals the gold one, as numbers and without tolerance.

    The final number is the last one behind the last ``####``, or of the whole text without that mark. A gold answer
    that is not a number is compared with what the mark holds, ignoring letter case and spaces.
    """
    marked = _MARK.findall(answer_part(text))
    expected = final_number(gold)
    if expected is None:
        return bool(marked and gold.strip()) and marked[-1].casefold().split() == gold.casefold().split()
    return final_number(marked[-1] if marked else answer_part(text)) == expected


def final_number(text: str) -> Fraction | None:
    """The last number of a text; None without one."""
    words: list[str] = _NUMBER.findall(text)
    if not words or len(words[-1]) > MAX_CHARS:
        return None
    return Fraction(words[-1].replace(",", "").replace("$", ""))


def answer_part(text: str) -> str:
    """The text after the reasoning that a model puts between ``<think>`` tags."""
    return text.rpartition("</think>")[2]


def is_json(text: str, _gold: str = "") -> bool:
    """True where the whole text is one JSON document (RFC 8259): an object or an array, nothing around it."""
    end = _end_of_json(text)
    return end is not None and not text[end:].strip(_JSON_SPACE)


def begins_with_json(text: str, _gold: str = "") -> bool:
    """True where the text begins with a complete JSON document, whatever follows."""
    return _end_of_json(text) is not None


_JSON_SPACE: Final = " \t\n\r"


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_DECODER: Final = json.JSONDecoder(parse_constant=_refuse_constant)


def _end_of_json(text: str) -> int | None:
    """The end of the JSON document with which a text begins; None where it begins with none."""
    start = len(text) - len(text.lstrip(_JSON_SPACE))
    try:
        document, end = _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None
    return end if isinstance(document, dict | list) else None


def _math_verify() -> Judge:
    """The library math-verify, with its own extraction. Its time-outs use signals, so it needs the main thread."""
    try:
        from math_verify import parse, verify  # noqa: PLC0415  # an extra, and slow to load
    except ImportError as error:
        package, purpose = "math-verify[antlr4_13_2]", "answers cannot be judged by math-verify"
        raise MissingPackageError((package,), purpose, otherwise="use --judge numeric") from error

    @lru_cache(maxsize=4096)
    def expected(gold: str) -> object:
        return parse(f"${gold}$")

    def is_correct(text: str, gold: str) -> bool:
        return bool(verify(expected(gold), parse(answer_part(text))))

    return Judge("math-verify", version("math-verify"), is_correct)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grades:
    """The graded answers of one side."""

    correct: dict[str, tuple[int, ...]]
    """Correct answers to each question, run by run."""
    samples: dict[str, int]
    """Answers to each question within one run."""
    num_answers: int
    num_failed: int
    num_truncated: int
    """Answers cut off at their token limit; they are judged by their text."""

    @property
    def num_samples(self) -> int:
        """Answers to each question within one run, by the question with the fewest."""
        return min(self.samples.values())

    def share(self, question: str) -> Fraction:
        """The share of correct answers to a question over all runs."""
        counts = self.correct[question]
        return Fraction(sum(counts), len(counts) * self.samples[question])

    def pass_at(self, k: int) -> float:
        """pass@k within a run, over questions and runs; a later block repeats seeds, so it has no new samples."""
        chances = [
            pass_at(k, num_correct, self.samples[question])
            for question, counts in self.correct.items()
            for num_correct in counts
        ]
        return sum(chances) / len(chances)


def grade(prepared: Iterable[PreparedRequest], runs: Sequence[LoadedRun], judge: Judge) -> Grades | None:
    """Judge all answers of ``runs``, those to requests with a gold answer where the judge needs one.

    None without such, or without runs.
    """
    questions = [request for request in prepared if request.answer is not None or not judge.needs_gold]
    if not questions or not runs:
        return None
    samples: dict[str, int] = defaultdict(int)
    for request in questions:
        samples[request.source] += request.n
    correct = {question: [0] * len(runs) for question in samples}
    num_failed = num_truncated = 0
    for i, run in enumerate(runs):
        records = {record.request_id: record for record in measured(run.requests)}
        for request in questions:
            num_correct, num_answered, num_cut = _grade_request(request, records.get(request.request_id), judge)
            correct[request.source][i] += num_correct
            num_failed += request.n - num_answered
            num_truncated += num_cut
    return Grades(
        correct={question: tuple(counts) for question, counts in correct.items()},
        samples=dict(samples),
        num_answers=sum(samples.values()) * len(runs),
        num_failed=num_failed,
        num_truncated=num_truncated,
    )


def _grade_request(request: PreparedRequest, record: RequestRecord | None, judge: Judge) -> tuple[int, int, int]:
    """Numbers of answers to one request that are correct, that arrived, and that were cut off."""
    if record is None or not is_completed(record):
        return 0, 0, 0
    choices = [choice for choice in record.choices[: request.n] if may_be_whole(choice.finish_reason)]
    num_correct = sum(judge.is_correct(choice.text, request.answer or "") for choice in choices)
    return num_correct, len(choices), sum(is_cut(choice.finish_reason) for choice in choices)
