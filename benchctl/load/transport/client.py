"""The streaming client: sends requests over connections of its own and keeps what comes back, each read stamped.

No task stands behind a stream. The receiver tells of the end of an answer from within its loop over the sockets,
and who drives the load sends the next request from there: the system call that frees a slot of a closed loop is
followed by the one that fills it. What came is decoded later, by who drives the load.

httpx carries what is not measured, and the streams of servers that speak TLS.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from types import TracebackType
from typing import Final, Self

from benchctl.load.tally import Activity
from benchctl.load.transport.connections import Connections
from benchctl.load.transport.control import STREAM_HEADERS, carry_by_httpx, control_client
from benchctl.load.transport.exchange import Call, Exchange
from benchctl.load.transport.failures import CANCELLED, connect_error, lost_error
from benchctl.load.transport.kernel_clock import KernelClock
from benchctl.load.transport.limits import total_reached
from benchctl.load.transport.receiver import Connection, Receiver
from benchctl.load.transport.redirects import MOST_REDIRECTS, Redirect, redirect_of
from benchctl.load.transport.request_head import RequestWriter
from benchctl.load.transport.watch import Watch
from benchctl.profile.model import Timeouts
from benchctl.records.request import RequestError
from benchctl.units import NS_PER_MS

_HTTP_PORT: Final = 80
_IDLE_NS: Final = 10 * NS_PER_MS
"""No server closes a new connection as idle sooner than this."""


class StreamClient:
    """Speaks HTTP to one server. ``control`` is for everything that is not measured."""

    def __init__(self, base_url: str, timeouts: Timeouts) -> None:
        self._timeouts = timeouts
        self._open: set[Exchange] = set()
        """What is laid ready or on its way."""
        self._last_end_ns = 0
        """When something last came of a request that has ended; 0 before there is one."""
        self.control = control_client(base_url, timeouts)
        self._url = self.control.base_url
        self._writer = RequestWriter(self._url, STREAM_HEADERS)
        self.clock = KernelClock()
        self.on_ready: Callable[[], None] = lambda: None
        """Called when the connection of a request that was laid ready has opened."""

    async def __aenter__(self) -> Self:
        await self.control.__aenter__()
        self.receiver = Receiver(on_end=self._take_end, on_look=self._look_soon, on_open=self._take_open)
        self.connections = Connections(self.receiver, self._url.host, self._url.port or _HTTP_PORT)
        self._elsewhere: dict[tuple[str, int], Connections] = {}
        watch = Watch(self._open, self._timeouts, self.receiver.held, self.stop)
        self._watching = asyncio.create_task(watch.keep())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        async with AsyncExitStack() as closing:  # all of it, also when the watch has failed
            closing.push_async_callback(self.control.__aexit__, kind, error, trace)
            closing.callback(self.receiver.close)
            self.stop_all(CANCELLED)
            self._watching.cancel()
            with suppress(asyncio.CancelledError):
                await self._watching

    def activity(self) -> Activity:
        """What is open now, and when something last came of it."""
        num_open, oldest_ns, heard_ns = 0, 0, self._last_end_ns
        for exchange in self._open:  # asked for ten times per second: without a call per stream
            if exchange.sent_ns:
                num_open += 1
                oldest_ns = min(oldest_ns or exchange.sent_ns, exchange.sent_ns)
                heard_ns = max(heard_ns, exchange.reads[-1][0] if exchange.reads else exchange.heard_ns)
        return Activity(num_open=num_open, oldest_sent_ns=oldest_ns, heard_ns=heard_ns)

    def begin(self, call: Call, on_end: Callable[[Exchange], None]) -> Exchange:
        """An exchange for ``call``, to be launched. ``on_end`` hears of its end, before any of it is decoded."""
        return Exchange(
            call=call,
            wire=self._writer.post(call.path, call.headers, call.body),
            timeouts=self._timeouts,
            clock=self.clock,
            held=self.receiver.held,
            on_end=on_end,
        )

    def lay(self, exchange: Exchange) -> None:
        """Have a connection ready for it, so that its launch is a single system call."""
        self._open.add(exchange)
        if self._url.scheme != "http":
            return
        self._connect(exchange, self.connections)

    def launch(self, exchange: Exchange) -> None:
        """Let it leave: now where a connection is open, else as soon as one is. One that has failed stays."""
        if exchange.has_ended:
            return
        exchange.is_launched = True
        if exchange not in self._open:
            self.lay(exchange)
        if self._url.scheme != "http":
            exchange.task = asyncio.create_task(self._carry_by_httpx(exchange))
            return
        connection = exchange.connection
        if connection is not None and not connection.is_connecting:
            exchange.sent_ns = self.receiver.send(connection, exchange.wire)

    def is_ready(self, exchange: Exchange) -> bool:
        """Whether its launch would send it now, or it has failed."""
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
        """End all that is laid ready or on its way."""
        for exchange in tuple(self._open):
            self.stop(exchange, failure)

    def take_in(self) -> None:
        """Take in what has arrived, in the middle of something that would keep it waiting."""
        self.receiver.read_ready()

    async def exchange(self, call: Call, scheduled_ns: int) -> Exchange:
        """Send ``call`` as soon as its connection is open, and take in the stream."""
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        exchange = self.begin(call, lambda _: None if ended.done() else ended.set_result(None))
        exchange.scheduled_ns = scheduled_ns
        self.launch(exchange)
        try:
            await ended
        except asyncio.CancelledError:
            self.stop(exchange, CANCELLED)
            raise
        return exchange

    def _connect(self, exchange: Exchange, connections: Connections, *, is_fresh: bool = False) -> None:
        """Assign an open connection or one about to open; where there is none yet, as soon as there can be."""
        connection = None if is_fresh else connections.take()
        if connection is None:
            exchange.laid_ns = time.monotonic_ns()
            if not connections.is_reached:
                exchange.task = asyncio.create_task(self._connect_first(exchange, connections))
                return
            try:
                connection = connections.open()
            except OSError as error:
                # Told later: the next request may fail the same way, and must not do so from within this one.
                asyncio.get_running_loop().call_soon(self._fail, exchange, connect_error(error))
                return
        exchange.connection = connection
        exchange.connected_ns = exchange.connected_ns or connection.connected_ns
        connection.serve(exchange)

    async def _connect_first(self, exchange: Exchange, connections: Connections) -> None:
        """Connect to a server whose address has to be found first, which may take a moment."""
        try:
            await connections.reach()
        except OSError as error:
            self._fail(exchange, connect_error(error))
            return
        exchange.task = None
        if exchange in self._open:
            self._connect(exchange, connections)
            self._go_on(exchange)

    def _go_on(self, exchange: Exchange) -> None:
        """Send it where its connection is open already; else that will be told."""
        connection = exchange.connection
        if connection is not None and not connection.is_connecting:
            self._take_open(connection)

    def _take_open(self, connection: Connection) -> None:
        """A connection is open now: who waits for it leaves."""
        exchange = connection.exchange
        if exchange is None:
            return
        exchange.connected_ns = exchange.connected_ns or connection.connected_ns
        if exchange.is_launched:
            sent_ns = self.receiver.send(connection, exchange.wire)
            exchange.sent_ns = exchange.sent_ns if exchange.num_redirects else sent_ns
        self.on_ready()

    def _take_end(self, connection: Connection) -> None:
        """An answer is whole, or its connection has ended. Called from within the reading of sockets."""
        exchange = connection.exchange
        if exchange is None:
            self.connections.lose(connection)
        elif not exchange.is_launched and not connection.has_failed_to_connect:
            self._lay_again(exchange, connection)
        elif connection.has_failed_to_connect and connection.error is not None:
            self._fail(exchange, exchange.failure or connect_error(connection.error))
        elif connection.is_good and connection.error is None:
            self._part(exchange, connection)
            self._finish(exchange)
        elif _was_idle(exchange, connection) and not _has_bytes(exchange) and not exchange.is_resent:
            self._send_again(exchange, connection)
        else:
            asyncio.get_running_loop().call_soon(self._settle, exchange, connection)

    def _look_soon(self, connection: Connection) -> None:
        """Something came after which the answer may be whole: see, after the other sockets were read."""
        exchange = connection.exchange
        if exchange is not None and not exchange.is_looked_at:
            exchange.is_looked_at = True
            asyncio.get_running_loop().call_soon(self._look, exchange, connection)

    def _look(self, exchange: Exchange, connection: Connection) -> None:
        exchange.is_looked_at = False
        if exchange.connection is connection and exchange in self._open and exchange.is_over():
            self._settle(exchange, connection)

    def _settle(self, exchange: Exchange, connection: Connection) -> None:
        """The end of an answer that is no plain stream: it may send the request on to another place."""
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
        """Send the request on, to where the server says that it is answered."""
        exchange.num_redirects += 1
        if exchange.num_redirects > MOST_REDIRECTS or redirect.url.scheme != "http":
            self._fail(exchange, redirect.refusal(exchange.num_redirects))
            return
        exchange.begin_answer()
        exchange.url = redirect.url
        exchange.wire = redirect.wire(self._writer, exchange.call)
        host, port = redirect.url.host, redirect.url.port or _HTTP_PORT
        if (host, port) not in self._elsewhere:
            self._elsewhere[host, port] = Connections(self.receiver, host, port)
        exchange.connection = None
        self._connect(exchange, self._elsewhere[host, port])
        self._go_on(exchange)

    def _lay_again(self, exchange: Exchange, connection: Connection) -> None:
        """The server closed the connection while the request on it was not due yet: have another one ready."""
        connection.rest()
        exchange.connection, exchange.connected_ns = None, 0
        exchange.begin_answer()
        self._connect(exchange, self.connections, is_fresh=True)

    def _send_again(self, exchange: Exchange, connection: Connection) -> None:
        """The server closed the connection, idle until then, before it read the request: use another one."""
        exchange.failure = lost_error(connection.error, exchange)  # stands if none can be opened
        exchange.is_resent, exchange.connection, exchange.connected_ns = True, None, 0
        self.connections.lose(connection)
        exchange.begin_answer()
        connection.rest()
        self._connect(exchange, self.connections, is_fresh=True)
        if exchange in self._open and exchange.connection is not None:
            exchange.failure = None
            self._go_on(exchange)

    def _part(self, exchange: Exchange, connection: Connection) -> None:
        """The connection is free for the next request, before anybody is told that there is room for one."""
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
        # Limits are looked at now and then; what has ended too late in between was too late all the same.
        exchange.end(total_reached(exchange, self._timeouts, exchange.last_ns))
        self._last_end_ns = max(self._last_end_ns, exchange.last_ns)
        exchange.on_end(exchange)

    async def _carry_by_httpx(self, exchange: Exchange) -> None:
        failure = await carry_by_httpx(self.control, exchange, self._timeouts)
        exchange.failure = exchange.failure or failure
        self._finish(exchange)


def _was_idle(exchange: Exchange, connection: Connection) -> bool:
    """Whether the connection lay idle before the request went out on it: a server may close one at any time."""
    return connection.num_answers > 0 or exchange.sent_ns - connection.connected_ns > _IDLE_NS


def _has_bytes(exchange: Exchange) -> bool:
    return exchange.heard_ns > 0 or any(data for _, _, data in exchange.reads)
