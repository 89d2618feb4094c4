"""Requests by httpx: those that are not measured, and streams from servers that speak TLS."""

import ssl
import time
from typing import Final

import httpx

from benchctl.load.exchange import Exchange
from benchctl.load.failures import transport_error
from benchctl.load.plain_http import PlainTransport
from benchctl.load.sockets import MOST_HELD_BYTES
from benchctl.profile.sections import Timeouts
from benchctl.records.record import RequestError

HEADERS: Final = {"accept-encoding": "identity", "user-agent": "benchctl"}
STREAM_HEADERS: Final = {**HEADERS, "content-type": "application/json", "accept": "text/event-stream"}


def control_client(base_url: str, timeouts: Timeouts) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=base_url,
        transport=_transport(base_url),
        headers=HEADERS,
        timeout=httpx.Timeout(timeouts.connect_s),
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
        async with client.stream(
            "POST", call.path, headers=headers, content=call.body, timeout=limits, follow_redirects=True
        ) as response:
            exchange.num_redirects = len(response.history)
            # httpx has removed the framing: what follows ends where the connection does.
            exchange.keep(time.monotonic_ns(), b"HTTP/1.1 %d -\r\n\r\n" % response.status_code)
            async for data in response.aiter_raw():
                exchange.keep(time.monotonic_ns(), data)
                if exchange.held.num_bytes > MOST_HELD_BYTES and exchange.is_over():
                    return exchange.excess
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        return transport_error(error, exchange)
    return None


def _transport(base_url: str) -> httpx.AsyncBaseTransport:
    """A fresh connection for each request, which cannot have been closed meanwhile."""
    if base_url.startswith("https:"):
        from benchctl.load.tls import TlsTransport  # noqa: PLC0415 - few need it, and it takes long to import

        return TlsTransport(ssl.create_default_context())
    return PlainTransport()
