"""Excess: more than any honest answer holds. Reading ends where it is met, as the rest could be of any size."""

from typing import Final

from benchctl.untrusted import EVENT_VALUES, LINE_BYTES, TAIL_BYTES, TOKEN_BYTES

EXCESS_KINDS: Final = frozenset({"oversized-head", "oversized-line", "oversized-answer", "unrequested-choice"})
"""Classes of requests that failed for the size or the number of what came."""
_LARGE_LINE_BYTES: Final = 256 << 10
"""Shorter events cannot hold enough values to matter."""


class ExcessError(Exception):
    """An answer holds more than was requested or than any has. ``kind`` is the class of its request's failure."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def most_answer_bytes(num_tokens: int) -> int:
    """Bytes that an answer of so many tokens may take on the wire, framing and bookkeeping of reads included."""
    return 2 * LINE_BYTES + num_tokens * TOKEN_BYTES


def check_event_size(num_bytes: int) -> None:
    """Raises ExcessError for an event that is incomplete after so many bytes."""
    if num_bytes > LINE_BYTES:
        raise ExcessError(
            "oversized-line",
            f"an event has no end within {LINE_BYTES >> 20} MiB, which is more than any server sends at once",
        )


def check_values(line: bytes) -> None:
    """Raises ExcessError for a long line whose JSON holds so many values that decoding it would fill the memory."""
    if len(line) > _LARGE_LINE_BYTES and sum(map(line.count, (b",", b"[", b"{"))) > EVENT_VALUES:
        raise ExcessError("oversized-line", f"one event holds more than {EVENT_VALUES} values")


def check_tail(num_bytes: int) -> None:
    """Raises ExcessError for an answer that goes on for so many bytes after it said that it is over."""
    if num_bytes > TAIL_BYTES:
        raise ExcessError("oversized-answer", f"the stream goes on for over {TAIL_BYTES >> 10} KiB after [DONE]")
