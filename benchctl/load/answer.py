"""One answer of a server, from raw reads of its socket to choices, tokens and the error that it leaves."""

from array import array
from typing import Any, Final

import httptools
import msgspec

from benchctl.load.events import (
    CR,
    UNREADABLE,
    AnyJson,
    ChoiceEvent,
    Delta,
    Event,
    EventSplitter,
    ExcessError,
    FinishObject,
    TailSplitter,
    Usage,
    decode_event,
    most_answer_bytes,
)
from benchctl.records.finish_reasons import MOST_WORD_CHARS, finish_error
from benchctl.records.record import ChoiceRecord, PreparedRequest, RequestError
from benchctl.untrusted import ERROR_BODY_BYTES, RESPONSE_HEAD_BYTES, RESPONSE_HEADERS
from benchctl.untrusted.reading import decoding_problem

UNCOUNTED: Final = -1
_CHAR_BYTES: Final = 6
_CHUNK_BYTES: Final = 64
"""The most that a character, and the numbers of a chunk, take in JSON."""


class Choice:
    """The arrival, the read delay and the tokens of each chunk of one choice.

    Stored in columns, so that a stream of ten thousand tokens takes little memory while it is open.
    """

    __slots__ = (
        "add_count",
        "add_late",
        "add_ns",
        "add_text",
        "chars",
        "counts",
        "finish_reason",
        "has_empty_ids",
        "heads",
        "lates_ns",
        "silent",
        "texts",
        "times_ns",
    )  # fmt: skip

    def __init__(self) -> None:
        self.times_ns = array("q")
        self.lates_ns = array("q")
        self.counts = array("q")
        """``UNCOUNTED`` where the server does not count them."""
        self.texts: list[str] = []
        """The text of each chunk since the choice was last compacted; empty for a silent one."""
        self.heads: list[str] = []
        """The text of the chunks before those, and in ``chars`` the length of each."""
        self.chars = array("i")
        self.silent: list[int] = []
        """Positions of chunks that only a count shows; they are chunks only if the server continues to count."""
        self.finish_reason: str | None = None
        self.has_empty_ids = False
        """An empty list of token ids came: the server counts even when there is nothing to count."""
        self.add_ns = self.times_ns.append
        self.add_late = self.lates_ns.append
        self.add_count = self.counts.append
        self.add_text = self.texts.append

    def add(self, t_ns: int, late_ns: int, count: int | None, text: str | None) -> None:
        """Take a chunk; its text is None if it is silent."""
        if text is None:
            self.silent.append(len(self.times_ns))
        self.texts.append(text or "")
        self.times_ns.append(t_ns)
        self.lates_ns.append(late_ns)
        self.counts.append(UNCOUNTED if count is None else count)

    @property
    def is_counted(self) -> bool:
        """True when the server counts the tokens of all chunks."""
        return UNCOUNTED not in self.counts and (bool(self.counts) or self.has_empty_ids)

    @property
    def most_record_bytes(self) -> int:
        """The most that it can take in a record."""
        num_chars = sum(map(len, self.heads)) + sum(map(len, self.texts))
        return _CHAR_BYTES * num_chars + _CHUNK_BYTES * len(self.times_ns)

    def compact(self) -> None:
        """Join the texts into one and store their lengths, which is not done while tokens arrive."""
        if self.texts:
            self.chars.extend(map(len, self.texts))
            self.heads.append("".join(self.texts))
            self.texts.clear()

    def drop_silent(self) -> None:
        """Remove silent chunks of a compacted choice: its count stopped, so it did not show chunks."""
        for i in reversed(self.silent):
            del self.times_ns[i], self.lates_ns[i], self.counts[i], self.chars[i]
        self.silent.clear()


class Choices(dict[int, Choice]):
    """Choices by index, each made at its first event. Raises ExcessError for one that was not requested."""

    def __init__(self, num_requested: int) -> None:
        self._num_requested = num_requested

    def __missing__(self, index: int) -> Choice:
        if index >= self._num_requested:
            raise ExcessError(
                "unrequested-choice",
                f"the stream holds a choice {index} where choices 0 to {self._num_requested - 1} were requested",
            )
        choice = self[index] = Choice()
        return choice


