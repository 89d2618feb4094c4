"""The streaming client: sends requests over connections of its own and keeps the answers, each read with its time.

A stream needs no task. The receiver reports the end of an answer from within its loop over the sockets, and the
schedule of the load sends the next request from there, one system call later. Answers are decoded afterwards.

httpx carries requests that are not measured, and the streams of servers that speak TLS.
"""

import asyncio
import base64
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, suppress
from types import TracebackType
from typing import Self

import httpx

from benchctl.errors import LoadError
from benchctl.load.clocks import KernelClock
from benchctl.load.control import STREAM_HEADERS, carry_by_httpx, connect_error, control_client, lost_error
from benchctl.load.exchange import CANCELLED, Activity, Exchange, Watch
from benchctl.load.sockets import MOST_HELD_BYTES, Connection, Connections, Receiver
from benchctl.profile.sections import Timeouts
from benchctl.records.record import Call, RequestError
from benchctl.units import NS_PER_MS


class RequestWriter:
    """Writes requests for one server as bytes of HTTP/1.1, ahead, so that sending one is a single system call.

    Its address may have a path of its own. Raises LoadError for a header that would break a request apart.
    """

    def __init__(self, base_url: httpx.URL) -> None:
        self._base_url = base_url
        self._headers = dict(STREAM_HEADERS)
        if base_url.userinfo:
            self._headers["authorization"] = f"Basic {base64.b64encode(base_url.userinfo).decode()}"
        self._beginnings: dict[str, bytes] = {}
        """By path: the request line and the header that names the host."""

    def post(self, path: str, headers: Mapping[str, str], body: bytes) -> bytes:
        """A POST of ``body`` to ``path`` below the address of the server."""
        if path not in self._beginnings:
            raw_path = self._base_url.raw_path.rstrip(b"/") + b"/" + httpx.URL(path).raw_path.lstrip(b"/")
            self._beginnings[path] = b"POST %s HTTP/1.1\r\nhost: %s\r\n" % (raw_path, self._base_url.netloc)
        fields = self._headers | {name.lower(): value for name, value in headers.items()}
        lines = "".join([f"{name}: {value}\r\n" for name, value in fields.items()])
        if lines.count("\n") != len(fields) or lines.count("\r") != len(fields) or "\0" in lines:
            name = next(name for name, value in fields.items() if set("\r\n\0") & set(name + value))
            raise LoadError(f"header {name!r} contains a line end; correct its value", cause="bad-header")
        return b"%s%scontent-length: %d\r\n\r\n%s" % (self._beginnings[path], lines.encode(), len(body), body)


