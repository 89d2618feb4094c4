"""Reading a streamed completion: server-sent events to choices, usage and errors.

Pure and incremental: bytes come in with the time at which they arrived, and any way of cutting the same bytes
into reads gives the same result but for those times. An event has arrived when its closing blank line has.

What counts as output of a choice, and so as a chunk: text, reasoning text, or token ids. A first event that
only names the role is no output; an event with token ids and no text is (a token that completes no character).
"""

from dataclasses import dataclass, field

import msgspec

from benchctl.records.run import ChoiceRecord, RequestError

_SHOWN_BYTES = 200


class EventSplitter:
    """Cuts a byte stream into the payloads of server-sent events (WHATWG HTML, section 9.2).

    Comments and fields other than ``data`` are dropped, several ``data`` lines are joined by a line feed, and
    all three line ends are understood. A line ``error: {...}``, which some servers send in place of an event,
    comes out as ``{"error": {...}}``.
    """

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Payloads of the events that ``data`` completes."""
        data = self._rest + data
        held = b""
        if b"\r" in data:
            if data.endswith(b"\r"):  # a line feed that belongs to it may come with the next read
                data, held = data[:-1], b"\r"
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *events, rest = data.split(b"\n\n")
        self._rest = rest + held
        return [payload for event in events if (payload := _payload(event))]

    def finish(self) -> bytes:
        """Payload of an event that the end of the stream cut short of its blank line; empty when none."""
        rest, self._rest = self._rest.rstrip(b"\r\n"), b""
        return _payload(rest.replace(b"\r\n", b"\n").replace(b"\r", b"\n"))


def _payload(event: bytes) -> bytes:
    if event.startswith(b"data: ") and b"\n" not in event:
        return event[6:]
    lines: list[bytes] = []
    for line in event.split(b"\n"):
        name, _, value = line.removeprefix(b"\xef\xbb\xbf").partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            lines.append(value)
        elif name == b"error":
            lines.append(b'{"error":' + value + b"}")
    return b"\n".join(lines)


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _ChoiceEvent(msgspec.Struct):
    index: int = 0
    delta: _Delta | None = None
    text: str | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """Token counts as the server states them."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None

    @property
    def cached_tokens(self) -> int | None:
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else None


class _Timings(msgspec.Struct):
    predicted_n: int | None = None


class _Event(msgspec.Struct):
    choices: list[_ChoiceEvent] | None = None
    usage: Usage | None = None
    timings: _Timings | None = None
    """llama-server's own account of the request so far."""
    error: msgspec.Raw = msgspec.Raw()
    object: str | None = None

    @property
    def tokens_so_far(self) -> int | None:
        """Output tokens of the whole request until this event, where the server states them."""
        if self.usage is not None and self.usage.completion_tokens is not None:
            return self.usage.completion_tokens
        return self.timings.predicted_n if self.timings is not None else None


_decode_event = msgspec.json.Decoder(_Event).decode


@dataclass(slots=True)
class _Choice:
    """One choice while it is being read. ``chunk_tokens[i]`` is None where the server does not count chunk i."""

    chunk_ns: list[int] = field(default_factory=list)
    chunk_tokens: list[int | None] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    finish_reason: str | None = None


