"""The streaming client: httpx over a transport that stamps each read and understands it after the stream has ended.

One connection per request: some servers close theirs after a stream, and a reused one then fails through no fault
of the load. Nothing is sent twice, unless a server sends it on to another place.
"""

import asyncio
import ssl
import time
from contextlib import AsyncExitStack, suppress
from types import TracebackType
from typing import Final, Self

import aiohttp
import httpx
from httpx_aiohttp import AiohttpTransport

from benchctl.load.exchange import Call, Exchange
from benchctl.load.kernel_clock import KernelClock
from benchctl.load.limits import limit_reached, look_s
from benchctl.load.receiver import Receiver
from benchctl.load.tally import Activity
from benchctl.load.transport import EXCHANGE, StreamTransport
from benchctl.profile.model import Timeouts
from benchctl.records.run import RequestError
from benchctl.units import NS_PER_S

_BREATH_S: Final = 0.05
"""How often it is seen to that what is held stays within bounds."""
_HELD_BYTES: Final = 8 << 20
"""Reads of open streams that are kept before some are understood while the streams go on."""


class StreamClient:
    """Speaks HTTP to one server. ``control`` is for everything that is not measured."""

    def __init__(self, base_url: str, timeouts: Timeouts) -> None:
        self._timeouts = timeouts
        self._open: set[Exchange] = set()
        self._last_end_ns = 0
        """When something last came of a request that has ended; 0 before there is one."""
        self.control = httpx.AsyncClient(
            base_url=base_url,
            transport=_httpx_transport(base_url),
            headers={"accept-encoding": "identity", "user-agent": "benchctl"},
            timeout=httpx.Timeout(timeouts.connect_s),
            trust_env=False,
        )
        self.clock = KernelClock()

    async def __aenter__(self) -> Self:
        await self.control.__aenter__()
        self._receiver = Receiver()
        base_url = str(self.control.base_url)
        self._streams = httpx.AsyncClient(
            transport=StreamTransport(self._receiver),
            mounts={"https://": _httpx_transport(base_url)} if base_url.startswith("https:") else None,
            follow_redirects=True,
            trust_env=False,
        )
        self._watching = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        async with AsyncExitStack() as closing:  # all of it, also when the watch has failed
            closing.push_async_callback(self.control.__aexit__, kind, error, trace)
            closing.callback(self._receiver.close)
            closing.push_async_callback(self._streams.aclose)
            self._watching.cancel()
            with suppress(asyncio.CancelledError):
                await self._watching

    def activity(self) -> Activity:
        """What is open now, and when something last came of it."""
        sent = [exchange for exchange in self._open if exchange.sent_ns]
        return Activity(
            num_open=len(sent),
            oldest_sent_ns=min((exchange.sent_ns for exchange in sent), default=0),
            heard_ns=max(self._last_end_ns, *(exchange.last_ns for exchange in sent), 0),
        )

    def begin(self, call: Call) -> Exchange:
        """An exchange for ``call``, to be passed to ``carry_out``."""
        return Exchange(call=call, timeouts=self._timeouts, clock=self.clock, held=self._receiver.held)

    def breathe(self) -> None:
        """Take in what has arrived, in the middle of something that would keep it waiting."""
        self._receiver.read_ready()

    async def exchange(self, call: Call, scheduled_ns: int) -> Exchange:
        """Send ``call`` as soon as its connection is open, and take in the stream."""
        exchange = self.begin(call)
        carrying = asyncio.create_task(self.carry_out(exchange))
        await exchange.launch.ready()
        exchange.leave(scheduled_ns)
        await carrying
        return exchange

    async def carry_out(self, exchange: Exchange) -> None:
        """Open a connection, wait for the launch, send, take in the stream.

        Trouble is noted in the exchange, never raised: also being cancelled.
        """
        failure: RequestError | None = None
        carrying = asyncio.current_task()
        exchange.stop = carrying.cancel if carrying is not None else None
        self._open.add(exchange)
        try:
            await self._send(exchange)
        except asyncio.CancelledError:
            failure = RequestError(kind="cancelled", message="the load ended before this request did")
            if exchange.failure is not None and carrying is not None:
                carrying.uncancel()  # a limit of its own stopped it, and nobody else
        except (httpx.HTTPError, httpx.InvalidURL, aiohttp.ClientError, OSError) as error:
            failure = transport_error(error, exchange)
        finally:  # also for a fault of our own: whoever waits for the launch must learn of it
            exchange.launch.lay()
            self._open.discard(exchange)
        # Limits are looked at now and then; what has ended too late in between was too late all the same.
        exchange.end(failure or limit_reached(exchange, self._timeouts, exchange.last_ns))
        self._last_end_ns = max(self._last_end_ns, exchange.last_ns)

    async def _send(self, exchange: Exchange) -> None:
        request = self._http_request(exchange)
        if request.url.scheme == "https":
            await self._send_by_httpx(request, exchange)
            return
        response = await self._streams.send(request, stream=True)
        exchange.num_redirects = len(response.history)
        await _closed(response)

    async def _send_by_httpx(self, request: httpx.Request, exchange: Exchange) -> None:
        """The way for what our transport does not speak: reads are stamped as the task gets them."""
        exchange.route = "httpx"
        exchange.launch.lay()
        await exchange.launch.gone()
        exchange.sent_ns = time.monotonic_ns()
        response = await self._streams.send(request, stream=True)
        exchange.num_redirects = len(response.history)
        try:
            # What follows has no framing of its own any more: it ends where the connection does.
            exchange.keep(time.monotonic_ns(), b"HTTP/1.1 %d -\r\n\r\n" % response.status_code)
            async for data in response.aiter_raw():
                exchange.keep(time.monotonic_ns(), data)
        finally:
            await _closed(response)

    def _http_request(self, exchange: Exchange) -> httpx.Request:
        call = exchange.call
        request = self.control.build_request(
            "POST",
            call.path,
            headers={"content-type": "application/json", "accept": "text/event-stream", **call.headers},
            content=call.body,
            timeout=httpx.Timeout(None, connect=self._timeouts.connect_s),
        )
        request.extensions[EXCHANGE] = exchange
        return request

    async def _watch(self) -> None:
        """Stop requests that have reached a limit, and keep what is held within bounds."""
        look_ns = round(look_s(self._timeouts) * NS_PER_S)
        next_look_ns = 0
        while True:
            await asyncio.sleep(_BREATH_S)
            now_ns = time.monotonic_ns()
            if now_ns >= next_look_ns:
                next_look_ns = now_ns + look_ns
                await self._stop_overdue(now_ns)
            await self._digest_some()

    async def _stop_overdue(self, now_ns: int) -> None:
        for exchange in self._open.copy():
            num_reads = len(exchange.reads)
            reached = limit_reached(exchange, self._timeouts, now_ns) if exchange in self._open else None
            if reached is not None and exchange.stop is not None:
                exchange.failure = reached
                exchange.stop()
            if len(exchange.reads) < num_reads:
                await asyncio.sleep(0)  # to understand them took its time: others have their turn

    async def _digest_some(self) -> None:
        """Where streams are so long or so many that their reads fill the memory, understand them as they come."""
        if self._receiver.held.num_bytes <= _HELD_BYTES:
            return
        for exchange in sorted(self._open, key=lambda exchange: len(exchange.reads), reverse=True):
            while len(exchange.reads) > 1 and exchange.failure is None:
                exchange.digest()
                await asyncio.sleep(0)
            if self._receiver.held.num_bytes <= _HELD_BYTES // 2:
                return


