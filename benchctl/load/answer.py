"""One answer of a server, from raw reads of its socket to choices, tokens and the error that it leaves.

``httptools`` parses HTTP/1.1, ``CompletionReader`` the events. Pure and incremental: bytes come in with the time at
which they arrived, and any way of cutting the same bytes into reads gives the same result except for those times.
No bytes raise. An event has arrived when its closing blank line has.

Output of a choice, which makes a chunk, is text, reasoning text, a part of a tool call, or token ids. A first event
that only names the role does not count; an event with token ids and no text does (a token that completes no
character), and so does one by which a running count grew.
"""

import io
from array import array
from operator import or_
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
    Usage,
    decode_event,
    decode_plain_events,
    lone_payloads,
)
from benchctl.records.finish_reasons import MOST_WORD_CHARS, finish_error
from benchctl.records.record import ChoiceRecord, PreparedRequest, RequestError
from benchctl.untrusted import ERROR_BODY_BYTES, LINE_BYTES, RESPONSE_HEAD_BYTES, RESPONSE_HEADERS, TOKEN_BYTES
from benchctl.untrusted.files import decoding_problem

OK: Final = 200
_UNCOUNTED: Final = -1
_CHAR_BYTES: Final = 6
_CHUNK_BYTES: Final = 64
"""The most that a character, and the numbers of a chunk, take in JSON."""
_BODY_HEAD_BYTES: Final = 4096
"""Bytes of the body that are stored for messages."""
_OVERSIZED_HEAD: Final = (
    "oversized-head",
    f"the head of the answer exceeds {RESPONSE_HEAD_BYTES >> 10} KiB and {RESPONSE_HEADERS} headers",
)
_EXCERPT_BYTES: Final = 200
_EMPTY: Final = frozenset({b"null", b"[]", b"{}"})
_MOST_OVER_FRAC: Final = 1.25
_MOST_OVER_TOKENS: Final = 16
"""Some servers count the tokens of the text anew, and get a few more than were generated."""


class _Choice:
    """The arrival, the read delay and the tokens of each chunk of one choice, in columns: a stream of ten thousand
    tokens takes little memory while it is open.
    """

    def __init__(self) -> None:
        self.times_ns = array("q")
        self.lates_ns = array("q")
        self.counts = array("q")
        """``_UNCOUNTED`` where the server does not count them."""
        self.chars = array("i")
        self.text = io.StringIO()
        self.silent: list[int] = []
        """Positions of chunks that only a count shows; they are chunks only if the server continues to count."""
        self.finish_reason: str | None = None
        self.has_empty_ids = False
        """An empty list of token ids came: the server counts even when there is nothing to count."""

    def add(self, t_ns: int, late_ns: int, count: int, text: str) -> None:
        self.times_ns.append(t_ns)
        self.lates_ns.append(late_ns)
        self.counts.append(count)
        self.chars.append(self.text.write(text))

    def add_all(self, times_ns: list[int], lates_ns: list[int], counts: list[int], texts: list[str]) -> None:
        self.times_ns.fromlist(times_ns)
        self.lates_ns.fromlist(lates_ns)
        self.counts.fromlist(counts)
        self.chars.fromlist([*map(len, texts)])
        self.text.write("".join(texts))

    @property
    def is_counted(self) -> bool:
        """True when the server counts the tokens of all chunks."""
        return _UNCOUNTED not in self.counts and (bool(self.counts) or self.has_empty_ids)

    def record(self, index: int, output_tokens: int | None, *, stamps_late: bool) -> ChoiceRecord:
        is_counted = self.is_counted
        if not is_counted:  # its count stopped, so it did not show chunks
            for i in reversed(self.silent):
                del self.times_ns[i], self.lates_ns[i], self.counts[i], self.chars[i]
            self.silent.clear()
        return ChoiceRecord(
            index=index,
            chunk_ns=tuple(self.times_ns),
            chunk_late_ns=tuple(self.lates_ns) if stamps_late else None,
            chunk_tokens=tuple(self.counts) if is_counted else None,
            chunk_chars=tuple(self.chars),
            output_tokens=output_tokens,
            finish_reason=self.finish_reason,
            text=self.text.getvalue(),
        )


