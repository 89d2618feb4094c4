"""A server of OpenAI's API in any dialect: it keeps what it is sent; answers whole, too early, or not at all."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from support.servers.handler_server import handled_by


@dataclass(frozen=True)
class SentRequest:
    """One request as it reached the server; names of headers in lower case."""

    number: int
    path: str
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass
class OpenAIServer:
    """How the server answers, and what it was sent."""

    share: float = 1.0
    """Share of the tokens that come, of every answer but each fourth, which comes whole."""
    finish: str = "length"
    counted_by: str = "last usage"
    """``last usage``, ``running usage``, ``timings`` or ``ids``."""
    tokens_per_chunk: int = 1
    is_honest: bool = False
    """All tokens come: those beyond the share have no text and take their time, like a repeated end of sequence."""
    pace_s: float = 0.0005
    tokens_per_word: int = 1
    """Tokens that it counts in a prompt for each of its words."""
    refuse: Callable[[SentRequest], tuple[int, str] | None] = lambda _: None
    """Status and words of the refusal of a request."""
    refuses_in_stream: bool = False
    """Refusals are error events of an answer with status 200."""
    fields: tuple[str, ...] | None = None
    """Fields of a completion that its own description names; None: it has no description."""
    url: str = ""
    requests: list[SentRequest] = field(default_factory=list, repr=False)

    @contextmanager
    def running(self) -> Iterator["OpenAIServer"]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                """Nothing."""

            def do_GET(self) -> None:
                pages: dict[str, Any] = {"/health": {}, "/v1/models": {"data": [{"id": "theirs"}]}}
                if server.fields is not None:
                    pages["/openapi.json"] = _description(server.fields)
                self._begin(200 if self.path in pages else 404, "application/json")
                self.wfile.write(json.dumps(pages.get(self.path, {})).encode())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                if not self.path.endswith("/completions"):
                    self.send_error(404)
                    return
                headers = {name.lower(): value for name, value in self.headers.items()}
                sent = SentRequest(len(server.requests) + 1, self.path, headers, body)
                server.requests.append(sent)
                refusal = server.refuse(sent)
                status, message = refusal or (200, "")
                error = {"error": {"message": message, "code": status}}
                if refusal and not server.refuses_in_stream:
                    self._begin(status, "application/json")
                    self.wfile.write(json.dumps(error).encode())
                    return
                self._begin(200, "text/event-stream")
                for event in [error] if refusal else server.events(sent):
                    self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
                self.wfile.write(b"data: [DONE]\n\n")

            def _begin(self, status: int, content_type: str) -> None:
                self.send_response(status)
                self.send_header("content-type", content_type)
                self.end_headers()

        with handled_by(Handler) as self.url:
            yield self

    def events(self, sent: SentRequest) -> Iterator[dict[str, Any]]:
        """The events of an answer, each at its time."""
        body, is_whole = sent.body, sent.number % 4 == 0
        num_asked = body["max_tokens"]
        num_shown = num_asked if is_whole else round(num_asked * self.share)
        for i in range(0, num_shown, self.tokens_per_chunk):
            count = min(self.tokens_per_chunk, num_shown - i)
            text = "".join(f" w{j % 10}" for j in range(i, i + count))
            yield self._event(body, text, count, i + count)
            time.sleep(self.pace_s * self.tokens_per_chunk)
        if self.is_honest:
            time.sleep(self.pace_s * (num_asked - num_shown))
        yield self._event(body, "", 0, num_asked, finish="length" if is_whole else self.finish)
        prompt = body.get("prompt") or " ".join(message["content"] for message in body["messages"])
        usage = {"prompt_tokens": len(prompt.split()) * self.tokens_per_word, "completion_tokens": num_asked}
        yield {"choices": [], "usage": usage}

    def _event(
        self, body: dict[str, Any], text: str, count: int, so_far: int, finish: str | None = None
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
        choice |= {"delta": {"content": text}} if "messages" in body else {"text": text}
        event: dict[str, Any] = {"choices": [choice]}
        if self.counted_by == "ids":
            choice["token_ids"] = [1] * count
        elif self.counted_by == "running usage":
            event["usage"] = {"prompt_tokens": 1, "completion_tokens": so_far}
        elif self.counted_by == "timings":
            event["timings"] = {"predicted_n": so_far}
        return event


def _description(fields: tuple[str, ...]) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Completion"}}}
    return {
        "paths": {"/v1/completions": {"post": {"requestBody": {"content": content}}}},
        "components": {"schemas": {"Completion": {"properties": {name: {} for name in fields}}}},
    }
