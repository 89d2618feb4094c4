"""HTTP/1.1: a connection to a client, its requests and their answers.

Not by a web framework or a server's library, which take longer to import than a short run lasts.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from http import HTTPStatus
from typing import Any, Final, TypeAlias

import httptools
import msgspec

MOST_BYTES: Final = 64 << 20
"""Size of the body of a request; of a larger one no more is kept than shows that it is larger."""


class HttpRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request; its headers have names in lower case."""

    method: str
    path: str
    """Without a query."""
    headers: Mapping[str, str]
    body: bytes
    keeps_open: bool
    """The client may send more by the same connection."""


class HttpResponse(msgspec.Struct, frozen=True, kw_only=True):
    """An answer: ``body``, or where there are ``pieces`` those as they come."""

    status: int = 200
    content_type: str = "application/json"
    headers: Mapping[str, str] = {}
    body: bytes = b""
    pieces: AsyncGenerator[bytes, None] | None = None


Answer: TypeAlias = Callable[[HttpRequest], Awaitable[HttpResponse]]
_INVALID: Final = (
    b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 29\r\n\r\nThis request is no HTTP/1.1.\n"
)


class Connection(asyncio.Protocol):
    """The requests of one client, answered in their order; an answer ends where the client leaves.

    What a client does not read waits in its transport: steps go on without it.
    """

    def __init__(self, answer: Answer) -> None:
        self._answer: Final = answer
        self._parser: Final[Any] = httptools.HttpRequestParser(self)
        self._requests: Final = asyncio.Queue[HttpRequest]()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self._serving = asyncio.create_task(self._serve())

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - gone is gone
        self._serving.cancel()

    def data_received(self, data: bytes) -> None:
        try:
            with suppress(httptools.HttpParserUpgrade):  # to a protocol that is not spoken: answered like others
                self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.write(_INVALID)
            self._transport.close()

    def on_message_begin(self) -> None:
        self._url, self._body = b"", bytearray()
        self._headers: dict[str, str] = {}

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self._headers.get("expect", "").lower() == "100-continue":
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        if len(self._body) <= MOST_BYTES:
            self._body += body

    def on_message_complete(self) -> None:
        request = HttpRequest(
            method=self._parser.get_method().decode(),
            path=httptools.parse_url(self._url).path.decode(),
            headers=self._headers,
            body=bytes(self._body),
            keeps_open=self._parser.should_keep_alive(),
        )
        self._requests.put_nowait(request)

    async def _serve(self) -> None:
        keeps_open = True
        try:
            while keeps_open:
                request = await self._requests.get()
                keeps_open = request.keeps_open
                await self._send(await self._answer(request), request)
        finally:
            self._transport.close()

    async def _send(self, response: HttpResponse, request: HttpRequest) -> None:
        pieces, write = response.pieces, self._transport.write
        length = {"content-length": len(response.body)} if pieces is None else {"transfer-encoding": "chunked"}
        end = {} if request.keeps_open else {"connection": "close"}
        fields = {"content-type": response.content_type, **response.headers, **length, **end}
        lines = [f"{name}: {value}\r\n" for name, value in fields.items()]
        phrase = HTTPStatus(response.status).phrase
        write(f"HTTP/1.1 {response.status} {phrase}\r\n{''.join(lines)}\r\n".encode("latin-1"))
        if pieces is None:
            write(b"" if request.method == "HEAD" else response.body)
            return
        async with aclosing(pieces):
            async for piece in pieces:
                write(b"%x\r\n%b\r\n" % (len(piece), piece))
        write(b"0\r\n\r\n")
