"""Requests by httpx, those that are not measured and streams from servers that speak TLS, and errors below HTTP.

httpx imports its own transport with the first client, so that no command pays for it that asks no server.
"""

import socket
import ssl
import time
from typing import Final

import httpx

from benchctl.errors import OWN_LIMITS, system_failure
from benchctl.load.exchange import Exchange
from benchctl.load.sockets import MOST_HELD_BYTES
from benchctl.profile.sections import Timeouts
from benchctl.records.record import RequestError

HEADERS: Final = {"accept-encoding": "identity", "user-agent": "benchctl", "connection": "close"}
STREAM_HEADERS: Final = {
    "accept-encoding": "identity",
    "user-agent": "benchctl",
    "content-type": "application/json",
    "accept": "text/event-stream",
}


def control_client(base_url: str, timeouts: Timeouts) -> httpx.AsyncClient:
    """A client with a fresh connection for each request, which cannot have been closed meanwhile."""
    return httpx.AsyncClient(
        base_url=base_url,
        verify=ssl.create_default_context() if base_url.startswith("https:") else False,
        headers=HEADERS,
        timeout=httpx.Timeout(timeouts.connect_s),
        limits=httpx.Limits(max_keepalive_connections=0),
        trust_env=False,
    )


async def carry_by_httpx(client: httpx.AsyncClient, exchange: Exchange, timeouts: Timeouts) -> RequestError | None:
    """Send the request of ``exchange`` and keep its answer, each read with the time at which the task gets it.

    Returns the error on the way, None without one.
    """
    exchange.route = "httpx"
    exchange.sent_ns = time.monotonic_ns()
    call, headers = exchange.call, {**STREAM_HEADERS, **exchange.call.headers}
    limits = httpx.Timeout(None, connect=timeouts.connect_s)
    try:
        async with client.stream("POST", call.path, headers=headers, content=call.body, timeout=limits) as response:
            # httpx has removed the framing: what follows ends where the connection does.
            head = b"HTTP/1.1 %d -\r\nlocation: %s\r\n\r\n"
            location = response.headers.get("location", "").encode()
            exchange.keep(time.monotonic_ns(), head % (response.status_code, location))
            async for data in response.aiter_raw():
                exchange.keep(time.monotonic_ns(), data)
                if exchange.receiver.num_held_bytes > MOST_HELD_BYTES and exchange.is_over():
                    return exchange.answer.reader.error
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        return _transport_error(error, exchange)
    return None


def connect_error(error: OSError) -> RequestError:
    """A connection that did not open."""
    failure = system_failure(error)
    if failure is not None and failure.cause in OWN_LIMITS:
        return RequestError(kind=failure.cause, message=f"{failure.problem}; {failure.remedy}")
    message = f"{type(error).__name__}: {error}"
    if isinstance(error, socket.gaierror):
        message += "; correct the address of the server"
    if isinstance(error, ConnectionRefusedError):
        return RequestError(kind="connect-refused", message=message)
    kind = "connect-timeout" if isinstance(error, TimeoutError) else "connect-failed"
    return RequestError(kind=kind, message=message)


def lost_error(error: OSError | None, exchange: Exchange) -> RequestError:
    """A connection that ended before the answer did, by ``error`` or regularly."""
    when = "in mid-stream" if exchange.last_ns else "before it answered"
    if error is None:
        return RequestError(kind="early-close", message=f"the server closed the connection {when}")
    is_reset = isinstance(error, (ConnectionResetError, BrokenPipeError))
    verb, kind = ("reset", "reset") if is_reset else ("closed", "early-close")
    message = f"the server {verb} the connection {when}: {type(error).__name__}: {error}"
    return RequestError(kind=kind, message=message)


def underlying(error: Exception) -> Exception:
    """The exception below ``error``, whose own name and message are those of a library."""
    if isinstance(error.__cause__, Exception):
        return underlying(error.__cause__)
    # httpcore raises some errors "from None", and then the system's own is only the context.
    return underlying(error.__context__) if isinstance(error.__context__, OSError) else error


def _transport_error(error: Exception, exchange: Exchange) -> RequestError:
    """An error that httpx raised, with the message of the exception underneath."""
    cause = underlying(error)
    message = f"{type(cause).__name__}: {str(cause) or error}"
    if isinstance(error, httpx.ConnectTimeout):
        return RequestError(kind="connect-timeout", message=message)
    if isinstance(error, httpx.ConnectError) and isinstance(cause, OSError):
        return connect_error(cause)
    if isinstance(error, (httpx.ConnectError, httpx.UnsupportedProtocol, httpx.InvalidURL)):
        return RequestError(kind="connect-failed", message=message)
    # Words of httpx for a connection that ended before the answer did; it has one class for this and for bad HTTP
    if isinstance(error, httpx.RemoteProtocolError) and not any(
        word in str(error) for word in ("Server disconnected", "peer closed connection")
    ):
        return RequestError(kind="malformed-http", message=f"the answer is not HTTP: {message}")
    return lost_error(cause if isinstance(cause, OSError) else None, exchange)
