r"""The final answer in the text of a model.

Marks are tried in the order of their reliability: ``#### x``, ``\boxed{x}``, a line ``A: x``, "the answer is x".
The last mark of the first kind in the text decides, whatever it holds; empty ones, such as a repeated instruction,
are ignored. Without a mark the last number of the text is the answer.
"""

import re
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Final

from benchctl.analysis.quality.numeral import Readings, numerals, only_number, plain

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
