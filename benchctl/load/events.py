"""Server-sent events: a byte stream cut into payloads under limits, and the fields of a payload of a completion.

The format is that of WHATWG HTML, section 9.2. What exceeds all honest sizes is not read to its end, as the rest
could be of any size.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Final, TypeAlias

import msgspec

from benchctl.untrusted import EVENT_VALUES, LINE_BYTES, TAIL_BYTES

CR: Final = 13
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


class ExcessError(Exception):
    """An answer holds more than was requested or than any has. ``kind`` is the class of its request's failure."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class EventSplitter:
    """Cuts a byte stream into the payloads of its events, however the stream is cut into reads.

    Several ``data`` lines are joined by a line feed, all three line ends are understood, and comments and other
    fields are dropped. An event named ``error``, or a line ``error: …`` that some servers send instead of an event,
    becomes ``{"error": "…"}``. Raises ExcessError for an event, or for a rest after the announced end, beyond all
    honest sizes.
    """

    def __init__(self) -> None:
        self.held: list[bytes] = []
        """Pieces of the event that is incomplete; each line of it ends with a line feed."""
        self._num_held_bytes = 0
        self._num_tail_bytes: int | None = None
        """Bytes since the announced end of the stream."""
        self._after_cr = False
        """The last byte was a carriage return: a line feed that follows belongs to it."""
        self._is_start = True
        self.is_between = False
        """True when the next byte begins an event and is not the first of the stream, nor behind its end."""

    def note_end(self) -> None:
        """Expect little more: the stream has said that it is over."""
        self._num_tail_bytes = self._num_tail_bytes or 0
        self.is_between = False

    def feed(self, data: bytes) -> list[bytes]:
        """Payloads of the events that ``data`` completes."""
        payloads = data[6:-2].split(b"\n\ndata: ")
        is_simple = data[:6] == b"data: " and data[-2:] == b"\n\n" and CR not in data and all(payloads)
        is_next = self.is_between or (self._is_start and not self.held)
        if is_simple and is_next and data.count(b"\n") == 2 * len(payloads):
            self.is_between, self._is_start = True, False
            return payloads  # whole events of one line each, as nearly always; the rest gives the same
        text = self._with_line_feeds(data)
        before = self.held[-1][-1:] if self.held else b""
        if text:
            self.held.append(text)
        self._check_sizes(len(data))
        if b"\n\n" not in before + text:
            self.is_between = self.is_between and not text
            return []
        *events, rest = b"".join(self.held).split(b"\n\n")
        if self._is_start:
            events[0] = events[0].removeprefix(_BYTE_ORDER_MARK)
            self._is_start = False
        self.held = [rest] if rest else []
        self._num_held_bytes = len(rest)
        self.is_between = self._num_tail_bytes is None and not rest and not self._after_cr
        return [payload for event in events if (payload := _payload(event))]

    def _with_line_feeds(self, data: bytes) -> bytes:
        """``data`` with a line feed for each end of a line."""
        if self._after_cr and data:
            data = data.removeprefix(b"\n")
            self._after_cr = False
        if CR in data:
            self._after_cr = data.endswith(b"\r")
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        return data

    def _check_sizes(self, num_bytes: int) -> None:
        self._num_held_bytes += num_bytes
        if self._num_held_bytes > LINE_BYTES:
            self.held.clear()
            most = f"{LINE_BYTES >> 20} MiB, which is more than any server sends at once"
            raise ExcessError("oversized-line", f"an event has no end within {most}")
        if self._num_tail_bytes is not None:
            self._num_tail_bytes += num_bytes
            if self._num_tail_bytes > TAIL_BYTES:
                most = f"{TAIL_BYTES >> 10} KiB after [DONE]"
                raise ExcessError("oversized-answer", f"the stream goes on for over {most}")


def lone_payloads(reads: Iterable[bytes]) -> list[bytes]:
    """Payloads of the first of ``reads``, as far as each is one chunk of HTTP with one event, a line of JSON."""
    payloads = []
    for data in reads:
        size, _, rest = data.partition(b"\r\ndata: ")
        if rest[:1] != b"{" or rest[-5:] != b"}\n\n\r\n" or size.lower() != b"%x" % (len(rest) + 4):
            break
        payloads.append(rest[:-4])
    return payloads


def _payload(event: bytes) -> bytes:
    # Shorter events cannot hold enough values to matter
    if len(event) > (256 << 10) and sum(map(event.count, (b",", b"[", b"{", b"\n"))) > EVENT_VALUES:
        raise ExcessError("oversized-line", f"one event holds more than {EVENT_VALUES} values")
    if event[:6] == b"data: " and b"\n" not in event:
        return event[6:]
    values: list[bytes] = []
    is_error = False
    for line in event.split(b"\n"):
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


class PlainChoice(msgspec.Struct, gc=False):
    """A ``ChoiceEvent`` of a choice that goes on."""

    index: Count = 0
    delta: Delta | None = None
    text: str | None = None
    token_ids: list[int] | None = None
    finish_reason: None = None


class PlainEvent(msgspec.Struct, gc=False):
    """An ``Event`` with a part for one choice and nothing else, as nearly all are. Others do not decode as one."""

    choices: Annotated[list[PlainChoice], msgspec.Meta(min_length=1, max_length=1)]
    usage: None = None
    timings: None = None
    error: None = None


UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors of a decoder for bytes that it cannot read; the last one for thousands of nested brackets."""

decode_event = msgspec.json.Decoder(Event).decode
decode_plain_events = msgspec.json.Decoder(PlainEvent).decode_lines
