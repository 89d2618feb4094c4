"""A server that harms its clients: each path is an attack. Prints its port, and serves until it is killed.

A request to ``/line/v1/completions`` is answered by one line of 200 MB.
"""

import gzip
import itertools
import json
import socketserver
import sys
import time
from collections.abc import Iterator

OK = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
OPEN = OK + b"connection: close\r\n\r\n"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"
ERROR = b"HTTP/1.1 500 X\r\n"
MB = 1_000_000
FILLER = b"x" * MB


def said(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def token(text: object = "t ", **rest: object) -> bytes:
    return said(choices=[{"index": 0, "text": text, "finish_reason": None, **rest}])


GOOD = (
    token(),
    token(finish_reason="length"),
    said(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 2}),
    b"data: [DONE]\n\n",
)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def with_usage(count: str) -> list[bytes]:
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":%s}}\n\n' % count.encode()
    return [OPEN, *GOOD[:2], usage, GOOD[3]]


def instead_of_a_token(event: bytes) -> list[bytes]:
    return [OPEN, GOOD[0], event, *GOOD[1:]]


def attacks() -> dict[str, Iterator[bytes]]:
    """What each path answers, made anew for each request."""
    nested = b"[" * 100_000
    gigabyte = itertools.repeat(FILLER, 1000)
    return {
        "good": iter([OPEN, *GOOD]),
        "line": itertools.chain([CHUNKED, chunk(GOOD[0])], map(chunk, itertools.repeat(FILLER, 200))),
        "line-until-close": itertools.chain([OPEN, GOOD[0], b"data: "], itertools.repeat(FILLER, 200)),
        "data-lines": itertools.chain([OPEN], itertools.repeat(b"data: x\n" * 100_000, 250)),
        "values": itertools.chain([OPEN, b'data: {"choices":['], itertools.repeat(b"{}," * MB, 3), [b"{}]}\n\n"]),
        "choices": itertools.chain([OPEN], (said(choices=[{"index": i, "text": "a"}]) for i in range(200_000))),
        "choice-201": iter([OPEN, said(choices=[{"index": 200, "text": "a"}]), *GOOD]),
        "tokens": itertools.chain([CHUNKED], map(chunk, itertools.repeat(GOOD[0] * 10_000))),
        "after-done": itertools.chain([CHUNKED, *map(chunk, GOOD)], map(chunk, itertools.repeat(b": on\n\n" * MB))),
        "comments": itertools.chain([OPEN], itertools.repeat(b":" + FILLER + b"\n", 1000)),
        "head": itertools.chain([OK, b"x-endless: "], gigabyte),
        "headers": itertools.chain([OK], (b"x-%d: 1\r\n" % i for i in itertools.count())),
        "many-headers": iter([OK, b"".join(b"x-%d: 1\r\n" % i for i in range(2000)), b"\r\n", *GOOD]),
        "interim": itertools.repeat(b"HTTP/1.1 100 Continue\r\n\r\n" * 1000),
        "extension": itertools.chain([CHUNKED, b"5;x="], gigabyte),
        "trailers": itertools.chain([CHUNKED, *map(chunk, GOOD), b"0\r\n"], itertools.repeat(b"x: 1\r\n" * 10_000)),
        "error-body": itertools.chain([ERROR + b"transfer-encoding: chunked\r\n\r\n"], map(chunk, gigabyte)),
        "error-length": itertools.chain([ERROR + b"content-length: 1000000000\r\n\r\n"], gigabyte),
        "gzip": itertools.chain(
            [OK + b"content-encoding: gzip\r\n\r\n"], itertools.repeat(gzip.compress(FILLER * 10), 100)
        ),
        "negative-length": iter([OK + b"content-length: -5\r\n\r\n", *GOOD]),
        "huge-length": iter([OK + b"content-length: %d\r\n\r\n" % 10**30, *GOOD]),
        "chunk-size": iter([CHUNKED, b"f" * 40 + b"\r\n", *GOOD]),
        "nested": iter(instead_of_a_token(b'data: {"choices":[{"text":"a","x":' + nested + b"}]}\n\n")),
        "nested-error": iter(instead_of_a_token(b'data: {"error":' + nested + b"]" * 100_000 + b"}\n\n")),
        "nested-call": iter(
            instead_of_a_token(b'data: {"choices":[{"delta":{"tool_calls":' + nested + b"]" * 100_000 + b"}}]}\n\n")
        ),
        "number-token": iter(instead_of_a_token(token(17))),
        "list-token": iter(instead_of_a_token(token(["a"]))),
        "word-ids": iter(instead_of_a_token(token(token_ids=["one"]))),
        "broken-text": iter(instead_of_a_token(b'data: {"choices":[{"text":"\xff\xfe"}]}\n\n')),
        "surrogate": iter(instead_of_a_token(b'data: {"choices":[{"text":"\\ud800"}]}\n\n')),
        "bare-nul": iter(instead_of_a_token(b'data: {"choices":[{"text":"\0"}]}\n\n')),
        "far-choice": iter(instead_of_a_token(said(choices=[{"index": 1 << 60, "text": "a"}]))),
        "minus-usage": iter(with_usage("-1")),
        "huge-usage": iter(with_usage("9" * 5000)),
        "true-usage": iter(with_usage("true")),
        "float-usage": iter(with_usage("2.0")),
        "null-usage": iter(with_usage("null")),
        "text-usage": iter(with_usage('"2"')),
        "long-reason": iter([OPEN, token(), token(finish_reason="x" * MB), *GOOD[2:]]),
    }


class Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        path = self.rfile.readline().split(b" ")[1].decode()
        length = 0
        while (line := self.rfile.readline()) not in {b"\r\n", b""}:
            name, _, value = line.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        self.rfile.read(length)
        try:
            if path.startswith("/drip/"):
                for byte in OPEN + b"".join(GOOD):
                    self.wfile.write(bytes([byte]))
                    time.sleep(1)
            for part in attacks()[path.split("/")[1]]:
                self.wfile.write(part)
        except OSError:
            pass  # the client has had enough


class Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True


if __name__ == "__main__":
    with Server(("127.0.0.1", 0), Handler) as server:
        sys.stdout.write(f"{server.server_address[1]}\n")
        sys.stdout.flush()
        server.serve_forever()
