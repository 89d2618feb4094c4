"""One request and its answer over ASGI, by which uvicorn serves them.

Not by a larger web framework, which takes longer to import than a short run lasts.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import msgspec
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

log = logging.getLogger("benchctl.sim")

MOST_BYTES: Final = 64 << 20
"""Size of the body of a request; of a larger one only a part is read."""
_KEEP_ALIVE_S: Final = 3600
_NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})


class HttpRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request; its headers have names in lower case."""

    method: str
    path: str
    """Without a query."""
    headers: Mapping[str, str]
    body: bytes


class HttpResponse(msgspec.Struct, frozen=True, kw_only=True):
    """An answer: ``body``, or where there are ``pieces`` those as they come."""

    status: int = 200
    content_type: str = "application/json"
    headers: Mapping[str, str] = _NO_HEADERS
    body: bytes = b""
    pieces: AsyncGenerator[bytes, None] | None = None


Answer: TypeAlias = Callable[[HttpRequest], Awaitable[HttpResponse]]
_Message: TypeAlias = dict[str, Any]
_Receive: TypeAlias = Callable[[], Awaitable[_Message]]
_Send: TypeAlias = Callable[[_Message], Awaitable[None]]


def connections(answer: Answer) -> Callable[[], asyncio.Protocol]:
    """The factory of protocols, for ``loop.create_server``, each of which serves a connection by ``answer``."""

    async def application(scope: Mapping[str, Any], receive: _Receive, send: _Send) -> None:
        """Answer a request until its client has left."""
        body = await _body(receive)
        if body is None:
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        request = HttpRequest(method=scope["method"], path=scope["path"], headers=headers, body=body)
        answering = asyncio.create_task(_reply(answer, request, send))
        leaving = asyncio.ensure_future(receive())
        await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        answering.cancel()
        await asyncio.wait((answering,))

    # Errors of an answer are in our own log, and at the end clients are left without an answer
    config = Config(
        application, interface="asgi3", lifespan="off", ws="none", proxy_headers=False, log_config=None,
        log_level="critical", access_log=False, timeout_keep_alive=_KEEP_ALIVE_S,
    )  # fmt: skip
    config.load()
    state = ServerState()
    return lambda: HttpToolsProtocol(config, state, {})


async def _body(receive: _Receive) -> bytes | None:
    """The body of a request; None if its client left."""
    body, has_more = bytearray(), True
    while has_more and len(body) <= MOST_BYTES:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message["body"]
        has_more = message["more_body"]
    return bytes(body)


async def _reply(answer: Answer, request: HttpRequest, send: _Send) -> None:
    try:
        response = await answer(request)
        headers = {"content-type": response.content_type, **response.headers}
        if response.pieces is None:
            headers["content-length"] = str(len(response.body))
        fields = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": response.status, "headers": fields})
        if response.pieces is not None:
            async with aclosing(response.pieces) as pieces:
                async for piece in pieces:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": response.body})
    except Exception:
        log.exception("error at %s %s", request.method, request.path)
