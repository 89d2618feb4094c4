"""Documents that a server states of itself, fetched within bounds of size and of time.

httpx reads and decompresses whole bodies, whatever their size. All that benchctl asks a server beside the measured
streams goes through here. Every failure is an ``httpx.HTTPError``.
"""

import asyncio
import time
import zlib
from collections.abc import Mapping
from typing import Any, Final

import httpx
import msgspec

from benchctl.untrusted.limits import MESSAGE_CHARS, PAGE_BYTES
from benchctl.untrusted.reading import DECODING_ERRORS, decoding_problem
from benchctl.untrusted.text import visible_line

_LIMIT_S: Final = 60.0
"""Time for a whole document."""
_PLAIN_CODINGS: Final = frozenset({"", "identity"})
_ZLIB_CODINGS: Final = frozenset({"gzip", "x-gzip", "deflate"})
_ZLIB_OR_GZIP: Final = zlib.MAX_WBITS | 32
_ABOUT_BODIES: Final = frozenset({"content-encoding", "content-length", "transfer-encoding"})
_SHOWN_CHARS: Final = 60
_UNRECORDABLE: Final = "(a value that no record holds)"


async def fetch(
    client: httpx.AsyncClient,
    method: str,
    path: str,
    *,
    content: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    limit_s: float | None = None,
    max_bytes: int = PAGE_BYTES,
) -> httpx.Response:
    """The answer to a request, decompressed, of at most ``max_bytes`` and within ``limit_s``.

    None: the client's own limits for each wait, and a minute for all. Raises httpx.HTTPError when the answer is
    larger or takes longer, and as httpx does; OSError as the transport does.
    """
    waits = httpx.USE_CLIENT_DEFAULT if limit_s is None else limit_s
    request = client.build_request(method, path, content=content, headers=headers, timeout=waits)
    limit_s = _LIMIT_S if limit_s is None else limit_s
    try:
        async with asyncio.timeout(limit_s):
            response = await client.send(request, stream=True)
            body = _Body(response, max_bytes)
            try:
                async for data in response.aiter_raw():
                    body.take(data)
            finally:
                await response.aclose()
    except TimeoutError:
        raise _lateness(request, limit_s) from None
    return body.response()


def fetch_now(client: httpx.Client, url: str, *, limit_s: float, max_bytes: int) -> httpx.Response:
    """The same as ``fetch`` for a GET that blocks."""
    request = client.build_request("GET", url, headers={"accept-encoding": "identity"})
    deadline_s = time.monotonic() + limit_s
    response = client.send(request, stream=True)
    body = _Body(response, max_bytes)
    try:
        for data in response.iter_raw():
            body.take(data)
            if time.monotonic() > deadline_s:
                raise _lateness(request, limit_s)
    finally:
        response.close()
    return body.response()


def json_object(response: httpx.Response) -> dict[str, Any]:
    """The JSON object of an answer with a status of success. Raises httpx.HTTPError for any other."""
    response.raise_for_status()
    try:
        return msgspec.json.decode(response.content, type=dict[str, Any])
    except DECODING_ERRORS as error:
        message = f"{response.request.url} does not answer with a JSON object: {decoding_problem(error)}"
        raise httpx.DecodingError(message, request=response.request) from None


async def fetch_json(
    client: httpx.AsyncClient, path: str, headers: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The JSON object at ``path``. Raises httpx.HTTPError where there is none."""
    return json_object(await fetch(client, "GET", path, headers=headers))


def recordable(value: object) -> object:
    """A value that a server states of itself as a record can hold it: long texts and lists are cut to a text."""
    if isinstance(value, str):
        return value[:MESSAGE_CHARS]
    try:
        content = msgspec.json.encode(value)
    except (ValueError, OverflowError, RecursionError):  # a number of thousands of digits, or lists without end
        return _UNRECORDABLE
    return value if len(content) <= MESSAGE_CHARS else content[:MESSAGE_CHARS].decode(errors="replace")


class _Body:
    """The body of an answer while it is read."""

    def __init__(self, response: httpx.Response, max_bytes: int) -> None:
        self._answer, self._max_bytes = response, max_bytes
        self._content = bytearray()
        coding = response.headers.get("content-encoding", "").strip().lower()
        if coding not in _PLAIN_CODINGS | _ZLIB_CODINGS:
            message = f"{response.request.url} answers in the coding {visible_line(coding, _SHOWN_CHARS)}"
            raise httpx.DecodingError(f"{message}, which was not requested", request=response.request)
        self._inflate = zlib.decompressobj(_ZLIB_OR_GZIP) if coding in _ZLIB_CODINGS else None

    def take(self, data: bytes) -> None:
        """Add a part as it came; decompress no more of it than fits."""
        if self._inflate is not None:
            try:
                data = self._inflate.decompress(data, self._max_bytes + 1 - len(self._content))
            except zlib.error as error:
                message = f"{self._answer.request.url} answers with damaged compression: {error}"
                raise httpx.DecodingError(message, request=self._answer.request) from error
        self._content += data
        if len(self._content) > self._max_bytes:
            message = f"{self._answer.request.url} answers with more than {self._max_bytes >> 20} MiB"
            raise httpx.RemoteProtocolError(message, request=self._answer.request)

    def response(self) -> httpx.Response:
        """The answer with its whole body."""
        headers = [pair for pair in self._answer.headers.multi_items() if pair[0].lower() not in _ABOUT_BODIES]
        return httpx.Response(
            self._answer.status_code, headers=headers, content=bytes(self._content), request=self._answer.request
        )


def _lateness(request: httpx.Request, limit_s: float) -> httpx.ReadTimeout:
    return httpx.ReadTimeout(f"{request.url} has not answered within {limit_s:g} s", request=request)
