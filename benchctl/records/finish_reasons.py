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


_NATURAL: Final = Finish("natural")
_LIMIT: Final = Finish("limit")
_TOOL_CALL: Final = Finish("tool-call")
_ERROR: Final = Finish("failed", "finish-error")
_ABORT: Final = Finish("failed", "finish-abort")
_CANCELLED: Final = Finish("failed", "finish-cancelled")
_CONTENT_FILTER: Final = Finish("failed", "finish-content-filter")
_TIMEOUT: Final = Finish("failed", "finish-timeout")

FINISH_REASONS: Final[dict[str, Finish]] = {
    "stop": _NATURAL,
    "repetition": _NATURAL,  # vLLM ended an answer that repeats itself
    "eos": _NATURAL,  # llama.cpp's stop_type, as are word and limit
    "word": _NATURAL,
    "eos_token": _NATURAL,
    "stop_sequence": _NATURAL,
    "end_turn": _NATURAL,
    "length": _LIMIT,
    "limit": _LIMIT,
    "max_tokens": _LIMIT,
    "model_length": _LIMIT,
    "tool_calls": _TOOL_CALL,
    "tool_use": _TOOL_CALL,
    "function_call": _TOOL_CALL,
    "error": _ERROR,
    "insufficient_system_resource": _ERROR,
    "abort": _ABORT,
    "aborted": _ABORT,
    "cancelled": _CANCELLED,
    "canceled": _CANCELLED,
    "content_filter": _CONTENT_FILTER,
    "safety": _CONTENT_FILTER,
    "timeout": _TIMEOUT,
}
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
