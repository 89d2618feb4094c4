"""The streaming client: sends one prepared request and notes when each read arrived.

Bytes are stamped as they arrive and understood after the stream has ended, so that the cost of understanding
them is in no measured time; it is paid in slices between which other streams are served. One connection per
request: some servers close theirs after a stream, and a reused one then fails through no fault of the load.
Nothing is sent twice.
"""

import asyncio
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import aiohttp
import httpx
import msgspec
from httpx_aiohttp import AiohttpTransport

from benchctl.load.stream import CompletionReader, shown
from benchctl.profile.model import Timeouts
from benchctl.records.run import PreparedRequest, RequestError, RequestRecord

_SLICE_BYTES = 16_384
"""Read at one go, a quarter of a millisecond; then other streams have their turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A request ready to be sent, made before the load so that no send waits for it."""

    request: PreparedRequest
    http: httpx.Request
    is_warmup: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class Exchange:
    """What went over the wire for one call: raw reads with their arrival times, not yet understood."""

    call: Call
    scheduled_ns: int
    sent_ns: int = 0
    done_ns: int = 0
    status: int | None = None
    reads: list[tuple[int, bytes]] = field(default_factory=list)
    failure: RequestError | None = None
    """Trouble of the transport; what the stream itself says is found when it is read."""


class StreamClient:
    """Speaks HTTP to one server. ``control`` is for everything that is not measured."""

    def __init__(self, base_url: str, timeouts: Timeouts) -> None:
        self._timeouts = timeouts
        self._open: set[Exchange] = set()
        self.last_end_ns = 0
        """When the last request ended for which anything had arrived; 0 before there is one."""
        self.control = httpx.AsyncClient(
            base_url=base_url,
            transport=AiohttpTransport(verify=_tls(base_url), client=_session),
            headers={"accept-encoding": "identity", "user-agent": "benchctl"},
            timeout=httpx.Timeout(timeouts.connect_s),
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        await self.control.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.control.__aexit__(kind, error, trace)

    @property
    def open(self) -> frozenset[Exchange]:
        """Requests that are open now."""
        return frozenset(self._open)

    def prepare(
        self,
        request: PreparedRequest,
        path: str,
        headers: Mapping[str, str],
        body: bytes,
        *,
        is_warmup: bool = False,
    ) -> Call:
        """Make the HTTP request that asks for ``request``."""
        http = self.control.build_request(
            "POST",
            path,
            headers={"content-type": "application/json", "accept": "text/event-stream", **headers},
            content=body,
            timeout=httpx.Timeout(None, connect=self._timeouts.connect_s),
        )
        return Call(request=request, http=http, is_warmup=is_warmup)

    async def exchange(self, call: Call, scheduled_ns: int) -> Exchange:
        """Send ``call`` and take in the stream. Trouble is noted, never raised: also being cancelled."""
        exchange = Exchange(call=call, scheduled_ns=scheduled_ns)
        reads, now = exchange.reads, time.monotonic_ns
        exchange.sent_ns = now()
        self._open.add(exchange)
        try:
            async with asyncio.timeout(self._timeouts.request_s):
                response = await self.control.send(call.http, stream=True)
                exchange.status = response.status_code
                try:
                    async for data in response.aiter_raw():
                        reads.append((now(), data))
                finally:
                    await response.aclose()
        except TimeoutError:
            limit = f"no end within {self._timeouts.request_s:g} s (timeouts.request_s)"
            exchange.failure = RequestError(kind="timeout", message=limit)
        except asyncio.CancelledError:
            exchange.failure = RequestError(kind="cancelled", message="the load ended before this request did")
        except (httpx.HTTPError, aiohttp.ClientError, OSError) as error:
            exchange.failure = _transport_error(error, exchange)
        exchange.done_ns = now()
        self._open.discard(exchange)
        if reads:
            self.last_end_ns = reads[-1][0]
        return exchange


def _tls(base_url: str) -> ssl.SSLContext:
    """A bare context for plain HTTP spares loading the certificates of the world."""
    if base_url.startswith("https:"):
        return ssl.create_default_context()
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def _session() -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())


