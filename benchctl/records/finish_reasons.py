"""Finish reasons: the words by which servers say why an answer ended, and what each means for its request.

An answer that ended by itself, at its limit or with a call of a tool is one. A failure has a class of its own
(``RequestError.kind``). A word that is not here leaves open which of them it is.
"""

from collections.abc import Iterable
from typing import Final

from benchctl.records.record import RequestError, RequestRecord

_WORDS: Final = {
    "natural": (  # the model ended the answer, or a stop string did
        "stop",
        "repetition",  # vLLM ended an answer that repeats itself
        "eos",  # llama.cpp's stop_type, as are word and limit
        "word",
        "eos_token",
        "stop_sequence",
        "end_turn",
    ),
    "limit": ("length", "limit", "max_tokens", "model_length"),  # its limit of tokens, or the server's
    "tool-call": ("tool_calls", "tool_use", "function_call"),
    "finish-error": ("error", "insufficient_system_resource"),
    "finish-abort": ("abort", "aborted"),
    "finish-cancelled": ("cancelled", "canceled"),
    "finish-content-filter": ("content_filter", "safety"),
    "finish-timeout": ("timeout",),
}
"""Words by what they mean: how an answer ended, or the class of the failure of one that failed."""
ENDINGS: Final = {word: ending for ending, words in _WORDS.items() for word in words}
"""The meaning of each word, in lower case with underscores."""
_ANSWERED: Final = frozenset({"natural", "limit", "tool-call"})
FINISH_ERROR_KINDS: Final = frozenset(_WORDS) - _ANSWERED
MOST_WORD_CHARS: Final = 64
"""Of a finish reason in a record; the longest known word has half as many."""


def ending_of(word: str | None) -> str | None:
    """The meaning of a finish reason; None for a word that is not known, and without one."""
    return None if word is None else ENDINGS.get(word.lower().replace("-", "_"))


def is_cut(word: str | None) -> bool:
    """True for an answer that a limit of tokens ended, so that its own length is unknown."""
    return ending_of(word) == "limit"


def may_be_whole(word: str | None) -> bool:
    """True unless an answer failed or ended for an unknown reason; an older record may have no word."""
    return word is None or ending_of(word) in _ANSWERED


def finish_error(words: Iterable[str | None], stated: str = "") -> RequestError | None:
    """The failure that the first failed of these finish reasons means; ``stated`` is what the server says of it."""
    for word in words:
        ending = ending_of(word)
        if ending is not None and ending not in _ANSWERED:
            message = f"the server ended the answer with finish_reason {word!r}"
            return RequestError(kind=ending, message=f"{message}: {stated}" if stated else message)
    return None


def unknown_reasons(record: RequestRecord) -> list[str]:
    """The finish reasons of an answer that are not in the table."""
    words = [choice.finish_reason for choice in record.choices]
    return [word for word in words if word is not None and ending_of(word) is None]
