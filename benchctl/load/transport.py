"""The transport under httpx for measured streams: HTTP/1.1 without TLS, one connection per request.

A request passes through it in two halves. First the connection is opened and the bytes to send are laid ready; then
it waits to be launched, so that many requests can leave at one moment. Its answer is handed to httpx when it has
ended, not as it comes: reads are stamped by the ``Receiver`` and kept in the exchange.
"""

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from typing import Final

import httptools
import httpx

from benchctl.load.answer import head_of
from benchctl.load.exchange import Exchange
from benchctl.load.kernel_clock import KernelClock, stamp_arrivals
from benchctl.load.receiver import Line, Receiver

EXCHANGE: Final = "benchctl.exchange"
"""Key of a request's extensions: the exchange that its reads belong to."""
_HTTP_PORT: Final = 80


class StreamTransport(httpx.AsyncBaseTransport):
    """Sends requests and takes in streams through one ``Receiver``."""

    def __init__(self, receiver: Receiver, clock: KernelClock) -> None:
        self._receiver = receiver
        self._clock = clock
        self._addresses: dict[tuple[str, int], list[tuple[socket.AddressFamily, tuple[object, ...]]]] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        exchange = request.extensions.get(EXCHANGE)
        if exchange is None:
            exchange = Exchange(call=None, clock=self._clock, held=self._receiver.held)
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
            if exchange.call is None or exchange.sent_ns:  # nobody launches it, or it was sent on to here
                exchange.begin_answer()
                self._receiver.launch(line, wire)
            else:
                exchange.launch.lay(lambda: self._receiver.launch(line, wire))
            while not line.is_ended and not exchange.is_over():
                await exchange.looked()
        finally:
            self._receiver.drop(line)
        if line.error is not None:
            raise httpx.ReadError(str(line.error), request=request) from line.error
        status, headers = _head(exchange)
        return httpx.Response(status, headers=headers, stream=_Body(exchange), request=request)

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
        """Addresses of a host, asked for once."""
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


class _Body(httpx.AsyncByteStream):
    """The body of an answer that has come in, for those who read it through httpx."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    async def __aiter__(self) -> AsyncIterator[bytes]:
        parser = httptools.HttpResponseParser(collected := _Collected())
        for _, _, data in self._exchange.reads:
            parser.feed_data(data)
            for piece in collected.pieces:
                yield piece
            collected.pieces.clear()


class _Collected:
    """What ``httptools`` calls with the pieces of a body."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    def on_body(self, piece: bytes) -> None:
        self.pieces.append(piece)
