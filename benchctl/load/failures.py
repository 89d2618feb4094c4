"""Errors below HTTP in the same classes for our own transport and for httpx's."""

import socket
from typing import TYPE_CHECKING, Final

import httpx

from benchctl.errors import OWN_LIMITS, system_failure
from benchctl.records.record import RequestError

if TYPE_CHECKING:
    from benchctl.load.exchange import Exchange

CANCELLED: Final = RequestError(kind="cancelled", message="the load ended before this request did")


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


def lost_error(error: OSError | None, exchange: "Exchange") -> RequestError:
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
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
    return error


def transport_error(error: Exception, exchange: "Exchange") -> RequestError:
    """An error that httpx raised, with the message of the exception underneath."""
    cause = underlying(error)
    message = f"{type(cause).__name__}: {str(cause) or error}"
    if isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout)):
        return _httpx_connect_error(error, cause, message)
    if isinstance(error, (httpx.UnsupportedProtocol, httpx.InvalidURL, httpx.TooManyRedirects)):
        return RequestError(kind="connect-failed", message=message)
    if isinstance(error, httpx.RemoteProtocolError):
        return RequestError(kind="malformed-http", message=f"the answer is not HTTP: {message}")
    return lost_error(cause if isinstance(cause, OSError) else OSError(message), exchange)


def _httpx_connect_error(error: Exception, cause: Exception, message: str) -> RequestError:
    if isinstance(cause, TimeoutError):
        return RequestError(kind="connect-timeout", message=str(error))
    if isinstance(cause, OSError):
        return connect_error(cause)
    kind = "connect-refused" if "refused" in message.lower() else "connect-failed"
    return RequestError(kind=kind, message=message)
