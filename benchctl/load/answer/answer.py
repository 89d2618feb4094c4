"""One answer of a server, from raw reads of its socket to tokens and errors.

``httptools`` parses HTTP/1.1, ``CompletionReader`` the events. Pure: bytes and times go in, and no bytes raise.
"""

from typing import Final

import httptools

from benchctl.load.answer.excess import ExcessError, most_answer_bytes
from benchctl.load.answer.stream import CompletionReader, excerpt
from benchctl.records.record import RequestError
from benchctl.untrusted import ERROR_BODY_BYTES, RESPONSE_HEAD_BYTES, RESPONSE_HEADERS

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
