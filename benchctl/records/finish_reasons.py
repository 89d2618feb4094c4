"""Finish reasons: the words by which servers say why an answer ended, and what each means for its request.

An answer that ended by itself, at its limit or with a call of a tool is one. A failure has a class of its own
(``RequestError.kind``). A word that is not here leaves open which of them it is.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from benchctl.records.record import RequestError, RequestRecord


@dataclass(frozen=True, slots=True)
class Finish:
    """The meaning of a finish reason."""

    ending: Literal["natural", "limit", "tool-call", "failed"]
    """``natural``: the model ended the answer, or a stop string did. ``limit``: its token limit or the server's."""
    error_kind: str | None = None
    """Class of the failure, of an answer that failed."""


_WORDS: Final = {
    Finish("natural"): (
        "stop",
        "repetition",  # vLLM ended an answer that repeats itself
        "eos",  # llama.cpp's stop_type, as are word and limit
        "word",
        "eos_token",
        "stop_sequence",
        "end_turn",
    ),
    Finish("limit"): ("length", "limit", "max_tokens", "model_length"),
    Finish("tool-call"): ("tool_calls", "tool_use", "function_call"),
    Finish("failed", "finish-error"): ("error", "insufficient_system_resource"),
    Finish("failed", "finish-abort"): ("abort", "aborted"),
    Finish("failed", "finish-cancelled"): ("cancelled", "canceled"),
    Finish("failed", "finish-content-filter"): ("content_filter", "safety"),
    Finish("failed", "finish-timeout"): ("timeout",),
}
FINISH_REASONS: Final = {word: finish for finish, words in _WORDS.items() for word in words}
"""By word, in lower case with underscores."""
FINISH_ERROR_KINDS: Final = frozenset(each.error_kind for each in FINISH_REASONS.values() if each.error_kind)
MOST_WORD_CHARS: Final = 64
"""Of a finish reason in a record; the longest known word has half as many."""


def finish_of(word: str | None) -> Finish | None:
    """The meaning of a finish reason; None for a word that is not known, and without one."""
    return None if word is None else FINISH_REASONS.get(word.lower().replace("-", "_"))


def is_cut(word: str | None) -> bool:
    """True for an answer that a limit of tokens ended, so that its own length is unknown."""
    finish = finish_of(word)
    return finish is not None and finish.ending == "limit"


def may_be_whole(word: str | None) -> bool:
    """True unless an answer failed or ended for an unknown reason; an older record may have no word."""
    finish = finish_of(word)
    return word is None if finish is None else finish.ending != "failed"


def finish_error(words: Iterable[str | None], stated: str = "") -> RequestError | None:
    """The failure that the first failed of these finish reasons means; ``stated`` is what the server says of it."""
    for word in words:
        finish = finish_of(word)
        if finish is not None and finish.error_kind is not None:
            message = f"the server ended the answer with finish_reason {word!r}"
            return RequestError(kind=finish.error_kind, message=f"{message}: {stated}" if stated else message)
    return None


def unknown_reasons(record: RequestRecord) -> list[str]:
    """The finish reasons of an answer that are not in the table."""
    words = [choice.finish_reason for choice in record.choices]
    return [word for word in words if word is not None and finish_of(word) is None]
