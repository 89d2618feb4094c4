"""Server-sent events: a byte stream cut into payloads under limits, and the fields of a payload of a completion."""

from typing import TYPE_CHECKING, Annotated, Final, TypeAlias

import msgspec

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


_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
CR: Final = 13


class EventSplitter:
    """Cuts a byte stream into the payloads of its events, however the stream is cut into reads.

    Several ``data`` lines are joined by a line feed, all three line ends are understood, and comments and other
    fields are dropped. An event named ``error``, or a line ``error: …`` that some servers send instead of an event,
    becomes ``{"error": "…"}``. Raises ExcessError for an event beyond all honest sizes.
    """

    __slots__ = (
        "_after_cr", "_held", "_is_start", "_lines", "_num_held_bytes", "_num_line_bytes", "_num_sized",
        "is_between",
    )  # fmt: skip

    def __init__(self) -> None:
        self._lines: list[bytes] = []
        """Lines of the event that is incomplete."""
        self._held: list[bytes] = []
        """Pieces of the line that is incomplete."""
        self._num_held_bytes = self._num_line_bytes = self._num_sized = 0
        """Sizes of those pieces and lines, and how many of the lines are in the sum."""
        self._after_cr = False
        """The last byte was a carriage return: a line feed that follows belongs to it."""
        self._is_start = True
        self.is_between = False
        """True when the next byte begins an event and is not the first of the stream."""

    def feed(self, data: bytes) -> list[bytes]:
        """Payloads of the events that ``data`` completes."""
        payloads = []
        for line in self._whole_lines(data):
            if line:
                self._lines.append(line)
            elif self._lines:
                if payload := _payload(self._lines):
                    payloads.append(payload)
                self._lines.clear()
                self._num_line_bytes = self._num_sized = 0
        self.is_between = not (self._lines or self._held or self._is_start or self._after_cr)
        if self._lines or self._held:
            self._check_size()
        return payloads

    def _check_size(self) -> None:
        """Raises ExcessError when the event that is incomplete is too large."""
        self._num_line_bytes += sum(map(len, self._lines[self._num_sized :]))
        self._num_sized = len(self._lines)
        check_event_size(self._num_line_bytes + self._num_held_bytes)

    def _whole_lines(self, data: bytes) -> list[bytes]:
        """Lines that ``data`` completes; the rest is held."""
        if self._after_cr and data:
            data = data.removeprefix(b"\n")
            self._after_cr = False
        if CR in data:
            self._after_cr = data.endswith(b"\r")
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, rest = data.split(b"\n")
        if lines:
            if self._held:
                lines[0] = b"".join((*self._held, lines[0]))
                check_values(lines[0])
                self._held.clear()
                self._num_held_bytes = 0
            if self._is_start:
                lines[0] = lines[0].removeprefix(_BYTE_ORDER_MARK)
                self._is_start = False
        if rest:
            self._held.append(rest)
            self._num_held_bytes += len(rest)
        return lines


class TailSplitter:
    """Goes on with a stream whose end was announced. Raises ExcessError when it does not end."""

    is_between = False

    def __init__(self, splitter: EventSplitter) -> None:
        self._splitter = splitter
        self._num_bytes = 0

    def feed(self, data: bytes) -> list[bytes]:
        """As that of ``EventSplitter``."""
        self._num_bytes += len(data)
        check_tail(self._num_bytes)
        return self._splitter.feed(data)


def _payload(lines: list[bytes]) -> bytes:
    if len(lines) == 1 and lines[0][:6] == b"data: ":
        return lines[0][6:]
    values: list[bytes] = []
    is_error = False
    for line in lines:
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name in {b"data", b"error"}:
            values.append(value)
        is_error = is_error or name == b"error" or (name == b"event" and value == b"error")
    text = b"\n".join(values)
    return msgspec.json.encode({"error": text.decode(errors="replace")}) if is_error else text


Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 32)]
"""Larger counts are errors, and their sums over a load would not fit into 64 bits."""
if TYPE_CHECKING:
    AnyJson: TypeAlias = msgspec.Raw | None
else:
    AnyJson = msgspec.Raw  # with None beside it, msgspec would decode the field
"""A field of any type, which stays undecoded: it could hold millions of objects."""


class FinishObject(msgspec.Struct):
    """A finish reason as SGLang's own API states it."""

    type: str | None = None
    message: str | None = None


class Delta(msgspec.Struct, gc=False):
    """The addition of a chat event to a choice."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: AnyJson = None
    function_call: AnyJson = None


class ChoiceEvent(msgspec.Struct, gc=False):
    """The part of an event for one choice: of a completion (``text``) or of a chat (``delta``)."""

    index: Count = 0
    delta: Delta | None = None
    text: str | None = None
    token_ids: list[int] | None = None
    finish_reason: str | FinishObject | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: Count | None = None


class Usage(msgspec.Struct):
    """Token counts as the server states them."""

    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    prompt_tokens_details: _PromptDetails | None = None

    @property
    def cached_tokens(self) -> int | None:
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else None


class Timings(msgspec.Struct):
    """llama-server's own count of the request so far."""

    predicted_n: Count | None = None


class Event(msgspec.Struct, gc=False):
    """The payload of one event."""

    choices: list[ChoiceEvent] | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    error: AnyJson = None
    object: str | None = None
    message: AnyJson = None

    @property
    def tokens_so_far(self) -> int | None:
        """Output tokens of the whole request until this event, where the server states them."""
        if self.usage is not None and self.usage.completion_tokens is not None:
            return self.usage.completion_tokens
        return self.timings.predicted_n if self.timings is not None else None


UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors of a decoder for bytes that it cannot read; the last one for thousands of nested brackets."""

decode_event = msgspec.json.Decoder(Event).decode
