"""Numbers as people and models write them, parsed exactly.

The final answer in the text of a model.
Judges, which decide whether an answer of a model is right.
Grades of a side: the number of correct answers to each question.
"""

import json
import re
import unicodedata
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from importlib.metadata import version
from itertools import islice
from typing import Final, Literal, TypeAlias, get_args

from benchctl.analysis.metrics.latency import is_completed, measured
from benchctl.analysis.statistics.paired_shares import pass_at
from benchctl.errors import MissingPackageError, UsageError
from benchctl.profile.files import did_you_mean
from benchctl.records.finish_reasons import is_cut, may_be_whole
from benchctl.records.loaded import LoadedRun
from benchctl.records.record import PreparedRequest, RequestRecord

MAX_DIGITS: Final = 300
"""Of one numeral; longer ones are ignored. A model that repeats a digit to its limit has answered nothing."""

_THIN: Final = "\u2009"
_TYPOGRAPHY: Final = (
    dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d"), "-")
    | dict.fromkeys(map(ord, "\u00a0\u202f"), _THIN)
    | {0xFF10 + digit: str(digit) for digit in range(10)}
    | {0xD7: "*", 0xFF0C: ",", 0xFF0E: ".", 0xFF04: "$", 0xFF05: "%", 0x2044: "/"}
)
_VULGAR: Final = re.compile("[\u00bc-\u00be\u2150-\u215e]")
_PART: Final = r"\{\s*(-?[0-9.,]{1,60})\s*\}"
_LATEX: Final = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"<<[^<>\n]*>>", ""),  # GSM8K's calculator
        (r"\*\*|__|`", ""),
        (r"\\!|\\displaystyle|\{\}", ""),
        (r"\\,", _THIN),
        (r"\{,\}", ","),
        (r"\\[;: ]|~|\\q?quad\b|\\left\b|\\right\b|\\[()\[\]]", " "),
        (r"\\([$%&#])", r"\1"),
        (r"\^\s{0,3}\{?\s{0,3}(?:\\circ|\\degree)\s{0,3}\}?|°", " "),
        (r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox)\s{0,3}\{([^{}]{0,200})\}", r" \1 "),
        (r"(?<=[0-9])\\[dtc]?frac(?![a-z])", r" \\frac"),
        (rf"\\[dtc]?frac\s{{0,3}}{_PART}\s{{0,3}}{_PART}", r"\1/\2"),
        (r"\\[dtc]?frac\s{0,3}([0-9])\s{0,3}([0-9])", r"\1/\2"),
        (r"\\(?:times|cdot)\b", "*"),
        (r"\\(?:approx|simeq)\b|≈", "="),
        (r"(?<=[A-Za-z])\s{0,3}\^\s{0,3}(?:\{[0-9]{1,3}\}|[0-9])", ""),  # of a unit: cm^2
        (r"\b(?:USD|US|EUR|GBP|INR|Rs\.?)\s{0,3}(?=[$€£₹]?\s{0,3}-?[0-9.])", ""),
    )
)
"""In this order; each pattern matches within a bounded distance."""

_DECIMAL: Final = rf"(?:[0-9]{{1,3}}(?:[,{_THIN}][0-9]{{3}})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_NUMERAL: Final = re.compile(
    rf"""(?<![0-9A-Za-z_.^])
    (?P<sign>(?:(?<![)\]}}])[-+])?)(?P<currency>[$€£¥₹]?)\s{{0,3}}(?P<inner_sign>-?)
    (?:(?P<whole>[0-9]{{1,20}})\s{{1,3}}(?P<over>[0-9]{{1,20}})/(?P<under>[0-9]{{1,20}})
      |(?P<number>{_DECIMAL})(?:\s{{0,3}}/\s{{0,3}}(?P<divisor>[0-9]{{1,20}}(?:\.[0-9]{{1,20}})?))?)
    (?:[eE](?P<exponent>[-+]?[0-9]{{1,20}})(?![0-9A-Za-z])
      |\s{{0,3}}[x*]\s{{0,3}}10\s{{0,3}}\^\s{{0,3}}\{{?\s{{0,3}}(?P<power>-?[0-9]{{1,20}})\s{{0,3}}\}}?)?
    (?P<after>\s{{0,3}}%|\s{{0,3}}(?:thousand|million|billion|trillion)\b|)""",
    re.VERBOSE,
)
_SCALES: Final = {
    "%": Fraction(1, 100),
    "thousand": Fraction(10**3),
    "million": Fraction(10**6),
    "billion": Fraction(10**9),
    "trillion": Fraction(10**12),
}

Readings = tuple[Fraction, ...]
"""Values of one numeral: its number as written and, before a per cent sign or a word such as ``million``, also
multiplied by that, because questions ask for either."""


def plain(text: str) -> str:
    """``text`` without LaTeX and typography, as far as numbers are concerned."""
    text = _VULGAR.sub(_written_out, text.translate(_TYPOGRAPHY))
    for pattern, replacement in _LATEX:
        text = pattern.sub(replacement, text)
    return text


def numerals(text: str) -> Iterator[Readings]:
    """The numbers of a plain text, from left to right, without impossible ones (a division by 0)."""
    for match in _NUMERAL.finditer(text):
        value = _value(match)
        if value is not None:
            scale = _SCALES.get(match["after"].strip())
            yield (value,) if scale is None else (value, value * scale)


def only_number(text: str) -> Readings | None:
    """The only number of a text, which may have units and words around it, but not a formula.

    Of an equation or a rounding the right side counts. None where there is no number, several different ones, a
    power, or a LaTeX command that ``plain`` does not know.
    """
    content = plain(text)
    _, _, right = content.rpartition("=")
    content = right if any(numerals(right)) else content
    content = content.strip(" \t\n*")  # of emphasis
    numbers = set(numerals(content))
    return numbers.pop() if len(numbers) == 1 and not _is_formula(content) else None