class StreamClient:
    """Speaks HTTP to one server. ``control`` is for everything that is not measured."""

    def __init__(self, base_url: str, timeouts: Timeouts) -> None:
        self._timeouts = timeouts
        self._open: set[Exchange] = set()
        """Exchanges that are prepared or on their way."""
        self._last_end_ns = 0
        """The last arrival for a request that has ended; 0 before there is one."""
        self.control = control_client(base_url, timeouts)
        self._url = self.control.base_url
        self._is_plain = self._url.scheme == "http"
        self._writer = RequestWriter(self._url)
        self.clock = KernelClock()
        self.on_ready: Callable[[], None] = lambda: None
        """Called when the connection of a prepared request has opened."""

    async def __aenter__(self) -> Self:
        await self.control.__aenter__()
        self.receiver = Receiver(on_end=self._on_end, on_possible_end=self._check_soon, on_open=self._on_open)
        port = self._url.port or 80
        self.connections = Connections(self.receiver, self._url.host, port, self._timeouts.connect_s)
        watch = Watch(self._open, self._timeouts, self.receiver, self.stop)
        self.receiver.on_full = watch.decode_now
        self._watching = asyncio.create_task(watch.run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        async with AsyncExitStack() as closing:  # everything, also when the watch has failed
            closing.push_async_callback(self.control.__aexit__, kind, error, trace)
            closing.callback(self.receiver.close)
            closing.callback(self.connections.close)
            self.stop_all(CANCELLED)
            self._watching.cancel()
            with suppress(asyncio.CancelledError):
                await self._watching

    def activity(self) -> Activity:
        """The open requests, and when something last arrived for one of them."""
        sent = [exchange for exchange in self._open if exchange.sent_ns]
        return Activity(
            num_open=len(sent),
            oldest_sent_ns=min((exchange.sent_ns for exchange in sent), default=0),
            last_arrival_ns=max([self._last_end_ns, *(exchange.last_ns for exchange in sent)]),
        )

    def begin(self, call: Call, on_end: Callable[[Exchange], None]) -> Exchange:
        """An exchange for ``call``, to be launched. ``on_end`` is called at its end, before any of it is
        decoded.
        """
        return Exchange(
            call=call,
            wire=self._writer.post(call.path, call.headers, call.body),
            timeouts=self._timeouts,
            clock=self.clock,
            receiver=self.receiver,
            on_end=on_end,
        )

    def prepare(self, exchange: Exchange) -> None:
        """Assign a connection to it, so that its launch is a single system call."""
        self._open.add(exchange)
        if self._is_plain:
            self._connect(exchange, self.connections.take())

    def launch(self, exchange: Exchange) -> None:
        """Send it: now if its connection is open, else as soon as it is. No effect on one that has failed."""
        if exchange.has_ended:
            return
        exchange.is_launched = True
        if exchange not in self._open:
            self.prepare(exchange)
        elif exchange.connection is not None:
            self._on_open(exchange.connection)
        if not self._is_plain:
            exchange.task = asyncio.create_task(self._carry_by_httpx(exchange))

    def is_ready(self, exchange: Exchange) -> bool:
        """True when its launch would send it at once, or it has failed."""
        if exchange not in self._open or not self._is_plain:
            return True
        return exchange.connection is not None and exchange.connection.connected_ns > 0

    def stop(self, exchange: Exchange, failure: RequestError) -> None:
        """End it at once; no effect on one that has ended."""
        if exchange not in self._open:
            return
        if exchange.task is not None:
            exchange.task.cancel()
        if exchange.connection is not None:
            self.receiver.drop(exchange.connection)
        self._finish(exchange, failure)

    def stop_all(self, failure: RequestError) -> None:
        for exchange in tuple(self._open):
            self.stop(exchange, failure)

    def _connect(self, exchange: Exchange, connection: Connection | None) -> None:
        """Assign ``connection``, else a new one; with an unknown address, do so once it is found."""
        if connection is None:
            if not self.connections.has_address:
                exchange.task = asyncio.create_task(self._connect_first(exchange))
                return
            exchange.connecting_ns = time.monotonic_ns()
            try:
                connection = self.connections.open()
            except OSError as error:
                # Later: the next request may fail the same way, and must not do so from within this one.
                asyncio.get_running_loop().call_soon(self._finish, exchange, connect_error(error))
                return
        exchange.connection = connection
        connection.serve(exchange)
        self._on_open(connection)

    async def _connect_first(self, exchange: Exchange) -> None:
        try:
            await self.connections.find_address()
        except OSError as error:
            self._finish(exchange, connect_error(error))
            return
        exchange.task = None
        if exchange in self._open:
            self._connect(exchange, self.connections.take())

    def _on_open(self, connection: Connection) -> None:
        """Send the request of a connection that is open, if it is to be sent."""
        exchange = connection.exchange
        if exchange is None or not connection.connected_ns:
            return
        exchange.connected_ns = exchange.connected_ns or connection.connected_ns
        if exchange.is_launched:
            exchange.sent_ns = self.receiver.send(connection, exchange.wire)
        self.on_ready()

    def _on_end(self, connection: Connection) -> None:
        """Handle a complete stream or the end of a connection. Called while sockets are read."""
        exchange = connection.exchange
        if exchange is None:
            self.connections.note_closed(connection)
        elif not connection.connected_ns:
            self._finish(exchange, connect_error(connection.error or OSError("closed")))
        elif not connection.has_ended:
            self._end(exchange, connection, is_kept=connection.is_kept)
        elif not exchange.is_launched:
            self._connect_anew(exchange, connection)
        elif _has_met_idle_close(exchange, connection) and not exchange.is_resent:
            exchange.is_resent = True
            self.connections.note_closed(connection)
            self._connect_anew(exchange, connection)
        else:
            asyncio.get_running_loop().call_soon(self._end_broken, exchange, connection)

    def _check_soon(self, connection: Connection) -> None:
        """Check an answer that may be complete, after the other sockets are read."""
        asyncio.get_running_loop().call_soon(self._check, connection.exchange, connection)

    def _check(self, exchange: Exchange | None, connection: Connection) -> None:
        if exchange is not None and connection.exchange is exchange and exchange.is_over():
            self._end(exchange, connection, is_kept=exchange.answer.is_kept)

    def _end_broken(self, exchange: Exchange, connection: Connection) -> None:
        if connection.exchange is exchange:
            failure = None if connection.error is None else lost_error(connection.error, exchange)
            self._end(exchange, connection, failure, is_kept=False)

    def _end(
        self, exchange: Exchange, connection: Connection, failure: RequestError | None = None, *, is_kept: bool
    ) -> None:
        """End an answer; its connection is free for the next request before ``on_end`` asks for one."""
        exchange.connection = None
        if is_kept and not connection.has_ended:
            self.connections.put_back(connection)
        else:
            connection.serve(None)
            self.receiver.drop(connection)
        self._finish(exchange, failure)

    def _connect_anew(self, exchange: Exchange, connection: Connection) -> None:
        """Replace a connection that the server closed before its request was due, or before it read the request."""
        connection.serve(None)
        exchange.begin_anew()
        self._connect(exchange, None)

    def _finish(self, exchange: Exchange, failure: RequestError | None = None) -> None:
        if exchange not in self._open:
            return
        self._open.discard(exchange)
        if exchange.connection is not None:
            exchange.connection.serve(None)
            exchange.connection = None
        exchange.task = None
        exchange.failure = exchange.failure or failure
        if self.receiver.num_held_bytes > MOST_HELD_BYTES:
            exchange.decode_all()
        exchange.end()
        self._last_end_ns = max(self._last_end_ns, exchange.last_ns)
        exchange.on_end(exchange)

    async def _carry_by_httpx(self, exchange: Exchange) -> None:
        self._finish(exchange, await carry_by_httpx(self.control, exchange, self._timeouts))


def _has_met_idle_close(exchange: Exchange, connection: Connection) -> bool:
    """True when an idle connection was closed without a byte of an answer, which a server may do at any time."""
    # No server closes a new connection as idle sooner
    was_idle = connection.num_answers > 0 or exchange.sent_ns - connection.connected_ns > 10 * NS_PER_MS
    return was_idle and not exchange.last_arrival_ns and not any(data for _, _, data in exchange.reads)
