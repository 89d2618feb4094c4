"""Requests without TLS that are not measured, of which most loads send three.

httpx's own transport takes longer to import than these requests take, and hides the errors below it.
"""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import httptools
import httpx

from benchctl.untrusted import PAGE_BYTES, RESPONSE_HEAD_BYTES

_READ_BYTES: Final = 1 << 16
_HTTP_PORT: Final = 80
_OURS: Final = frozenset({b"connection", b"content-length", b"transfer-encoding"})
_BODY_HEADERS: Final = frozenset({b"content-length", b"transfer-encoding"})
"""Without any of them, an answer ends where the connection does."""


class PlainTransport(httpx.AsyncBaseTransport):
    """HTTP/1.1, a fresh connection for each request, whose answer is read as a whole."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        url = request.url
        if url.scheme != "http":
            raise httpx.UnsupportedProtocol(
                f"{url} is not an address of plain HTTP; correct the address of the server"
            )
        limits: Mapping[str, float | None] = request.extensions.get("timeout", {})
        message = _message(request, await request.aread())
        with _errors_as(httpx.ConnectError, httpx.ConnectTimeout):
            async with asyncio.timeout(limits.get("connect")):
                reader, writer = await asyncio.open_connection(url.raw_host.decode(), url.port or _HTTP_PORT)
        try:
            with _errors_as(httpx.ReadError, httpx.ReadTimeout):
                writer.write(message)
                answer = await _answer(reader, limits.get("read"), has_body=request.method != "HEAD")
        finally:
            writer.close()
        return httpx.Response(answer.status, headers=answer.headers, stream=httpx.ByteStream(bytes(answer.body)))


class _Answer:
    """An answer as the parser reports it."""

    def __init__(self, *, has_body: bool) -> None:
        self._has_body = has_body
        self._parser = httptools.HttpResponseParser(self)
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = bytearray()
        self.is_whole = False
        self._num_head_bytes = 0

    def feed(self, data: bytes) -> None:
        """Parse what has arrived; empty at the end of the connection."""
        if not self.status:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > RESPONSE_HEAD_BYTES + _READ_BYTES:
                raise httpx.RemoteProtocolError(f"the head of the answer exceeds {RESPONSE_HEAD_BYTES >> 10} KiB")
        try:
            if data:
                self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            if not self.is_whole:
                raise httpx.RemoteProtocolError(f"the answer is not HTTP: {error}") from error
        if len(self.body) > PAGE_BYTES:
            raise httpx.RemoteProtocolError(f"the body of the answer exceeds {PAGE_BYTES >> 20} MiB")
        if data or self.is_whole:
            return
        if not self.status or any(name.lower() in _BODY_HEADERS for name, _ in self.headers):
            raise httpx.RemoteProtocolError("the server closed the connection before its answer was whole")
        self.is_whole = True

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self.is_whole = not self._has_body

    def on_body(self, data: bytes) -> None:
        if len(self.body) <= PAGE_BYTES:
            self.body += data

    def on_message_complete(self) -> None:
        if self.status < httpx.codes.OK:  # it says that the answer will follow
            self.status, self.headers = 0, []
        else:
            self.is_whole = True


async def _answer(reader: asyncio.StreamReader, limit_s: float | None, *, has_body: bool) -> _Answer:
    """``limit_s`` bounds each wait."""
    answer = _Answer(has_body=has_body)
    while not answer.is_whole:
        async with asyncio.timeout(limit_s):
            data = await reader.read(_READ_BYTES)
        answer.feed(data)
    return answer


def _message(request: httpx.Request, body: bytes) -> bytes:
    lines = [b"%s %s HTTP/1.1" % (request.method.encode(), request.url.raw_path)]
    lines += [b"%s: %s" % header for header in request.headers.raw if header[0].lower() not in _OURS]
    lines.append(b"connection: close")
    if body or request.method in {"POST", "PUT", "PATCH"}:
        lines.append(b"content-length: %d" % len(body))
    return b"\r\n".join((*lines, b"", body))


@contextmanager
def _errors_as(kind: type[httpx.TransportError], timeout: type[httpx.TimeoutException]) -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise timeout(str(error) or "the time is up") from error
    except OSError as error:
        raise kind(str(error)) from error