_EXCERPT_BYTES: Final = 200
_EMPTY: Final = frozenset({b"null", b"[]", b"{}"})
_MOST_ERROR_BYTES: Final = 64 << 10
"""A larger error is shown as it is, by its beginning."""


class CompletionReader:
    """One streamed completion of ``num_choices`` choices, read event by event."""

    __slots__ = (
        "_choices",
        "_finish_stated",
        "_is_counting",
        "_is_ending",
        "_num_choices",
        "_splitter",
        "_tokens_so_far",
        "cut_event",
        "error",
        "is_terminated",
        "usage",
    )

    def __init__(self, num_choices: int) -> None:
        self.usage: Usage | None = None
        """The last usage that the server sent."""
        self.error: RequestError | None = None
        """The first error event or unreadable event."""
        self.is_terminated = False
        """True when ``[DONE]`` arrived; not every server sends it."""
        self.cut_event = b""
        """The part of an event that arrived before the stream ended."""
        self._num_choices = num_choices
        self._choices = Choices(num_choices)
        self._splitter: EventSplitter | TailSplitter = EventSplitter()
        self._finish_stated = ""
        """What the server says of the finish reason of a choice."""
        self._is_ending = False
        self._is_counting = False
        """True while the server sends a running count: every event that could have one has one."""
        self._tokens_so_far: int | None = None

    def feed(self, t_ns: int, data: bytes, late_ns: int = 0) -> None:
        """Take ``data``, which arrived at ``t_ns`` and was read ``late_ns`` later.

        Raises ExcessError for what no honest stream holds; there is no use in feeding more then.
        """
        line, _, rest = data.partition(b"\n")
        if rest == b"\n" and line[:7] == b"data: {" and CR not in line and self._splitter.is_between:
            payloads = [line[6:]]  # nearly always; the splitter would give the same
        else:
            payloads = self._splitter.feed(data)
        for payload in payloads:
            try:
                event = decode_event(payload)
            except UNREADABLE as error:
                self._take_unreadable(payload, error)
                continue
            choices, counted = event.choices, None
            if not choices or event.usage is not None or event.timings is not None or event.error is not None:
                counted = self._note(event)
                if counted and not choices:
                    self._take_silent(t_ns, late_ns, counted)
            for part in choices or ():
                text, ids = part.text, part.token_ids
                if text is None:
                    text = _text(part.delta)
                if (text or ids) and counted is None and part.finish_reason is None:
                    # Nearly all events come here; the long way gives the same for them.
                    self._is_counting = False
                    choice = self._choices[part.index]
                    choice.add_ns(t_ns)
                    choice.add_late(late_ns)
                    choice.add_count(UNCOUNTED if ids is None else len(ids))
                    choice.add_text(text)
                else:
                    self._take_choice(t_ns, late_ns, part, text, counted)

    def finish(self, t_ns: int, late_ns: int = 0) -> None:
        """Take the rest when the stream has ended; a last event may lack its blank line."""
        self._is_ending = True
        self.feed(t_ns, b"\n\n", late_ns)

    def compact(self) -> None:
        """Store everything until now in less memory."""
        for choice in self._choices.values():
            choice.compact()

    @property
    def num_finished(self) -> int:
        return sum(choice.finish_reason is not None for choice in self._choices.values())

    @property
    def finish_error(self) -> RequestError | None:
        """The failure that a finish reason means; None where all answers that ended are answers."""
        return finish_error((choice.finish_reason for choice in self._choices.values()), self._finish_stated)

    @property
    def indices(self) -> tuple[int, ...]:
        return tuple(sorted(self._choices))

    @property
    def last_chunk_ns(self) -> int:
        """The last arrival of output; 0 before the first."""
        return max((choice.times_ns[-1] for choice in self._choices.values() if choice.times_ns), default=0)

    @property
    def most_record_bytes(self) -> int:
        """The most that the choices can take in a record."""
        return sum(choice.most_record_bytes for choice in self._choices.values())

    @property
    def has_events(self) -> bool:
        return bool(self._choices) or self.usage is not None or self.error is not None or self.is_terminated

    @property
    def output_tokens(self) -> int | None:
        """Tokens of all choices: from ``usage``, or else the sum of the counts of events."""
        if self.usage is not None and self.usage.completion_tokens is not None:
            return self.usage.completion_tokens
        counts = [self._output_tokens(choice) for choice in self._choices.values()]
        stated = [count for count in counts if count is not None]
        return sum(stated) if len(stated) == len(counts) == self._num_choices else None

    def choices(self, stamps_late: bool = False) -> tuple[ChoiceRecord, ...]:
        """The chunks of each choice, by index; with ``stamps_late`` also the read delay of each."""
        return tuple(self._record(index, self._choices[index], stamps_late) for index in self.indices)

    def _record(self, index: int, choice: Choice, stamps_late: bool) -> ChoiceRecord:
        is_counted, output_tokens = choice.is_counted, self._output_tokens(choice)
        choice.compact()
        if not is_counted:
            choice.drop_silent()
        return ChoiceRecord(
            index=index,
            chunk_ns=tuple(choice.times_ns),
            chunk_late_ns=tuple(choice.lates_ns) if stamps_late else None,
            chunk_tokens=tuple(choice.counts) if is_counted else None,
            chunk_chars=tuple(choice.chars),
            output_tokens=output_tokens,
            finish_reason=choice.finish_reason,
            text="".join(choice.heads),
        )

    def _output_tokens(self, choice: Choice) -> int | None:
        if self._num_choices == 1:
            stated = self.usage.completion_tokens if self.usage is not None else None
            stated = self._tokens_so_far if stated is None else stated
            if stated is not None:
                return stated
        return sum(choice.counts) if choice.is_counted else None

    def _take_choice(self, t_ns: int, late_ns: int, part: ChoiceEvent, text: str, counted: int | None) -> None:
        choice = self._choices[part.index]
        if (reason := part.finish_reason) is not None:
            self._finish(choice, reason)
        # A usage in the last event only is not a running count: it would assign all tokens to that event.
        is_running = counted is not None and (self._is_counting or not choice.times_ns)
        if is_running and part.finish_reason is None:
            self._is_counting = True
        num_ids = None if part.token_ids is None else len(part.token_ids)
        delta = part.delta
        calls_tool = delta is not None and not (_is_empty(delta.tool_calls) and _is_empty(delta.function_call))
        if text or num_ids or calls_tool:
            self._is_counting = is_running
            count = num_ids if num_ids is not None else counted if is_running else None
            choice.add(t_ns, late_ns, count, text)
        elif is_running and counted and self._is_counting:
            choice.add(t_ns, late_ns, counted, None)
        elif num_ids is not None:
            choice.has_empty_ids = True

    def _finish(self, choice: Choice, reason: str | FinishObject) -> None:
        """Note why a choice ended. An empty word says nothing: the choice goes on."""
        if isinstance(reason, FinishObject):
            self._finish_stated = self._finish_stated or excerpt((reason.message or "").encode())
            reason = reason.type or ""
        choice.finish_reason = reason[:MOST_WORD_CHARS] or choice.finish_reason

    def _take_silent(self, t_ns: int, late_ns: int, counted: int) -> None:
        """Take a count without a choice: a token that completed no character and got no event of its own."""
        if self._is_counting and self._choices:
            self._take_choice(t_ns, late_ns, ChoiceEvent(index=next(iter(self._choices))), "", counted)

    def _note(self, event: Event) -> int | None:
        """Take the parts of an event other than its choices; returns the tokens since the last count.

        None with several choices: servers differ in which of them they count.
        """
        stated = None if _is_null(event.error) else event.error
        if stated is not None or (event.object == "error" and not event.choices):
            stated = stated or event.message
            self._note_error(b"null" if stated is None else bytes(stated))
        if event.usage is not None:
            self.usage = event.usage
        total = event.tokens_so_far
        if self._num_choices != 1 or total is None:
            return None
        since, self._tokens_so_far = total - (self._tokens_so_far or 0), total
        return since if since >= 0 else None

    def _note_error(self, content: bytes) -> None:
        """Take an error event by the JSON that it states."""
        stated: Any = msgspec.json.decode(content) if len(content) <= _MOST_ERROR_BYTES else None
        code = stated.get("code") if isinstance(stated, dict) else None
        if isinstance(stated, str):
            content = stated.encode()
        elif stated is not None:
            content = msgspec.json.encode(stated)
        self._fail("server-error", excerpt(content), code if type(code) is int else None)

    def _take_unreadable(self, payload: bytes, error: Exception) -> None:
        if payload == b"[DONE]":
            self.is_terminated = True
            if isinstance(self._splitter, EventSplitter):
                self._splitter = TailSplitter(self._splitter)
        elif self._is_ending:
            self.cut_event = payload
        else:
            self._fail(
                "malformed-stream", f"an event cannot be read ({decoding_problem(error)}): {excerpt(payload)}"
            )

    def break_off(self, error: ExcessError) -> None:
        """Note that the stream is not read to its end, and drop the event that is incomplete."""
        self._splitter = EventSplitter()
        self._fail(error.kind, str(error))

    def _fail(self, kind: str, message: str, status: int | None = None) -> None:
        if self.error is None:
            self.error = RequestError(kind=kind, message=message, status=status)


