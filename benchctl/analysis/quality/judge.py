"""Judges: is the answer that a model wrote the gold answer of the question?

``numeric`` is benchctl's own: exact arithmetic over what ``final_answer`` finds. ``math-verify`` is the library of
that name, asked only where somebody asks for it. They differ on hard cases, so the judge's name and version travel
with every result, and none ever stands in for another.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from typing import Final, Literal, TypeAlias, get_args

from benchctl.analysis.quality.final_answer import answer_part, final_number, final_text
from benchctl.analysis.quality.numeral import only_number
from benchctl.errors import UsageError
from benchctl.profile.sources.files import did_you_mean

JudgeName: TypeAlias = Literal["numeric", "math-verify"]
JUDGES: Final[tuple[JudgeName, ...]] = get_args(JudgeName)
NUMERIC_VERSION: Final = "1"
"""Raised whenever a judgement changes: results of two versions are not comparable."""


@dataclass(frozen=True, slots=True)
class Judge:
    """``is_correct(text, gold)``: whether ``text``, all that a model wrote, ends in the answer ``gold``."""

    name: JudgeName
    version: str
    is_correct: Callable[[str, str], bool]

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


def judge_named(name: str) -> Judge:
    """The judge of that name. Raises UsageError for an unknown one, and for one that is not installed."""
    if name == "numeric":
        return Judge("numeric", NUMERIC_VERSION, is_numerically_correct)
    if name == "math-verify":
        return _math_verify()
    hint = did_you_mean(name, JUDGES) or f"judges are {', '.join(JUDGES)}"
    raise UsageError(f"no judge is called {name!r}; {hint}")


def is_numerically_correct(text: str, gold: str) -> bool:
    """Whether the final number of ``text`` is the gold one, as numbers and without tolerance.

    A gold answer that is no number is compared with the marked answer as text: letter case, spaces and
    punctuation at the ends aside. A text without a mark then answers nothing.
    """
    wanted = _gold_number(gold)
    if wanted is not None:
        given = final_number(text)
        return given is not None and not set(wanted).isdisjoint(given)
    said = final_text(text)
    return said is not None and bool(_bare(gold)) and _bare(said) == _bare(gold)


@lru_cache(maxsize=4096)
def _gold_number(gold: str) -> tuple[object, ...] | None:
    return only_number(gold)


def _bare(text: str) -> str:
    """An answer in words, without what does not distinguish answers."""
    return " ".join(re.sub(r"\\[a-z]+|[{}$*]", " ", text).casefold().split()).strip(" .,;:!?\"'")


def _math_verify() -> Judge:
    """The library math-verify, with its own extraction. It keeps time with signals: for the main thread only."""
    try:
        from math_verify import parse, verify  # noqa: PLC0415  # an extra, and slow to load
    except ImportError as error:
        raise UsageError(
            "the judge math-verify is not installed; pip install 'benchctl[judge]', or use --judge numeric"
        ) from error

    @lru_cache(maxsize=4096)
    def expected(gold: str) -> object:
        return parse(f"${gold}$")

    def is_correct(text: str, gold: str) -> bool:
        return bool(verify(expected(gold), parse(answer_part(text))))

    return Judge("math-verify", version("math-verify"), is_correct)
