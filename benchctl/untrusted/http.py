"""Documents that a server states of itself, fetched within bounds of size and of time.

httpx reads whole bodies, whatever their size. All that benchctl asks a server beside the measured streams goes
through here. Every failure is an ``httpx.HTTPError``.
"""

import asyncio
from collections.abc import Mapping
from typing import Any, Final

import httpx
import msgspec

from benchctl.untrusted import MESSAGE_CHARS, PAGE_BYTES
from benchctl.untrusted.files import DECODING_ERRORS, decoding_problem
from benchctl.untrusted.text import visible_line

_LIMIT_S: Final = 60.0
"""Time for a whole document."""
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
    body = bytearray()
    try:
        async with asyncio.timeout(limit_s):
            response = await client.send(request, stream=True)
            try:
                coding = response.headers.get("content-encoding", "").strip().lower()
                # Those of which a piece of the stream, of 64 KiB, cannot become more than 64 MiB
                if coding not in {"", "identity", "gzip", "deflate"}:
                    raise httpx.DecodingError(
                        f"{request.url} answers in the coding {visible_line(coding, _SHOWN_CHARS)}, which was not "
                        "requested",
                        request=request,
                    )
                async for data in response.aiter_bytes():
                    body += data
                    if len(body) > max_bytes:
                        raise httpx.RemoteProtocolError(
                            f"{request.url} answers with more than {max_bytes >> 20} MiB", request=request
                        )
            finally:
                await response.aclose()
    except TimeoutError:
        raise httpx.ReadTimeout(f"{request.url} has not answered within {limit_s:g} s", request=request) from None
    of_content = [
        pair
        for pair in response.headers.multi_items()
        if pair[0].lower() not in {"content-encoding", "content-length", "transfer-encoding"}
    ]
    return httpx.Response(response.status_code, headers=of_content, content=bytes(body), request=request)


def json_object(response: httpx.Response) -> dict[str, Any]:
    """The JSON object of an answer with a status of success. Raises httpx.HTTPError for any other."""
    response.raise_for_status()
    try:
        return msgspec.json.decode(response.content, type=dict[str, Any])
    except DECODING_ERRORS as error:
        raise httpx.DecodingError(
            f"{response.request.url} does not answer with a JSON object: {decoding_problem(error)}",
            request=response.request,
        ) from None


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