class CompletionReader:
    """One streamed completion of ``num_choices`` choices, read event by event."""

    __slots__ = (
        "_choices",
        "_is_counting",
        "_num_choices",
        "_splitter",
        "_tokens_before",
        "error",
        "is_terminated",
        "usage",
    )

    def __init__(self, num_choices: int) -> None:
        self.usage: Usage | None = None
        self.error: RequestError | None = None
        """The first error event or unreadable event."""
        self.is_terminated = False
        """Whether ``[DONE]`` arrived; not every server sends it."""
        self._num_choices = num_choices
        self._choices: dict[int, _Choice] = {}
        self._splitter = EventSplitter()
        self._is_counting = False
        self._tokens_before = 0

    def feed(self, t_ns: int, data: bytes) -> None:
        """Take what arrived at ``t_ns``."""
        for payload in self._splitter.feed(data):
            self._take(t_ns, payload)

    def finish(self, t_ns: int) -> None:
        """Take what is left when the stream has ended; a last event may lack its blank line."""
        if payload := self._splitter.finish():
            self._take(t_ns, payload)

    @property
    def num_finished(self) -> int:
        """Choices that came with a finish reason."""
        return sum(choice.finish_reason is not None for choice in self._choices.values())

    @property
    def has_events(self) -> bool:
        return bool(self._choices) or self.usage is not None or self.error is not None or self.is_terminated

    def choices(self) -> tuple[ChoiceRecord, ...]:
        """What arrived for each choice, by index."""
        return tuple(self._record(index) for index in sorted(self._choices))

    def _record(self, index: int) -> ChoiceRecord:
        choice = self._choices[index]
        counts = tuple(count for count in choice.chunk_tokens if count is not None)
        is_counted = bool(counts) and len(counts) == len(choice.chunk_ns)
        output_tokens = sum(counts) if is_counted else None
        if self._num_choices == 1 and self.usage is not None and self.usage.completion_tokens is not None:
            output_tokens = self.usage.completion_tokens
        return ChoiceRecord(
            index=index,
            chunk_ns=tuple(choice.chunk_ns),
            chunk_tokens=counts if is_counted else None,
            output_tokens=output_tokens,
            finish_reason=choice.finish_reason,
            text="".join(choice.texts),
        )

    def _take(self, t_ns: int, payload: bytes) -> None:
        if payload == b"[DONE]":
            self.is_terminated = True
            return
        try:
            event = _decode_event(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self._fail("malformed-stream", f"an event cannot be read ({error}): {shown(payload)}")
            return
        if event.object == "error" or bytes(event.error) not in {b"", b"null"}:
            self._fail("server-error", shown(bytes(event.error) or payload))
        counted = self._counted_since(event)
        for choice in event.choices or ():
            self._take_choice(t_ns, choice, counted)
        if not event.choices and counted and self._is_counting:
            # The last token completed no character, and the server sent no event of its own for it.
            self._take_choice(t_ns, _ChoiceEvent(index=next(iter(self._choices))), counted)
        if event.usage is not None:
            self.usage = event.usage

    def _counted_since(self, event: _Event) -> int | None:
        """Tokens since the last event, for servers that state a running count in every event.

        Known for a single choice only: with several, servers differ in whose tokens they count.
        """
        total = event.tokens_so_far
        if self._num_choices != 1 or total is None:
            return None
        since, self._tokens_before = total - self._tokens_before, total
        return since

    def _take_choice(self, t_ns: int, event: _ChoiceEvent, counted: int | None) -> None:
        choice = self._choices.get(event.index)
        if choice is None:
            choice = self._choices[event.index] = _Choice()
        if event.finish_reason is not None:
            choice.finish_reason = event.finish_reason
        text = _text(event)
        num_ids = len(event.token_ids) if event.token_ids is not None else None
        # A usage that only the last event carries is no running count: it would claim all tokens for that event.
        is_running = counted is not None and (self._is_counting or not choice.chunk_ns)
        is_silent_token = is_running and self._is_counting and bool(counted)
        if text or num_ids or is_silent_token:
            self._is_counting = is_running
            choice.chunk_ns.append(t_ns)
            choice.chunk_tokens.append(num_ids if num_ids is not None else counted if is_running else None)
            choice.texts.append(text)

    def _fail(self, kind: str, message: str) -> None:
        if self.error is None:
            self.error = RequestError(kind=kind, message=message)


def _text(event: _ChoiceEvent) -> str:
    if event.text is not None:
        return event.text
    delta = event.delta
    if delta is None:
        return ""
    return (delta.reasoning_content or delta.reasoning or "") + (delta.content or "")


def shown(data: bytes) -> str:
    """Foreign bytes as a message shows them: short, on one line."""
    text = " ".join(data[:_SHOWN_BYTES].decode(errors="replace").split())
    return text + ("…" if len(data) > _SHOWN_BYTES else "")