class CompletionReader:
    """One streamed completion of ``num_choices`` choices, read event by event."""

    def __init__(self, num_choices: int) -> None:
        self.usage: Usage | None = None
        """The last usage that the server sent."""
        self.error: RequestError | None = None
        """The first error: of the server, of what it sent, or of how."""
        self.is_terminated = False
        """True when ``[DONE]`` arrived; not every server sends it."""
        self.cut_event = b""
        """The part of an event that arrived before the stream ended."""
        self._num_choices = num_choices
        self._choices: dict[int, _Choice] = {}
        self._splitter = EventSplitter()
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
                if counted and not choices and self._is_counting and self._choices:
                    # A token that completed no character and got no event of its own.
                    self._take_choice(t_ns, late_ns, ChoiceEvent(index=next(iter(self._choices))), "", counted)
            for part in choices or ():
                text, ids = part.text, part.token_ids
                if text is None:
                    text = _text(part.delta)
                if (text or ids) and counted is None and part.finish_reason is None:
                    # Nearly all events come here; the long way gives the same for them.
                    self._is_counting = False
                    count = _UNCOUNTED if ids is None else len(ids)
                    choice = self._choices.get(part.index) or self._choice(part.index)
                    choice.add(t_ns, late_ns, count, text)
                else:
                    self._take_choice(t_ns, late_ns, part, text, counted)

    def feed_plain(self, times_ns: list[int], lates_ns: list[int], payloads: list[bytes]) -> bool:
        """Take the payloads of events if all bring output of one choice and nothing else; else take none.

        They are decoded together, which costs a little less than ``feed``; that gives the same for them.
        """
        lines = b"\n".join(payloads)
        if not self._splitter.is_between or lines.count(b"\n") >= len(payloads) or CR in lines:
            return False
        try:
            parts = [event.choices[0] for event in decode_plain_events(lines)]
        except UNREADABLE:
            return False
        choice = self._choices.get(parts[0].index)
        texts = [_text(part.delta) if part.text is None else part.text for part in parts]
        ids = [part.token_ids for part in parts]
        if (
            choice is None
            or len(parts) != len(payloads)
            or len({part.index for part in parts}) > 1
            or not all(map(or_, map(bool, texts), map(bool, ids)))
        ):
            return False
        self._is_counting = False
        choice.add_all(times_ns, lates_ns, [_UNCOUNTED if one is None else len(one) for one in ids], texts)
        return True

    def finish(self, t_ns: int, late_ns: int = 0) -> None:
        """Take the rest when the stream has ended; a last event may lack its blank line."""
        self._is_ending = True
        if self._splitter.held:
            self.feed(t_ns, b"\n\n", late_ns)

    @property
    def num_finished(self) -> int:
        return sum(choice.finish_reason is not None for choice in self._choices.values())

    @property
    def finish_error(self) -> RequestError | None:
        """The failure that a finish reason means; None where all answers that ended are answers."""
        return finish_error((choice.finish_reason for choice in self._choices.values()), self._finish_stated)

    @property
    def last_chunk_ns(self) -> int:
        """The last arrival of output; 0 before the first."""
        return max((choice.times_ns[-1] for choice in self._choices.values() if choice.times_ns), default=0)

    @property
    def most_record_bytes(self) -> int:
        """The most that the choices can take in a record."""
        choices = self._choices.values()
        return sum(_CHAR_BYTES * one.text.tell() + _CHUNK_BYTES * len(one.times_ns) for one in choices)

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
        return tuple(
            choice.record(index, self._output_tokens(choice), stamps_late=stamps_late)
            for index, choice in sorted(self._choices.items())
        )

    def _output_tokens(self, choice: _Choice) -> int | None:
        if self._num_choices == 1:
            stated = self.usage.completion_tokens if self.usage is not None else None
            stated = self._tokens_so_far if stated is None else stated
            if stated is not None:
                return stated
        return sum(choice.counts) if choice.is_counted else None

    def _choice(self, index: int) -> _Choice:
        """The choice of that index, made at its first event. Raises ExcessError if it was not requested."""
        choice = self._choices.get(index)
        if choice is not None:
            return choice
        if index >= self._num_choices:
            requested = f"choices 0 to {self._num_choices - 1} were requested"
            raise ExcessError("unrequested-choice", f"the stream holds a choice {index} where {requested}")
        self._choices[index] = choice = _Choice()
        return choice

    def _take_choice(self, t_ns: int, late_ns: int, part: ChoiceEvent, text: str, counted: int | None) -> None:
        choice = self._choice(part.index)
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
            choice.add(t_ns, late_ns, _UNCOUNTED if count is None else count, text)
        elif is_running and counted and self._is_counting:
            choice.silent.append(len(choice.times_ns))
            choice.add(t_ns, late_ns, counted, "")
        elif num_ids is not None:
            choice.has_empty_ids = True

    def _finish(self, choice: _Choice, reason: str | FinishObject) -> None:
        """Note why a choice ended. An empty word says nothing: the choice goes on."""
        if isinstance(reason, FinishObject):
            self._finish_stated = self._finish_stated or excerpt((reason.message or "").encode())
            reason = reason.type or ""
        choice.finish_reason = reason[:MOST_WORD_CHARS] or choice.finish_reason

    def _note(self, event: Event) -> int | None:
        """Take the parts of an event other than its choices; returns the tokens since the last count.

        None with several choices: servers differ in which of them they count.
        """
        stated = None if event.error is None or bytes(event.error) == b"null" else event.error
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
        # A larger error is shown as it is, by its beginning
        stated: Any = msgspec.json.decode(content) if len(content) <= (64 << 10) else None
        code = stated.get("code") if isinstance(stated, dict) else None
        if isinstance(stated, str):
            content = stated.encode()
        elif stated is not None:
            content = msgspec.json.encode(stated)
        self.fail("server-error", excerpt(content), code if type(code) is int else None)

    def _take_unreadable(self, payload: bytes, error: Exception) -> None:
        if payload == b"[DONE]":
            self.is_terminated = True
            self._splitter.note_end()
        elif self._is_ending:
            self.cut_event = payload
        else:
            problem = f"an event cannot be read ({decoding_problem(error)})"
            self.fail("malformed-stream", f"{problem}: {excerpt(payload)}")

    def fail(self, kind: str, message: str, status: int | None = None) -> None:
        if self.error is None:
            self.error = RequestError(kind=kind, message=message, status=status)