def tls_context(base_url: str) -> ssl.SSLContext:
    """A bare one for plain HTTP spares loading the certificates of the world."""
    if base_url.startswith("https:"):
        return ssl.create_default_context()
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def _httpx_transport(base_url: str) -> httpx.AsyncBaseTransport:
    """One of httpx's own."""
    context = tls_context(base_url)

    def session() -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(limit=0, force_close=True, ssl=context)
        return aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())

    return AiohttpTransport(verify=context, client=session)


async def _closed(response: httpx.Response) -> None:
    """Close it, and part it from its stream: each knows the other, and only a search for cycles would free them."""
    await response.aclose()
    for one in (response, *response.history):
        one.stream = httpx.ByteStream(b"")


def transport_error(error: Exception, exchange: Exchange) -> RequestError:
    """The class of what went wrong below HTTP, by the exception underneath: names of transports differ."""
    cause = error
    while isinstance(cause, (httpx.HTTPError, aiohttp.ClientError)) and isinstance(cause.__cause__, Exception):
        cause = cause.__cause__
    message = f"{type(cause).__name__}: {cause}"
    is_connecting = isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout)) or isinstance(
        cause, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
    )
    if is_connecting and isinstance(cause, TimeoutError):
        return RequestError(kind="connect-timeout", message=str(error))
    if is_connecting:
        is_refused = isinstance(cause, ConnectionRefusedError) or "refused" in message.lower()
        return RequestError(kind="connect-refused" if is_refused else "connect-failed", message=message)
    if isinstance(error, (httpx.UnsupportedProtocol, httpx.InvalidURL, httpx.TooManyRedirects)):
        return RequestError(kind="connect-failed", message=message)
    if isinstance(cause, aiohttp.ClientResponseError):
        return RequestError(kind="malformed-http", message=f"the answer is no HTTP: {message}")
    when = "in mid-stream" if exchange.last_ns else "before it answered"
    is_reset = isinstance(cause, (ConnectionResetError, BrokenPipeError))
    verb, kind = ("reset", "reset") if is_reset else ("closed", "early-close")
    return RequestError(kind=kind, message=f"the server {verb} the connection {when}: {message}")