def _transport_error(error: Exception, exchange: Exchange) -> RequestError:
    """Classify by the underlying exception: the transport's own mapping calls a lost connection a timeout."""
    cause = (error.__cause__ if isinstance(error, httpx.HTTPError) else None) or error
    message = f"{type(cause).__name__}: {cause}"
    if isinstance(cause, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)):
        return RequestError(kind="connect", message=message)
    if isinstance(cause, aiohttp.ClientResponseError):
        return RequestError(kind="malformed-stream", message=f"the answer is no HTTP: {message}")
    when = "before it answered" if exchange.status is None else "in mid-stream"
    return RequestError(kind="early-close", message=f"the server closed the connection {when}: {message}")


async def understand(exchange: Exchange) -> RequestRecord:
    """Turn the raw reads into a record, in slices that leave the loop free for the other streams."""
    reader = CompletionReader(exchange.call.request.n)
    pending = 0
    for t_ns, data in exchange.reads:
        reader.feed(t_ns, data)
        pending += len(data)
        if pending >= _SLICE_BYTES:
            pending = 0
            await asyncio.sleep(0)
    if exchange.failure is None:
        reader.finish(exchange.done_ns)
    return _record(exchange, reader)


def _record(exchange: Exchange, reader: CompletionReader) -> RequestRecord:
    request, usage = exchange.call.request, reader.usage
    return RequestRecord(
        request_id=request.request_id,
        index=request.index,
        is_warmup=exchange.call.is_warmup,
        scheduled_ns=exchange.scheduled_ns,
        sent_ns=exchange.sent_ns,
        done_ns=exchange.done_ns,
        status=exchange.status,
        choices=reader.choices(),
        prompt_tokens=usage.prompt_tokens if usage else None,
        completion_tokens=usage.completion_tokens if usage else None,
        cached_tokens=usage.cached_tokens if usage else None,
        error=_error(exchange, reader),
    )


def _error(exchange: Exchange, reader: CompletionReader) -> RequestError | None:
    """What is wrong with an exchange; None only when everything asked for has arrived.

    What the server says of its own failure explains more than the way in which the stream then ended.
    """
    failure = exchange.failure
    if failure is not None and failure.kind in {"cancelled", "timeout", "connect"}:
        return failure
    if exchange.status is not None and exchange.status != httpx.codes.OK:
        body = b"".join(data for _, data in exchange.reads)
        return RequestError(kind="http-status", message=_stated(body), status=exchange.status)
    return reader.error or failure or _incompleteness(exchange, reader)


def _incompleteness(exchange: Exchange, reader: CompletionReader) -> RequestError | None:
    request, usage = exchange.call.request, reader.usage
    if not reader.has_events and exchange.reads:
        message = f"the answer holds no events: {shown(exchange.reads[0][1])}"
        return RequestError(kind="malformed-stream", message=message)
    if reader.num_finished < request.n:
        message = f"the stream ended with {reader.num_finished} of {request.n} choices finished"
        return RequestError(kind="early-close", message=message)
    if usage is None or usage.completion_tokens is None:
        return RequestError(kind="malformed-stream", message="the stream states no usage: tokens cannot be counted")
    wanted = request.max_tokens * request.n
    if request.ignore_eos and usage.completion_tokens != wanted:
        message = f"{usage.completion_tokens} output tokens where ignore_eos demands {wanted}"
        return RequestError(kind="short-output", message=message)
    return None


class _Refusal(msgspec.Struct):
    error: msgspec.Raw = msgspec.Raw()
    message: str | None = None


def _stated(body: bytes) -> str:
    """What the body of a refusal says: ``{"error": {"message": …}}``, ``{"message": …}``, or as it is."""
    told = body
    while told:
        try:
            refusal = msgspec.json.decode(told, type=_Refusal)
        except (msgspec.DecodeError, UnicodeDecodeError):
            break
        if refusal.message is not None:
            return shown(refusal.message.encode())
        body, told = told, bytes(refusal.error)
    return shown(told or body) or "no message"