def _text(delta: Delta | None) -> str:
    if delta is None:
        return ""
    text = delta.content or delta.refusal or ""
    reasoning = delta.reasoning_content or delta.reasoning
    return reasoning + text if reasoning else text


def _is_null(value: AnyJson) -> bool:
    return value is None or bytes(value) == b"null"


def _is_empty(value: AnyJson) -> bool:
    return value is None or bytes(value) in _EMPTY


def excerpt(data: bytes) -> str:
    """Bytes of a server for a message: short, on one line."""
    text = " ".join(data[:_EXCERPT_BYTES].decode(errors="replace").split())
    return text + ("…" if len(data) > _EXCERPT_BYTES else "")


OK: Final = 200
_HEAD_BYTES: Final = 4096
"""Bytes of the body that are stored for messages."""
_PLAIN_CODINGS: Final = frozenset({"", "identity", "chunked"})


class _Message:
    """The head and the pieces of the body of one answer, collected by callbacks of ``httptools``.

    Interim answers (1xx) are dropped, as is everything after the end of the answer.
    """

    __slots__ = (
        "codings", "head_bytes", "headers", "is_complete", "is_framed", "is_over", "on_body", "parse", "pieces",
        "status", "status_code",
    )  # fmt: skip

    def __init__(self) -> None:
        self.status: int | None = None
        self.headers: list[tuple[bytes, bytes]] = []
        self.head_bytes = 0
        """Size of the headers, and of those of interim answers."""
        self.pieces: list[bytes] = []
        self.codings: list[str] = []
        """Codings that compress the body."""
        self.is_framed = False
        """True when the message itself says where it ends; else it ends with the connection."""
        self.is_complete = False
        self.is_over = False
        """Whether there is nothing more to parse."""
        self.on_body = self.pieces.append
        parser = httptools.HttpResponseParser(self)
        self.parse = parser.feed_data
        self.status_code = parser.get_status_code

    def on_message_begin(self) -> None:
        if self.is_complete:
            raise EOFError("beyond the end of the answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.status is not None:
            return  # a trailer
        self.headers.append((name, value))
        self.head_bytes += len(name) + len(value)
        if len(self.headers) > RESPONSE_HEADERS or self.head_bytes > RESPONSE_HEAD_BYTES:
            raise ValueError("too much head")  # ends parsing: the head is not complete

    def on_headers_complete(self) -> None:
        status = self.status_code()
        if status < OK:
            self.headers.clear()
            return
        self.status = status
        for name, value in self.headers:
            header = name.lower()
            codings = [coding.strip() for coding in value.decode("latin-1").lower().split(",")]
            if header == b"content-length" or (header == b"transfer-encoding" and "chunked" in codings):
                self.is_framed = True
            if header in {b"content-encoding", b"transfer-encoding"}:
                self.codings += [coding for coding in codings if coding not in _PLAIN_CODINGS]

    def on_message_complete(self) -> None:
        self.is_complete = self.is_over = self.status is not None

    def let_go(self) -> None:
        """Part from the parser: each knows the other, and only a search for cycles would free their memory."""
        del self.parse, self.status_code


class Answer:
    """The HTTP/1.1 answer to one request for ``num_choices`` choices, read incrementally.

    Any way of cutting the same bytes into reads gives the same answer but for its times. ``num_tokens`` is the
    number of tokens that were requested, of which the size that an answer may have depends.
    """

    __slots__ = (
        "_is_plain", "_message", "_most_bytes", "_num_body_bytes", "_num_bytes", "_num_head_bytes", "_parse",
        "_pieces", "body_head", "excess", "http_error", "reader",
    )  # fmt: skip

    def __init__(self, num_choices: int, num_tokens: int = 0) -> None:
        self.reader = CompletionReader(num_choices)
        """What an answer with status 200 streams."""
        self.body_head = b""
        """The first bytes of the body, at most 4096."""
        self.http_error: str | None = None
        """Why the answer cannot be read as HTTP."""
        self.excess: RequestError | None = None
        """The failure of an answer that was not read to its end because no honest one is like it."""
        self._most_bytes = most_answer_bytes(num_tokens)
        self._num_bytes = self._num_head_bytes = self._num_body_bytes = 0
        self._message = _Message()
        self._parse = self._message.parse
        self._pieces = self._message.pieces
        self._is_plain = False
        """What comes now is events, and nothing else has to be done with it."""

    @property
    def status(self) -> int | None:
        """The status; None until the head is complete."""
        return self._message.status

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        return self._message.headers

    @property
    def is_complete(self) -> bool:
        """True when the answer has ended as its framing says, or with the connection."""
        return self._message.is_complete

    @property
    def is_over(self) -> bool:
        """True when nothing that may still come can change it: it is complete, not HTTP, or was finished."""
        return self._message.is_over

    def feed(self, t_ns: int, late_ns: int, data: bytes) -> None:
        """Take one read of the socket: ``data``, which arrived at ``t_ns`` and was read ``late_ns`` after that."""
        message = self._message
        if message.is_over:
            return
        try:
            self._parse(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._misunderstand(error, data)
        pieces = self._pieces
        if pieces:
            body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            pieces.clear()
            try:
                if self._is_plain:
                    self.reader.feed(t_ns, body, late_ns)
                else:
                    self._take_beginning(t_ns, late_ns, body)
            except ExcessError as error:
                self.break_off(error)
                return
        elif message.status is None:
            self._take_head(len(data))
        if message.is_over and self.excess is None:
            self._end(t_ns, late_ns)

    def charge(self, num_bytes: int) -> None:
        """Count what the answer took of the wire and of the memory; ends it where no answer takes as much."""
        self._num_bytes += num_bytes
        if self._num_bytes > self._most_bytes and not self.is_over:
            most = f"{self._most_bytes >> 20} MiB, which is ample for what was requested"
            self.break_off(ExcessError("oversized-answer", f"the answer has no end within {most}"))

    def break_off(self, error: ExcessError) -> None:
        """End the answer here and fail its request; what comes after is not looked at."""
        message = self._message
        message.is_over, message.is_complete = True, False
        self.excess = RequestError(kind=error.kind, message=str(error), status=message.status)
        self.reader.break_off(error)
        self._let_go()

    def _take_head(self, num_bytes: int) -> None:
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > RESPONSE_HEAD_BYTES and not self._message.is_over:
            self._refuse_head()

    def _refuse_head(self) -> None:
        most = f"{RESPONSE_HEAD_BYTES >> 10} KiB and {RESPONSE_HEADERS} headers"
        self.break_off(ExcessError("oversized-head", f"the head of the answer exceeds {most}"))

    def finish(self, t_ns: int) -> None:
        """Note that the connection has ended, or that the rest of the answer is not needed."""
        message = self._message
        if not message.is_over:
            message.is_over = True
            message.is_complete = message.status is not None and not message.is_framed
            self._end(t_ns, 0)

    def _take_beginning(self, t_ns: int, late_ns: int, body: bytes) -> None:
        """Take a piece from the start of the body, or of a body that is not a stream of events."""
        message = self._message
        self.body_head += body[: _HEAD_BYTES - len(self.body_head)]
        if message.codings:
            listed = ", ".join(message.codings)
            self.http_error = self.http_error or f"the answer is compressed ({listed}), which was not requested"
            message.is_over = True
        elif message.status == OK:
            self.reader.feed(t_ns, body, late_ns)
            self._is_plain = len(self.body_head) == _HEAD_BYTES
        else:
            self._num_body_bytes += len(body)
            message.is_over = message.is_over or self._num_body_bytes > ERROR_BODY_BYTES

    def _misunderstand(self, error: Exception, data: bytes) -> None:
        message = self._message
        if message.is_complete:
            return  # bytes after the answer do not matter
        if isinstance(error, httptools.HttpParserCallbackError):
            self._refuse_head()
            return
        message.is_over = True
        if isinstance(error, httptools.HttpParserUpgrade):
            self.http_error = "the server changes to another protocol, which was not requested"
        elif message.status is None:
            self.http_error = f"the answer is not HTTP ({error}): {excerpt(data)}"
        else:
            self.http_error = f"the framing of the answer breaks in its body ({error}): {excerpt(data)}"

    def _end(self, t_ns: int, late_ns: int) -> None:
        if self._message.is_complete:
            try:
                self.reader.finish(t_ns, late_ns)
            except ExcessError as error:
                self.break_off(error)
                return
        self._let_go()

    def _let_go(self) -> None:
        self._message.let_go()
        del self._parse


def head_of(data: bytes) -> tuple[int, list[tuple[bytes, bytes]]] | None:
    """Status and headers of the answer that ``data`` begins; None while its head is incomplete."""
    answer = Answer(1)
    answer.feed(0, 0, data)
    answer.finish(0)
    return None if answer.status is None else (answer.status, answer.headers)


_MOST_OVER_FRAC: Final = 1.25
_MOST_OVER_TOKENS: Final = 16
"""Some servers count the tokens of the text anew, and get a few more than were generated."""


def error_of(answer: Answer, request: PreparedRequest) -> RequestError | None:
    """The error of an answer that has ended; None only when everything that ``request`` asks for has come.

    The server's own error explains more than the way in which the answer then ended.
    """
    status, reader = answer.status, answer.reader
    if status is not None and status != OK:
        return RequestError(
            kind="http-status", message=answer.http_error or _stated(answer.body_head), status=status
        )
    if reader.error is not None:
        return reader.error
    if answer.http_error is not None:
        return RequestError(kind="malformed-http", message=answer.http_error)
    if (failed := reader.finish_error) is not None:
        return failed
    if not answer.is_complete:
        when = "before it answered" if status is None else "in mid-stream"
        return RequestError(kind="early-close", message=f"the server closed the connection {when}")
    return _incompleteness(answer, request) or _miscount(reader, request)


def _incompleteness(answer: Answer, request: PreparedRequest) -> RequestError | None:
    reader = answer.reader
    if reader.cut_event:
        message = f"the stream ended in the middle of an event: {excerpt(reader.cut_event)}"
        return RequestError(kind="early-close", message=message)
    if not reader.has_events and answer.body_head:
        message = f"the answer holds no events: {excerpt(answer.body_head)}"
        return RequestError(kind="malformed-stream", message=message)
    if reader.num_finished < request.n:
        finished = f"{reader.num_finished} of {request.n} choices finished"
        if reader.is_terminated:
            message = f"the server ended the stream by [DONE] with {finished}: the others have no finish_reason"
            return RequestError(kind="unfinished", message=message)
        return RequestError(kind="early-close", message=f"the stream ended with {finished}")
    return None


def _miscount(reader: CompletionReader, request: PreparedRequest) -> RequestError | None:
    output_tokens, forced_tokens = reader.output_tokens, request.max_tokens * request.n
    if output_tokens is None:
        message = "the stream states no usage and no ids of all its tokens: tokens cannot be counted"
        return RequestError(kind="malformed-stream", message=message)
    if output_tokens > _MOST_OVER_FRAC * forced_tokens + _MOST_OVER_TOKENS:
        message = f"usage counts {output_tokens} output tokens where at most {forced_tokens} were requested"
        return RequestError(kind="wrong-length", message=message)
    if request.ignore_eos and output_tokens != forced_tokens:
        message = f"{output_tokens} output tokens where ignore_eos demands {forced_tokens}"
        return RequestError(kind="wrong-length", message=message)
    return None


class _Refusal(msgspec.Struct):
    error: msgspec.Raw = msgspec.Raw()
    message: str | None = None


def _stated(body: bytes) -> str:
    """The message of a refusal: of ``{"error": {"message": …}}``, of ``{"message": …}``, or the body as it is."""
    nested = body
    while nested:
        try:
            refusal = msgspec.json.decode(nested, type=_Refusal)
        except UNREADABLE:
            break
        if refusal.message is not None:
            return excerpt(refusal.message.encode())
        body, nested = nested, bytes(refusal.error)
    return excerpt(nested or body) or "no message"