class Answer:
    """The HTTP/1.1 answer to one request for ``num_choices`` choices.

    Interim answers (1xx) are dropped, as is everything after the end of the answer. ``num_tokens`` is the number of
    tokens that were requested, on which the size that an answer may have depends.
    """

    def __init__(self, num_choices: int, num_tokens: int = 0) -> None:
        self.reader = CompletionReader(num_choices)
        """What an answer with status 200 streams."""
        self.status: int | None = None
        """None until the head is complete."""
        self.headers: list[tuple[bytes, bytes]] = []
        self.body_head = b""
        """The first bytes of the body, at most 4096."""
        self.is_complete = False
        """True when the answer has ended as its framing says, or with the connection."""
        self.is_over = False
        """True when nothing that may still come can change it: it is complete, not HTTP, or was finished."""
        self.is_kept = False
        """True when it is complete and the connection stays open behind it."""
        self.is_broken_off = False
        """True when it was not read to its end: it is not HTTP, or no honest answer is like it."""
        self._is_framed = False
        """True when the message itself says where it ends; else it ends with the connection."""
        self._codings: list[str] = []
        """Codings that compress the body."""
        self._is_plain = False
        """What comes now is events, and nothing else has to be done with it."""
        self._most_bytes = 2 * LINE_BYTES + num_tokens * TOKEN_BYTES
        self._has_whole_chunk = False
        """True from the end of a chunk to the size of the next."""
        self._is_between_chunks = False
        """True when the next byte begins a chunk."""
        self._num_bytes = 0
        self._num_head_bytes = 0
        self._num_body_bytes = 0
        self._pieces: list[bytes] = []
        self.on_body = self._pieces.append
        self._parser: Any = httptools.HttpResponseParser(self)

    def feed_all(self, times_ns: list[int], lates_ns: list[int], reads: list[bytes]) -> None:
        """Take reads in a row, as ``feed`` takes each of them."""
        first = 0
        while first < len(reads):
            end = first + 1
            if self._is_between_chunks:
                payloads = lone_payloads(reads[first:])
                end = first + max(len(payloads), 1)
                if payloads and self.reader.feed_plain(times_ns[first:end], lates_ns[first:end], payloads):
                    first = end
            for i in range(first, end):
                self.feed(times_ns[i], lates_ns[i], reads[i])
            first = end

    def feed(self, t_ns: int, late_ns: int, data: bytes) -> None:
        """Take one read of the socket: ``data``, which arrived at ``t_ns`` and was read ``late_ns`` after that."""
        if self.is_over:
            return
        problem = None
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            problem = self._problem_of(error, data)
        self._is_between_chunks = self._has_whole_chunk and data[-2:] == b"\r\n"
        if pieces := self._pieces:
            body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            pieces.clear()
            try:
                if self._is_plain:
                    self.reader.feed(t_ns, body, late_ns)
                else:
                    self._take_beginning(t_ns, late_ns, body)
            except ExcessError as error:
                self._break_off(error.kind, str(error))
        elif self.status is None:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > RESPONSE_HEAD_BYTES:
                problem = problem or _OVERSIZED_HEAD
        if problem is not None and not self.is_broken_off:
            self._break_off(*problem)
        if self.is_over and not self.is_broken_off:
            self._end(t_ns, late_ns)

    def finish(self, t_ns: int) -> None:
        """Note that the connection has ended, or that the rest of the answer is not needed."""
        if not self.is_over:
            self.is_over = True
            self.is_complete = self.status is not None and not self._is_framed
            self._end(t_ns, 0)

    def charge(self, num_bytes: int) -> None:
        """Count what the answer took of the wire and of the memory; ends it where no answer takes as much."""
        self._num_bytes += num_bytes
        if self._num_bytes > self._most_bytes and not self.is_over:
            most = f"{self._most_bytes >> 20} MiB, which is ample for what was requested"
            self._break_off("oversized-answer", f"the answer has no end within {most}")

    def _break_off(self, kind: str, message: str) -> None:
        """End the answer here and fail its request; what comes after is not looked at."""
        self.is_over = self.is_broken_off = True
        self.is_complete = False
        self.reader.fail(kind, message)
        self._parser = None

    def on_message_begin(self) -> None:
        """Callback of the parser, as those below."""
        if self.is_complete:
            self.is_kept = False
            raise EOFError("beyond the end of the answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.status is not None:
            return  # a trailer
        self.headers.append((name, value))
        if len(self.headers) > RESPONSE_HEADERS:
            raise ValueError("too much head")  # ends parsing: the head is not complete

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < OK:
            self.headers.clear()
            return
        self.status = status
        for name, value in self.headers:
            header = name.lower()
            if header == b"content-length":
                self._is_framed = True
            elif header in {b"content-encoding", b"transfer-encoding"}:
                codings = [coding.strip() for coding in value.decode("latin-1").lower().split(",")]
                self._is_framed = self._is_framed or (header == b"transfer-encoding" and "chunked" in codings)
                self._codings += [coding for coding in codings if coding not in {"", "identity", "chunked"}]

    def on_chunk_header(self) -> None:
        self._has_whole_chunk = False

    def on_chunk_complete(self) -> None:
        self._has_whole_chunk = True

    def on_message_complete(self) -> None:
        if self.status is not None:
            self.is_complete = self.is_over = True
            self.is_kept = self._is_framed and self._parser.should_keep_alive()

    def _take_beginning(self, t_ns: int, late_ns: int, body: bytes) -> None:
        """Take a piece from the start of the body, or of a body that is not a stream of events."""
        self.body_head += body[: _BODY_HEAD_BYTES - len(self.body_head)]
        if self._codings:
            codings = ", ".join(self._codings)
            self._break_off("malformed-http", f"the answer is compressed ({codings}), which was not requested")
        elif self.status == OK:
            self.reader.feed(t_ns, body, late_ns)
            self._is_plain = len(self.body_head) == _BODY_HEAD_BYTES
        else:
            self._num_body_bytes += len(body)
            self.is_over = self.is_over or self._num_body_bytes > ERROR_BODY_BYTES

    def _problem_of(self, error: Exception, data: bytes) -> tuple[str, str] | None:
        """The class of failure and its message for an error of the parser; None behind the end of the answer."""
        if self.is_complete:
            self.is_kept = False
            return None
        if isinstance(error, httptools.HttpParserCallbackError):
            return _OVERSIZED_HEAD
        if isinstance(error, httptools.HttpParserUpgrade):
            return "malformed-http", "the server changes to another protocol, which was not requested"
        problem = "is not HTTP" if self.status is None else "breaks in the framing of its body"
        return "malformed-http", f"the answer {problem} ({error}): {excerpt(data)}"

    def _end(self, t_ns: int, late_ns: int) -> None:
        if self.is_complete:
            try:
                self.reader.finish(t_ns, late_ns)
            except ExcessError as error:
                self._break_off(error.kind, str(error))
        self._parser = None  # each knows the other: only a search for cycles would free their memory


def error_of(answer: Answer, request: PreparedRequest) -> RequestError | None:
    """The error of an answer that has ended; None only when everything that ``request`` asks for has come.

    The server's own error explains more than the way in which the answer then ended.
    """
    status, reader = answer.status, answer.reader
    if status is not None and status != OK:
        message = _stated(answer.body_head) if reader.error is None else reader.error.message
        location = next((value for name, value in answer.headers if name.lower() == b"location"), b"")
        if location and status < 400:
            message = f"the server redirects requests to {excerpt(location)}; use that address for the server"
        return RequestError(kind="http-status", message=message, status=status)
    if reader.error is not None:
        return reader.error
    if (failed := reader.finish_error) is not None:
        return failed
    lack = _lack_of(answer, request) or _miscount(reader, request)
    return None if lack is None else RequestError(kind=lack[0], message=lack[1])


def _lack_of(answer: Answer, request: PreparedRequest) -> tuple[str, str] | None:
    """The kind of failure and its description where a part of the answer did not come."""
    reader = answer.reader
    if not answer.is_complete:
        when = "before it answered" if answer.status is None else "in mid-stream"
        return "early-close", f"the server closed the connection {when}"
    if reader.cut_event:
        return "early-close", f"the stream ended in the middle of an event: {excerpt(reader.cut_event)}"
    if not reader.has_events and answer.body_head:
        return "malformed-stream", f"the answer holds no events: {excerpt(answer.body_head)}"
    if (num_finished := reader.num_finished) < request.n:
        finished = f"{num_finished} of {request.n} choices finished"
        if reader.is_terminated:
            return "unfinished", (
                f"the server ended the stream by [DONE] with {finished}: the others have no finish_reason"
            )
        return "early-close", f"the stream ended with {finished}"
    return None


def _miscount(reader: CompletionReader, request: PreparedRequest) -> tuple[str, str] | None:
    """The same where the number of tokens is not the one that was asked for."""
    num_tokens, forced_tokens = reader.output_tokens, request.max_tokens * request.n
    if num_tokens is None:
        missing = "no usage and no ids of all its tokens: tokens cannot be counted"
        return "malformed-stream", f"the stream states {missing}"
    if num_tokens > _MOST_OVER_FRAC * forced_tokens + _MOST_OVER_TOKENS:
        requested = f"where at most {forced_tokens} were requested"
        return "wrong-length", f"usage counts {num_tokens} output tokens {requested}"
    if request.ignore_eos and num_tokens != forced_tokens:
        return "wrong-length", f"{num_tokens} output tokens where ignore_eos demands {forced_tokens}"
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


def _text(delta: Delta | None) -> str:
    if delta is None:
        return ""
    text = delta.content or delta.refusal or ""
    reasoning = delta.reasoning_content or delta.reasoning
    return reasoning + text if reasoning else text


def _is_empty(value: AnyJson) -> bool:
    return value is None or bytes(value) in _EMPTY


def excerpt(data: bytes) -> str:
    """Bytes of a server for a message: short, on one line."""
    text = " ".join(data[:_EXCERPT_BYTES].decode(errors="replace").split())
    return text + ("…" if len(data) > _EXCERPT_BYTES else "")
