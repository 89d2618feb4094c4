"""Servers that speak TLS: aiohttp below httpx, whose own transport costs more for each part of a stream.

Imported only for an https address: aiohttp takes longer to import than a short load takes. The transport raises
errors of httpx only.
"""

import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from types import UnionType
from typing import Final

import aiohttp
import httpx
from httpx_aiohttp import AiohttpTransport

_CLASSES: Final[tuple[tuple[type[aiohttp.ClientError] | UnionType, type[httpx.TransportError]], ...]] = (
    (aiohttp.ConnectionTimeoutError, httpx.ConnectTimeout),
    (aiohttp.ClientConnectorError, httpx.ConnectError),
    (aiohttp.InvalidURL | aiohttp.NonHttpUrlClientError, httpx.UnsupportedProtocol),
    (aiohttp.ClientResponseError, httpx.RemoteProtocolError),
    (aiohttp.SocketTimeoutError, httpx.ReadTimeout),
)
"""The error of httpx for each of aiohttp, of which the first that fits counts; for all others it is ReadError."""


class TlsTransport(AiohttpTransport):
    """aiohttp, a fresh connection for each request, with errors that say what happened."""

    def __init__(self, context: ssl.SSLContext) -> None:
        def session() -> aiohttp.ClientSession:
            connector = aiohttp.TCPConnector(limit=0, force_close=True, ssl=context)
            return aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())

        super().__init__(verify=context, client=session)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        with _errors_of_httpx():
            response = await super().handle_async_request(request)
        if isinstance(response.stream, httpx.AsyncByteStream):
            response.stream = _Body(response.stream)
        return response


class _Body(httpx.AsyncByteStream):
    """The body of an answer, read and closed with errors of httpx."""

    def __init__(self, stream: httpx.AsyncByteStream) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        with _errors_of_httpx():
            async for data in self._stream:
                yield data

    async def aclose(self) -> None:
        with _errors_of_httpx():
            await self._stream.aclose()


@contextmanager
def _errors_of_httpx() -> Iterator[None]:
    """Raise by what lies underneath: the adapter lets some errors of aiohttp pass and calls others timeouts."""
    try:
        yield
    except (httpx.TransportError, aiohttp.ClientError) as error:
        cause: BaseException = error
        while not isinstance(cause, aiohttp.ClientError) and cause.__cause__ is not None:
            cause = cause.__cause__
        if not isinstance(cause, aiohttp.ClientError):
            raise
        kind = next((ours for theirs, ours in _CLASSES if isinstance(cause, theirs)), httpx.ReadError)
        raise kind(f"{type(cause).__name__}: {cause}") from (cause.__cause__ or cause)
