"""Judges, which decide whether an answer of a model is right.

``numeric`` is benchctl's own: exact arithmetic on the result of ``final_answer``, against the gold answer of the
question. ``math-verify`` is the library of that name, used on request only. They differ on hard cases, so the
judge's name and version are part of every result, and one never replaces the other. ``json`` needs no gold answer:
an answer is right where it is a JSON document.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from typing import Final, Literal, TypeAlias, get_args

from benchctl.analysis.quality.final_answer import answer_part, final_number, final_text
from benchctl.analysis.quality.numeral import only_number
from benchctl.errors import MissingPackageError, UsageError
from benchctl.profile.sources.files import did_you_mean

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