def _is_formula(content: str) -> bool:
    rest = _NUMERAL.sub("", content)
    return "\\" in rest or "^" in rest or "*" in rest


def _written_out(match: re.Match[str]) -> str:
    return " " + unicodedata.normalize("NFKC", match[0]).replace("\u2044", "/")


def _value(match: re.Match[str]) -> Fraction | None:
    if len(match[0]) > MAX_DIGITS:
        return None
    if match["whole"] is not None:
        divisor = Fraction(match["under"])
        value = int(match["whole"]) + int(match["over"]) / divisor if divisor else None
    else:
        divisor = Fraction(match["divisor"] or 1)
        value = Fraction(match["number"].replace(",", "").replace(_THIN, "")) / divisor if divisor else None
    power = int(match["exponent"] or match["power"] or 0)
    if value is None or abs(power) > MAX_DIGITS:
        return None
    is_negative = (match["sign"] == "-") != (match["inner_sign"] == "-")
    return (-value if is_negative else value) * Fraction(10) ** power


_MAX_MARKS: Final = 20
"""Marks of one kind that are examined, from the end."""
_MAX_CHARS: Final = 400
"""Of the content of a mark."""
_HASHES: Final = re.compile(r"####[ \t]*([^\n]*)")
_LINE: Final = re.compile(r"^[ \t]*\**A(?:nswer)?\**:\**[ \t]*([^\n]*)", re.MULTILINE)
_SENTENCE: Final = re.compile(r"\banswer\b[^.\n:=]{0,60}?(?:\bis\b|\bare\b|\bwould be\b|:|=)", re.IGNORECASE)
_SENTENCE_END: Final = re.compile(r"\n|[.!?](?=\s|$)")


def final_number(text: str) -> Readings | None:
    """The number that ``text`` gives as its answer; None where it gives none that can be parsed."""
    text = answer_part(text)
    for marked in (_hashes(text), _boxed(text)):
        for content in marked:
            return only_number(content)
    for content in _lines(text):
        if (number := only_number(content)) is not None:
            return number
    for content in _sentences(text):
        if (number := _first_number(content)) is not None:
            return number
    last = deque(numerals(plain(text)), maxlen=1)
    return last[0] if last else None


def final_text(text: str) -> str | None:
    """The marked answer as it is written; None without a mark."""
    text = answer_part(text)
    for marked in (_hashes(text), _boxed(text), _lines(text), _sentences(text)):
        for content in marked:
            return content
    return None


def answer_part(text: str) -> str:
    """The text after the reasoning that a model puts between ``<think>`` tags."""
    _, mark, rest = text.rpartition("</think>")
    return rest if mark else text


def _hashes(text: str) -> Iterator[str]:
    return _filled(match[1] for match in _backwards(_HASHES, text))


def _lines(text: str) -> Iterator[str]:
    return _filled(match[1] for match in _backwards(_LINE, text))


def _sentences(text: str) -> Iterator[str]:
    for match in _backwards(_SENTENCE, text):
        rest = text[match.end() : match.end() + _MAX_CHARS].lstrip(" \t\n:*$")
        content = _SENTENCE_END.split(rest, maxsplit=1)[0].strip()
        if content:
            yield content


def _boxed(text: str) -> Iterator[str]:
    return _filled(islice(_boxes(text), _MAX_MARKS))


def _boxes(text: str) -> Iterator[str]:
    """Contents of the boxes that are closed, from the end."""
    end = len(text)
    while (start := max(text.rfind(r"\boxed", 0, end), text.rfind(r"\fbox", 0, end))) >= 0:
        end = start
        content = _in_braces(text[start : start + _MAX_CHARS].lstrip("\\boxedf "))
        if content is not None:
            yield content


def _in_braces(text: str) -> str | None:
    """The text between the brace that opens ``text`` and its partner."""
    depth = 0
    for i, character in enumerate(text):
        if character in "{}" and text[i - 1 : i] != "\\":
            depth += 1 if character == "{" else -1
        if depth <= 0:
            return text[1:i] if i else None
    return None


def _backwards(pattern: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
    """The last matches, the very last one first."""
    return islice(reversed(list(pattern.finditer(text))), _MAX_MARKS)


def _filled(contents: Iterator[str]) -> Iterator[str]:
    return (content[:_MAX_CHARS] for content in contents if content.strip(" \t.$*\\()[]"))


def _first_number(content: str) -> Readings | None:
    text = plain(content)
    _, _, right = text.rpartition("=")
    return next(numerals(right), None) or next(numerals(text), None)


JudgeName: TypeAlias = Literal["numeric", "math-verify", "json"]
JUDGES: Final[tuple[JudgeName, ...]] = get_args(JudgeName)
NUMERIC_VERSION: Final = "1"
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

    A gold answer that is not a number is compared with the marked answer as text, ignoring letter case, spaces and
    punctuation at the ends. A text without a mark is then wrong.
    """
    gold_values = _gold_number(gold)
    if gold_values is not None:
        values = final_number(text)
        return values is not None and not set(gold_values).isdisjoint(values)
    answer = final_text(text)
    return answer is not None and bool(_normalize(gold)) and _normalize(answer) == _normalize(gold)


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


@lru_cache(maxsize=4096)
def _gold_number(gold: str) -> tuple[object, ...] | None:
    return only_number(gold)


def _normalize(text: str) -> str:
    """An answer in words without markup, letter case, and punctuation at the ends."""
    return " ".join(re.sub(r"\\[a-z]+|[{}$*]", " ", text).casefold().split()).strip(" .,;:!?\"'")


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
