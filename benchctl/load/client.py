"""The streaming client: sends requests over connections of its own and keeps the answers, each read with its time.

A stream needs no task. The receiver reports the end of an answer from within its loop over the sockets, and the
driver of the load sends the next request from there, one system call later. Answers are decoded afterwards.

httpx carries requests that are not measured, and the streams of servers that speak TLS.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from types import TracebackType
from typing import Final, Self

from benchctl.load.clocks import KernelClock
from benchctl.load.control import STREAM_HEADERS, carry_by_httpx, control_client
from benchctl.load.exchange import Exchange
from benchctl.load.failures import CANCELLED, connect_error, lost_error
from benchctl.load.limits import total_reached
from benchctl.load.redirects import MOST_REDIRECTS, Redirect, redirect_of
from benchctl.load.request_head import RequestWriter
from benchctl.load.sockets import MOST_HELD_BYTES, Connection, Connections, Receiver
from benchctl.load.tally import Activity
from benchctl.load.watch import Watch
from benchctl.profile.sections import Timeouts
from benchctl.records.record import Call, RequestError
from benchctl.units import NS_PER_MS

_HTTP_PORT: Final = 80
_IDLE_NS: Final = 10 * NS_PER_MS
"""No server closes a new connection as idle sooner."""


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
        self._writer = RequestWriter(self._url, STREAM_HEADERS)
        self.clock = KernelClock()
        self.on_ready: Callable[[], None] = lambda: None
        """Called when the connection of a prepared request has opened."""

    async def __aenter__(self) -> Self:
        await self.control.__aenter__()
        self.receiver = Receiver(on_end=self._on_end, on_possible_end=self._check_soon, on_open=self._on_open)
        self.connections = Connections(self.receiver, self._url.host, self._url.port or _HTTP_PORT)
        self._elsewhere: dict[tuple[str, int], Connections] = {}
        watch = Watch(self._open, self._timeouts, self.receiver.held, self.stop)
        self.receiver.on_full = watch.decode_now
        self._watching = asyncio.create_task(watch.run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        async with AsyncExitStack() as closing:  # everything, also when the watch has failed
            closing.push_async_callback(self.control.__aexit__, kind, error, trace)
            closing.callback(self.receiver.close)
            self.stop_all(CANCELLED)
            self._watching.cancel()
            with suppress(asyncio.CancelledError):
                await self._watching

    def activity(self) -> Activity:
        """The open requests, and when something last arrived for one of them."""
        num_open, oldest_ns, last_arrival_ns = 0, 0, self._last_end_ns
        for exchange in self._open:  # ten times per second: without a call per stream
            if exchange.sent_ns:
                num_open += 1
                oldest_ns = min(oldest_ns or exchange.sent_ns, exchange.sent_ns)
                last_arrival_ns = max(
                    last_arrival_ns, exchange.reads[-1][0] if exchange.reads else exchange.last_arrival_ns
                )
        return Activity(num_open=num_open, oldest_sent_ns=oldest_ns, last_arrival_ns=last_arrival_ns)

    def begin(self, call: Call, on_end: Callable[[Exchange], None]) -> Exchange:
        """An exchange for ``call``, to be launched. ``on_end`` is called at its end, before any of it is
        decoded.
        """
        return Exchange(
            call=call,
            wire=self._writer.post(call.path, call.headers, call.body),
            timeouts=self._timeouts,
            clock=self.clock,
            held=self.receiver.held,
            on_end=on_end,
        )

    def prepare(self, exchange: Exchange) -> None:
        """Assign a connection to it, so that its launch is a single system call."""
        self._open.add(exchange)
        if self._url.scheme != "http":
            return
        self._connect(exchange, self.connections)

    def launch(self, exchange: Exchange) -> None:
        """Send it: now if its connection is open, else as soon as it is. No effect on one that has failed."""
        if exchange.has_ended:
            return
        exchange.is_launched = True
        if exchange not in self._open:
            self.prepare(exchange)
        if self._url.scheme != "http":
            exchange.task = asyncio.create_task(self._carry_by_httpx(exchange))
            return
        connection = exchange.connection
        if connection is not None and not connection.is_connecting:
            exchange.sent_ns = self.receiver.send(connection, exchange.wire)

    def is_ready(self, exchange: Exchange) -> bool:
        """True when its launch would send it at once, or it has failed."""
        if exchange not in self._open or self._url.scheme != "http":
            return True
        return exchange.connection is not None and not exchange.connection.is_connecting

    def stop(self, exchange: Exchange, failure: RequestError) -> None:
        """End it at once; no effect on one that has ended."""
        if exchange not in self._open:
            return
        exchange.failure = exchange.failure or failure
        if exchange.task is not None:
            exchange.task.cancel()
        if exchange.connection is not None:
            self.receiver.drop(exchange.connection)
        self._finish(exchange)

    def stop_all(self, failure: RequestError) -> None:
        for exchange in tuple(self._open):
            self.stop(exchange, failure)

    def _connect(self, exchange: Exchange, connections: Connections, *, is_fresh: bool = False) -> None:
        """Assign an open connection or one about to open; with an unknown address, do so once it is found."""
        connection = None if is_fresh else connections.take()
        if connection is None:
            exchange.connecting_ns = time.monotonic_ns()
            if not connections.has_address:
                exchange.task = asyncio.create_task(self._connect_first(exchange, connections))
                return
            try:
                connection = connections.open()
            except OSError as error:
                # Later: the next request may fail the same way, and must not do so from within this one.
                asyncio.get_running_loop().call_soon(self._fail, exchange, connect_error(error))
                return
        exchange.connection = connection
        exchange.connected_ns = exchange.connected_ns or connection.connected_ns
        connection.serve(exchange)

    async def _connect_first(self, exchange: Exchange, connections: Connections) -> None:
        try:
            await connections.find_address()
        except OSError as error:
            self._fail(exchange, connect_error(error))
            return
        exchange.task = None
        if exchange in self._open:
            self._connect(exchange, connections)
            self._go_on(exchange)

    def _go_on(self, exchange: Exchange) -> None:
        """Send it if its connection is open already; otherwise the receiver will report that."""
        connection = exchange.connection
        if connection is not None and not connection.is_connecting:
            self._on_open(connection)

    def _on_open(self, connection: Connection) -> None:
        exchange = connection.exchange
        if exchange is None:
            return
        exchange.connected_ns = exchange.connected_ns or connection.connected_ns
        if exchange.is_launched:
            sent_ns = self.receiver.send(connection, exchange.wire)
            exchange.sent_ns = exchange.sent_ns if exchange.num_redirects else sent_ns
        self.on_ready()

    def _on_end(self, connection: Connection) -> None:
        """Handle a complete answer or the end of a connection. Called while sockets are read."""
        exchange = connection.exchange
        if exchange is None:
            self.connections.note_closed(connection)
        elif not exchange.is_launched and not connection.has_failed_to_connect:
            self._reconnect(exchange, connection)
        elif connection.has_failed_to_connect and connection.error is not None:
            self._fail(exchange, exchange.failure or connect_error(connection.error))
        elif connection.is_good and connection.error is None:
            self._release(exchange, connection)
            self._finish(exchange)
        elif _has_met_idle_close(exchange, connection) and not exchange.is_resent:
            self._resend(exchange, connection)
        else:
            asyncio.get_running_loop().call_soon(self._settle, exchange, connection)

    def _check_soon(self, connection: Connection) -> None:
        """Check an answer that may be complete, after the other sockets are read."""
        exchange = connection.exchange
        if exchange is not None and not exchange.is_check_due:
            exchange.is_check_due = True
            asyncio.get_running_loop().call_soon(self._check, exchange, connection)

    def _check(self, exchange: Exchange, connection: Connection) -> None:
        exchange.is_check_due = False
        if exchange.connection is connection and exchange in self._open and exchange.is_over():
            self._settle(exchange, connection)

    def _settle(self, exchange: Exchange, connection: Connection) -> None:
        """End an answer that is not a plain stream: it may redirect the request."""
        if exchange.connection is not connection or exchange not in self._open:
            return
        self.receiver.drop(connection)
        if connection.error is not None:
            exchange.failure = exchange.failure or lost_error(connection.error, exchange)
        exchange.decode_all()
        redirect = None if exchange.failure else redirect_of(exchange.answer, exchange.url or self._url)
        if redirect is not None:
            self._follow(exchange, redirect)
            return
        connection.rest()
        exchange.connection = None
        self._finish(exchange)

    def _follow(self, exchange: Exchange, redirect: Redirect) -> None:
        """Send the request to the address that the server redirects it to."""
        exchange.num_redirects += 1
        if exchange.num_redirects > MOST_REDIRECTS or redirect.url.scheme != "http":
            self._fail(exchange, redirect.refusal(exchange.num_redirects))
            return
        exchange.begin_answer()
        exchange.url = redirect.url
        exchange.wire = redirect.wire(self._writer, exchange.call)
        address = redirect.url.host, redirect.url.port or _HTTP_PORT
        exchange.connection = None
        self._connect(exchange, self._elsewhere.setdefault(address, Connections(self.receiver, *address)))
        self._go_on(exchange)

    def _reconnect(self, exchange: Exchange, connection: Connection) -> None:
        """Replace a connection that the server closed before its request was due."""
        connection.rest()
        exchange.connection, exchange.connected_ns = None, 0
        exchange.begin_answer()
        self._connect(exchange, self.connections, is_fresh=True)

    def _resend(self, exchange: Exchange, connection: Connection) -> None:
        """Send the request on another connection: the server closed the idle one before it read the request."""
        exchange.failure = lost_error(connection.error, exchange)  # remains if none can be opened
        exchange.is_resent, exchange.connection, exchange.connected_ns = True, None, 0
        self.connections.note_closed(connection)
        exchange.begin_answer()
        connection.rest()
        self._connect(exchange, self.connections, is_fresh=True)
        if exchange in self._open and exchange.connection is not None:
            exchange.failure = None
            self._go_on(exchange)

    def _release(self, exchange: Exchange, connection: Connection) -> None:
        """Free the connection for the next request, before ``on_end`` asks for one."""
        exchange.connection = None
        if exchange.url is None:
            self.connections.put_back(connection)
        else:
            connection.rest()
            self.receiver.drop(connection)

    def _fail(self, exchange: Exchange, failure: RequestError) -> None:
        exchange.failure = exchange.failure or failure
        self._finish(exchange)

    def _finish(self, exchange: Exchange) -> None:
        if exchange not in self._open:
            return
        self._open.discard(exchange)
        if exchange.connection is not None:
            exchange.connection.rest()
            exchange.connection = None
        exchange.task = None
        if self.receiver.held.num_bytes > MOST_HELD_BYTES:
            exchange.decode_all()
        # Limits are checked now and then; an answer that ended too late in between was too late all the same.
        exchange.end(total_reached(exchange, self._timeouts, exchange.last_ns))
        self._last_end_ns = max(self._last_end_ns, exchange.last_ns)
        exchange.on_end(exchange)

    async def _carry_by_httpx(self, exchange: Exchange) -> None:
        failure = await carry_by_httpx(self.control, exchange, self._timeouts)
        exchange.failure = exchange.failure or failure
        self._finish(exchange)


def _has_met_idle_close(exchange: Exchange, connection: Connection) -> bool:
    """True when an idle connection was closed without a byte of an answer, which a server may do at any time."""
    was_idle = connection.num_answers > 0 or exchange.sent_ns - connection.connected_ns > _IDLE_NS
    return was_idle and not exchange.last_arrival_ns and not any(data for _, _, data in exchange.reads)
