"""Requests as bytes of HTTP/1.1, written ahead so that sending one is a single system call."""

import base64
from collections.abc import Mapping

import httpx

from benchctl.errors import LoadError

_FORBIDDEN = frozenset("\r\n\0")


class RequestWriter:
    """Writes the requests for one server, whose address may have a path of its own.

    Raises LoadError for a header that would break a request apart.
    """

    def __init__(self, base_url: httpx.URL, headers: Mapping[str, str]) -> None:
        self._base_url = base_url
        self._headers = {name.lower(): value for name, value in headers.items()}
        if base_url.userinfo:
            self._headers["authorization"] = f"Basic {base64.b64encode(base_url.userinfo).decode()}"
        self._beginnings: dict[str, bytes] = {}
        """By path: the request line and the header that names the host."""

    def post(self, path: str, headers: Mapping[str, str], body: bytes) -> bytes:
        """A POST of ``body`` to ``path`` below the address of the server."""
        beginning = self._beginnings.get(path)
        if beginning is None:
            beginning = self._beginnings[path] = _beginning("POST", _joined(self._base_url, path))
        return self._request(beginning, headers, body)

    def request(self, method: str, url: httpx.URL, headers: Mapping[str, str], body: bytes) -> bytes:
        """A request to any address."""
        return self._request(_beginning(method, url), headers, body)

    def _request(self, beginning: bytes, headers: Mapping[str, str], body: bytes) -> bytes:
        fields = self._headers | {name.lower(): value for name, value in headers.items()}
        lines = "".join([f"{name}: {value}\r\n" for name, value in fields.items()])
        if lines.count("\n") != len(fields) or lines.count("\r") != len(fields) or "\0" in lines:
            name = next(name for name, value in fields.items() if _FORBIDDEN & set(name + value))
            raise LoadError(f"header {name!r} contains a line end; correct its value", cause="bad-header")
        return b"%s%scontent-length: %d\r\n\r\n%s" % (beginning, lines.encode(), len(body), body)


def _joined(base_url: httpx.URL, path: str) -> httpx.URL:
    raw_path = httpx.URL(path).raw_path.lstrip(b"/")
    return base_url.copy_with(raw_path=base_url.raw_path.rstrip(b"/") + b"/" + raw_path)


def _beginning(method: str, url: httpx.URL) -> bytes:
    return b"%s %s HTTP/1.1\r\nhost: %s\r\n" % (method.encode(), url.raw_path, url.netloc)
