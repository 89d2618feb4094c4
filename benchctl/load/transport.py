"""The transport under httpx for measured streams: HTTP/1.1 without TLS, one connection per request.

A request passes through it in two halves. First the connection is opened and the bytes to send are laid ready; then
it waits to be launched, so that many requests can leave at one moment. The answer is kept in the exchange, as reads
that the ``Receiver`` has stamped; when it has ended, httpx gets its head, to follow redirects by, and no body.
"""

import asyncio
import socket
import time
from functools import partial
from typing import Final

import httpx

from benchctl.load.answer import head_of
from benchctl.load.exchange import Exchange
from benchctl.load.kernel_clock import stamp_arrivals
from benchctl.load.receiver import Line, Receiver

EXCHANGE: Final = "benchctl.exchange"
"""Key of a request's extensions: the exchange that its reads belong to."""
_HTTP_PORT: Final = 80


class StreamTransport(httpx.AsyncBaseTransport):
    """Sends requests and takes in streams through one ``Receiver``."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._looking_up = asyncio.Lock()
        self._addresses: dict[tuple[str, int], list[tuple[socket.AddressFamily, tuple[object, ...]]]] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        exchange: Exchange = request.extensions[EXCHANGE]
        if request.url.scheme != "http":
            message = f"the server sends requests on to {request.url}; give that address as the server's"
            raise httpx.UnsupportedProtocol(message, request=request)
        await request.aread()
        sock = await self._connected(request)
        exchange.connected_ns = exchange.connected_ns or time.monotonic_ns()
        try:
            return await self._exchanged(request, exchange, sock)
        finally:
            sock.close()

    async def _exchanged(self, request: httpx.Request, exchange: Exchange, sock: socket.socket) -> httpx.Response:
        line = Line(sock, exchange.reads, exchange.look)
        wire = wire_bytes(request)
        try:
            if exchange.sent_ns:  # it was sent on to here, and is due already
                exchange.begin_answer()
                self._receiver.launch(line, wire)
            else:
                exchange.launch.lay(partial(self._leave, exchange, line, wire))
            while not line.is_ended and not exchange.is_over():
                await exchange.looked()
        finally:
            self._receiver.drop(line)
        if line.error is not None:
            raise httpx.ReadError(str(line.error), request=request) from line.error
        status, headers = _head(exchange)
        return httpx.Response(status, headers=headers, request=request)

    def _leave(self, exchange: Exchange, line: Line, wire: bytes) -> None:
        exchange.sent_ns = self._receiver.launch(line, wire)

    async def _connected(self, request: httpx.Request) -> socket.socket:
        """A fresh connection. Raises ConnectTimeout, and ConnectError from the error of the last address tried."""
        limits: dict[str, float | None] = request.extensions.get("timeout", {})
        try:
            async with asyncio.timeout(limits.get("connect")):
                return await self._connected_to_any(request.url.host, request.url.port or _HTTP_PORT)
        except TimeoutError as error:
            message = f"no connection within {limits.get('connect'):g} s (timeouts.connect_s)"
            raise httpx.ConnectTimeout(message, request=request) from error
        except OSError as error:
            raise httpx.ConnectError(str(error), request=request) from error

    async def _connected_to_any(self, host: str, port: int) -> socket.socket:
        loop = asyncio.get_running_loop()
        failure: OSError = OSError(f"{host} has no address")
        for family, address in await self._resolved(host, port):
            sock = socket.socket(family, socket.SOCK_STREAM)
            sock.setblocking(False)
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                stamp_arrivals(sock)
                await loop.sock_connect(sock, address)
            except OSError as error:
                sock.close()
                failure = error
            except BaseException:
                sock.close()
                raise
            else:
                return sock
        raise failure

    async def _resolved(self, host: str, port: int) -> list[tuple[socket.AddressFamily, tuple[object, ...]]]:
        """Addresses of a host, asked for once, also when many connections are opened at one moment."""
        async with self._looking_up:
            known = self._addresses.get((host, port))
            if known is None:
                loop = asyncio.get_running_loop()
                found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                known = self._addresses[host, port] = [(family, address) for family, _, _, _, address in found]
        return known


def wire_bytes(request: httpx.Request) -> bytes:
    """``request`` as HTTP/1.1 puts it on the wire; the connection is for this request alone."""
    lines = [b"%s %s HTTP/1.1" % (request.method.encode(), request.url.raw_path)]
    lines += [b"%s: %s" % header for header in request.headers.raw if header[0].lower() != b"connection"]
    return b"\r\n".join((*lines, b"connection: close", b"", b"")) + request.content


def _head(exchange: Exchange) -> tuple[int, list[tuple[bytes, bytes]]]:
    """Status and headers; 502 stands for what is no HTTP, and who understands the answer will say so."""
    if exchange.answer.status is not None:
        return exchange.answer.status, exchange.answer.headers
    raw = b"".join(data for _, _, data in exchange.reads[:8])
    return head_of(raw) or (httpx.codes.BAD_GATEWAY, [])
