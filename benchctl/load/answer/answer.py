"""One answer of a server, from raw reads of its socket to tokens and errors.

``httptools`` parses HTTP/1.1, ``CompletionReader`` the events. Pure: bytes and times go in, and no bytes raise.
"""

from typing import Final

import httptools
import msgspec

from benchctl.load.answer.events import UNREADABLE
from benchctl.load.answer.stream import CompletionReader, excerpt
from benchctl.records.request import PreparedRequest, RequestError

_OK: Final = 200
_HEAD_BYTES: Final = 4096
"""Bytes of the body that are stored for messages."""
_PLAIN_CODINGS: Final = frozenset({"", "identity", "chunked"})


class _Message:
    """The head and the pieces of the body of one answer, collected by callbacks of ``httptools``.

    Interim answers (1xx) are dropped, as is everything after the end of the answer.
    """

    __slots__ = (
        "codings", "headers", "is_complete", "is_framed", "is_over", "on_body", "parse", "pieces", "status",
        "status_code",
    )  # fmt: skip

    def __init__(self) -> None:
        self.status: int | None = None
        self.headers: list[tuple[bytes, bytes]] = []
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
        if self.status is None:  # else it is a trailer
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        status = self.status_code()
        if status < _OK:
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

    Any way of cutting the same bytes into reads gives the same answer but for its times.
    """

    __slots__ = ("_is_plain", "_message", "_parse", "_pieces", "body_head", "http_error", "reader")

    def __init__(self, num_choices: int) -> None:
        self.reader = CompletionReader(num_choices)
        """What an answer with status 200 streams."""
        self.body_head = b""
        """The first bytes of the body, at most 4096."""
        self.http_error: str | None = None
        """Why the answer cannot be read as HTTP."""
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
            if self._is_plain:
                self.reader.feed(t_ns, body, late_ns)
            else:
                self._take_beginning(t_ns, late_ns, body)
        if message.is_over:
            self._end(t_ns, late_ns)

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
        elif message.status == _OK:
            self.reader.feed(t_ns, body, late_ns)
            self._is_plain = len(self.body_head) == _HEAD_BYTES

    def _misunderstand(self, error: Exception, data: bytes) -> None:
        message = self._message
        if message.is_complete:
            return  # bytes after the answer do not matter
        message.is_over = True
        if isinstance(error, httptools.HttpParserUpgrade):
            self.http_error = "the server changes to another protocol, which was not requested"
        elif message.status is None:
            self.http_error = f"the answer is not HTTP ({error}): {excerpt(data)}"
        else:
            self.http_error = f"the framing of the answer breaks in its body ({error}): {excerpt(data)}"

    def _end(self, t_ns: int, late_ns: int) -> None:
        if self._message.is_complete:
            self.reader.finish(t_ns, late_ns)
        self._message.let_go()
        del self._parse


def head_of(data: bytes) -> tuple[int, list[tuple[bytes, bytes]]] | None:
    """Status and headers of the answer that ``data`` begins; None while its head is incomplete."""
    answer = Answer(1)
    answer.feed(0, 0, data)
    answer.finish(0)
    return None if answer.status is None else (answer.status, answer.headers)


def error_of(answer: Answer, request: PreparedRequest) -> RequestError | None:
    """The error of an answer that has ended; None only when everything that ``request`` asks for has come.

    The server's own error explains more than the way in which the answer then ended.
    """
    status, reader = answer.status, answer.reader
    if status is not None and status != _OK:
        return RequestError(
            kind="http-status", message=answer.http_error or _stated(answer.body_head), status=status
        )
    if reader.error is not None:
        return reader.error
    if answer.http_error is not None:
        return RequestError(kind="malformed-http", message=answer.http_error)
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
    if strangers := [index for index in reader.indices if index >= request.n]:
        message = f"the stream holds a choice {strangers[0]} where choices 0 to {request.n - 1} were requested"
        return RequestError(kind="malformed-stream", message=message)
    if reader.num_finished < request.n:
        message = f"the stream ended with {reader.num_finished} of {request.n} choices finished"
        return RequestError(kind="early-close", message=message)
    return None


def _miscount(reader: CompletionReader, request: PreparedRequest) -> RequestError | None:
    output_tokens, forced_tokens = reader.output_tokens, request.max_tokens * request.n
    if output_tokens is None:
        message = "the stream states no usage and no ids of all its tokens: tokens cannot be counted"
        return RequestError(kind="malformed-stream", message=message)
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
