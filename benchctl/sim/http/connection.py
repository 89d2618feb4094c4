"""HTTP/1.1 as far as a simulated server speaks it: requests one after another, answers whole or in pieces.

Not by a web framework, which takes longer to import than a short run lasts.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from http import HTTPStatus
from types import MappingProxyType
from typing import Final, TypeAlias, cast

import httptools
import msgspec

log = logging.getLogger("benchctl.sim")

_MOST_BYTES: Final = 64 << 20
"""Size of the body of a request."""
_NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})


class HttpRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request; its headers have names in lower case."""

    method: str
    path: str
    """Without a query."""
    headers: Mapping[str, str]
    body: bytes
    keeps_alive: bool
    """More requests may come over its connection."""
    is_old: bool
    """It is of HTTP/1.0, which knows no chunks."""


class HttpResponse(msgspec.Struct, frozen=True, kw_only=True):
    """An answer: ``body``, or where there are ``pieces`` those as they come."""

    status: int = 200
    content_type: str = "application/json"
    headers: Mapping[str, str] = _NO_HEADERS
    body: bytes = b""
    pieces: AsyncGenerator[bytes, None] | None = None


Answer: TypeAlias = Callable[[HttpRequest], Awaitable[HttpResponse]]


class Connection(asyncio.Protocol):
    """A connection of a client, whose end cancels the answer that is on its way."""

    def __init__(self, answer: Answer) -> None:
        self._answer: Final = answer
        self._parser: Final = httptools.HttpRequestParser(self)
        self._requests: Final = asyncio.Queue[HttpRequest]()
        self._is_writable: Final = asyncio.Event()
        self._is_writable.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._serving = asyncio.create_task(self._serve())

    def connection_lost(self, _error: Exception | None) -> None:
        self._serving.cancel()

    def pause_writing(self) -> None:
        self._is_writable.clear()

    def resume_writing(self) -> None:
        self._is_writable.set()

    def data_received(self, data: bytes) -> None:
        try:
            with suppress(httptools.HttpParserUpgrade):  # a wish for another protocol, which may be ignored
                self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.write(_head(HttpResponse(status=400), "Content-Length: 0", "Connection: close"))
            self._transport.close()

    def on_message_begin(self) -> None:
        self._url, self._headers, self._body = b"", dict[str, str](), bytearray()

    def on_url(self, part: bytes) -> None:
        self._url += part

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self._headers.get("expect", "").lower() == "100-continue":
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, part: bytes) -> None:
        self._body += part
        if len(self._body) > _MOST_BYTES:
            raise ValueError("the body is too large")

    def on_message_complete(self) -> None:
        self._requests.put_nowait(
            HttpRequest(
                method=self._parser.get_method().decode(),
                path=self._url.partition(b"?")[0].decode("latin-1"),
                headers=self._headers,
                body=bytes(self._body),
                keeps_alive=self._parser.should_keep_alive(),
                is_old=self._parser.get_http_version() == "1.0",
            )
        )

    async def _serve(self) -> None:
        """Answer the requests one after another."""
        is_last = False
        while not is_last:
            request = await self._requests.get()
            is_last = not request.keeps_alive
            try:
                await self._send(await self._answer(request), request)
            except Exception:
                log.exception("error at %s %s", request.method, request.path)
                is_last = True
        self._transport.close()

    async def _send(self, response: HttpResponse, request: HttpRequest) -> None:
        write = self._transport.write
        ends = () if request.keeps_alive else ("Connection: close",)
        if response.pieces is None:
            head = _head(response, f"Content-Length: {len(response.body)}", *ends)
            write(head if request.method == "HEAD" else head + response.body)
            return
        write(_head(response, *ends) if request.is_old else _head(response, "Transfer-Encoding: chunked", *ends))
        async with aclosing(response.pieces) as pieces:
            async for piece in pieces:
                write(piece if request.is_old else b"%x\r\n%b\r\n" % (len(piece), piece))
                await self._is_writable.wait()
        if not request.is_old:
            write(b"0\r\n\r\n")


def _head(response: HttpResponse, *lines: str) -> bytes:
    headers = {"Content-Type": response.content_type, **response.headers}
    status = HTTPStatus(response.status)
    fields = (f"{name}: {value}" for name, value in headers.items())
    return "\r\n".join([f"HTTP/1.1 {status} {status.phrase}", *fields, *lines, "\r\n"]).encode("latin-1")
