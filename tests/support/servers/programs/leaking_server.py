"""A server of completions that prints, sends and dies with the secrets in the lines of the file ``--secrets``."""

import argparse
import itertools
import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

HALF_LINE_BYTES = 10_000_000


def say(text: str) -> None:
    rest = text.encode()
    while rest:
        rest = rest[os.write(1, rest) :]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    secrets: tuple[str, ...] = ()
    numbers = itertools.count(1)
    """Numbers of the requests, each given once: of a shared counter two threads may read the same value."""

    def log_message(self, *_arguments: Any) -> None:
        """Write nothing: what this server says is chosen."""

    def do_GET(self) -> None:
        self._answer(200, {"models": [], "api_key": "tiny", "note": f"started with {self.secrets}"})

    def do_POST(self) -> None:
        length = int(self.headers["content-length"])
        body = json.loads(self.rfile.read(length))
        number = next(self.numbers)
        for secret in self.secrets:
            say(f"request {self.headers['x-request-id']} authorised by Bearer {secret}\n")
        if number == 2:
            self._answer(400, {"error": {"message": f"the keys {self.secrets} may not do that"}})
            return
        if number == 4 and ARGUMENTS.dies:
            for secret in self.secrets:
                sys.stderr.write(f"\nfatal: cannot reach https://user:{secret}@hub.example/x?token={secret}")
            sys.stderr.flush()
            os._exit(3)
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for number in range(body["max_tokens"]):
            choice = {"index": 0, "text": " x", "finish_reason": None, "token_ids": [number]}
            self._event(json.dumps({"choices": [choice]}))
        choice = {"index": 0, "text": "", "finish_reason": "length"}
        usage = {"prompt_tokens": 1, "completion_tokens": body["max_tokens"]}
        self._event(json.dumps({"choices": [choice], "usage": usage}))
        self._event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def _event(self, data: str) -> None:
        content = f"data: {data}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(content), content))

    def _answer(self, status: int, document: dict[str, Any]) -> None:
        content = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def main() -> None:
    Handler.secrets = tuple(Path(ARGUMENTS.secrets).read_text().splitlines())
    for secret in Handler.secrets:
        _leak(secret)
    for part in ("x" * HALF_LINE_BYTES, f'"{Handler.secrets[0]}"', "y" * HALF_LINE_BYTES, "\n"):
        say(part)
    ThreadingHTTPServer(("127.0.0.1", ARGUMENTS.port), Handler).serve_forever()


def _leak(secret: str) -> None:
    say(f"starting with HF_TOKEN={secret} and --api-key {secret}\n")
    half = len(secret) // 2
    say(f"a key in two writes: {secret[:half]}")
    time.sleep(0.3)
    say(f"{secret[half:]}\n")
    os.write(1, b"\xff\xfe " + json.dumps({"Authorization": f"Bearer {secret}"}).encode() + b"\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--secrets", required=True)
    parser.add_argument("--dies", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    ARGUMENTS = parse()
    main()
