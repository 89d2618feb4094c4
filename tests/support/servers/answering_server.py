"""A server of OpenAI's API in any dialect: it answers in full, or ends answers before their forced length and
counts the tokens that never came; it fails at some requests, and remembers all of them.
"""

import json
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from support.servers.handler_server import handled_by


@dataclass
class Answers:
    """How the server answers, and what it was asked."""

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
    failing: frozenset[int] = frozenset()
    """Numbers of the requests that it answers with an error."""
    asked: list[tuple[dict[str, Any], str | None]] = field(default_factory=list, repr=False)
    """Body and key of each request."""


def answering(answers: Answers) -> AbstractContextManager[str]:
    """The address of the server; it ends with the block."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            """Nothing."""

        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/v1/models" else 404)
            self.end_headers()
            self.wfile.write(b'{"data": [{"id": "theirs"}]}')

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if not self.path.endswith("/completions"):
                self.send_error(404)
                return
            answers.asked.append((body, self.headers["authorization"]))
            number = len(answers.asked)
            if number in answers.failing:
                self.send_error(500, "out of order")
                return
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
            is_whole = number % 4 == 0
            for event in _events(answers, body, is_whole=is_whole):
                self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
                time.sleep(answers.pace_s * answers.tokens_per_chunk)
            self.wfile.write(b"data: [DONE]\n\n")

    return handled_by(Handler)


def _events(answers: Answers, body: dict[str, Any], *, is_whole: bool) -> Iterator[dict[str, Any]]:
    num_asked, per_chunk = body["max_tokens"], answers.tokens_per_chunk
    num_shown = num_asked if is_whole else round(num_asked * answers.share)
    for i in range(0, num_shown, per_chunk):
        count = min(per_chunk, num_shown - i)
        yield _event(answers, body, "".join(f" w{j % 10}" for j in range(i, i + count)), count, i + count)
    if answers.is_honest:
        time.sleep(answers.pace_s * (num_asked - num_shown))
    yield _event(answers, body, "", 0, num_asked, finish="length" if is_whole else answers.finish)
    prompt = body.get("prompt") or " ".join(message["content"] for message in body["messages"])
    usage = {"prompt_tokens": len(prompt.split()) * answers.tokens_per_word, "completion_tokens": num_asked}
    yield {"choices": [], "usage": usage}


def _event(
    answers: Answers, body: dict[str, Any], text: str, count: int, so_far: int, finish: str | None = None
) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
    choice |= {"delta": {"content": text}} if "messages" in body else {"text": text}
    event: dict[str, Any] = {"choices": [choice]}
    if answers.counted_by == "ids":
        choice["token_ids"] = [1] * count
    elif answers.counted_by == "running usage":
        event["usage"] = {"prompt_tokens": 1, "completion_tokens": so_far}
    elif answers.counted_by == "timings":
        event["timings"] = {"predicted_n": so_far}
    return event
