"""A server that keeps what it is sent: path, headers and body of each request, and answers or refuses it."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from support.servers.handler_server import handled_by
from support.servers.sse import choice, event, total, written

Refusal = tuple[int, str]
"""A status code and the server's words."""


@dataclass(frozen=True)
class SentRequest:
    """One request as it reached the server; names of headers in lower case."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass
class RecordingServer:
    url: str = ""
    requests: list[SentRequest] = field(default_factory=list)
    refuse: Callable[[SentRequest], Refusal | None] = lambda _: None
    refuses_in_stream: bool = False
    """Refusals are error events of an answer with status 200."""
    fields: tuple[str, ...] | None = None
    """Fields of a completion that its own description names; None: it has no description."""


@contextmanager
def recording_server(**options: Any) -> Iterator[RecordingServer]:
    """The server, which answers ``max_tokens`` tokens; ended with the block."""
    server = RecordingServer(**options)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            """Nothing."""

        def do_GET(self) -> None:
            if self.path == "/v1/models":
                self._answer(200, {"data": [{"id": "served"}]})
            elif self.path == "/openapi.json" and server.fields is not None:
                self._answer(200, _description(server.fields))
            else:
                self._answer(200 if self.path == "/health" else 404, {})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if not self.path.endswith("/completions"):
                self._answer(404, {})
                return
            headers = {name.lower(): value for name, value in self.headers.items()}
            sent = SentRequest(self.path, headers, body)
            server.requests.append(sent)
            self._send(*_reply(server, sent))

        def _answer(self, status: int, document: dict[str, Any]) -> None:
            self._send(status, "application/json", json.dumps(document).encode())

        def _send(self, status: int, kind: str, content: bytes) -> None:
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    with handled_by(Handler) as url:
        server.url = url
        yield server


def _reply(server: RecordingServer, sent: SentRequest) -> tuple[int, str, bytes]:
    """Status, type and content of the answer or refusal."""
    refusal = server.refuse(sent)
    if refusal is None:
        return 200, "text/event-stream", _stream(sent)
    status, message = refusal
    error = json.dumps({"error": {"message": message, "code": status}}).encode()
    if server.refuses_in_stream:
        return 200, "text/event-stream", b"data: " + error + b"\n\ndata: [DONE]\n\n"
    return status, "application/json", error


def _stream(sent: SentRequest) -> bytes:
    count = sent.body["max_tokens"]
    of = choice if "messages" in sent.body else written
    events = [event(of("a ", ids=[7], finish="length" if i == count - 1 else None)) for i in range(count)]
    return b"".join((*events, total(count), b"data: [DONE]\n\n"))


def _description(fields: tuple[str, ...]) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Completion"}}}
    return {
        "paths": {"/v1/completions": {"post": {"requestBody": {"content": content}}}},
        "components": {"schemas": {"Completion": {"properties": {name: {} for name in fields}}}},
    }
