"""Answers that redirect a request to another address (RFC 9110, section 15.4)."""

from dataclasses import dataclass
from typing import Final

import httpx

from benchctl.load.answer import Answer
from benchctl.load.request_head import RequestWriter
from benchctl.records.record import Call, RequestError

MOST_REDIRECTS: Final = 20
_SAME_REQUEST: Final = frozenset({307, 308})
_AS_GET: Final = frozenset({301, 302, 303})


@dataclass(frozen=True, slots=True)
class Redirect:
    """The address to which a request is redirected, and whether its body is sent there."""

    url: httpx.URL
    is_same_request: bool
    is_same_server: bool

    def wire(self, writer: RequestWriter, call: Call) -> bytes:
        """The request for that address; a key is sent only to the server that it is for."""
        headers = {
            name: value
            for name, value in call.headers.items()
            if self.is_same_server or name.lower() != "authorization"
        }
        return writer.request(
            "POST" if self.is_same_request else "GET", self.url, headers, call.body if self.is_same_request else b""
        )

    def refusal(self, num_redirects: int) -> RequestError:
        """The error when it is not followed."""
        if num_redirects > MOST_REDIRECTS:
            message = f"the server redirects requests more than {MOST_REDIRECTS} times, last to {self.url}"
        else:
            message = f"the server redirects requests to {self.url}; use that address for the server"
        return RequestError(kind="connect-failed", message=message)


def redirect_of(answer: Answer, url: httpx.URL) -> Redirect | None:
    """The redirect that ``answer``, which came from ``url``, asks for; None if it is an answer of its own."""
    if answer.status not in _SAME_REQUEST | _AS_GET:
        return None
    location = next((value for name, value in answer.headers if name.lower() == b"location"), None)
    if location is None:
        return None
    try:
        there = url.join(location.decode("latin-1"))
    except httpx.InvalidURL:
        return None
    same_server = (there.scheme, there.host, there.port) == (url.scheme, url.host, url.port)
    return Redirect(url=there, is_same_request=answer.status in _SAME_REQUEST, is_same_server=same_server)
