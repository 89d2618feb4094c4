"""A server whose truth is known: it sends tokens at set times, writes down when it did, and misbehaves on demand.

The prompt of a request is a JSON object that says how to answer it: ``gap_ms`` (time between tokens) and ``mode``
(see ``Stream``). HTTP is written by hand, so that it can be broken at any byte.
"""
# ruff: noqa: T201 - what it prints is a server's log

import argparse
import asyncio
import json
import signal
import subprocess
import sys
import time
from pathlib import Path


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--truth", type=Path, required=True)
    parser.add_argument("--step-log", type=Path)
    parser.add_argument("--never-ready", action="store_true")
    parser.add_argument("--die-saying")
    parser.add_argument("--start-delay-s", type=float, default=0.0)
    parser.add_argument("--ignore-term", action="store_true")
    parser.add_argument("--with-worker", action="store_true", help="start a child that outlives its parent")
    parser.add_argument("--die-after", type=int, help="tokens after which the server ends with exit code 3")
    parser.add_argument("--compile-after", type=int, help="tokens after which it logs that it compiles a kernel")
    parser.add_argument("--broken-info", action="store_true")
    return parser.parse_args()


class Stream:
    """One streamed answer, in one of these modes.

    ``good`` · ``truncate`` (connection cut after half) · ``error-event`` · ``stall`` (never ends) · ``refuse``
    (HTTP 500) · ``hang-up`` (closes before answering) · ``noise`` (no HTTP at all)
    """

    def __init__(self, server, writer, body, request_id):
        self.server, self.writer, self.body, self.request_id = server, writer, body, request_id
        self.how = json.loads(body["prompt"]) if body["prompt"].startswith("{") else {}
        self.mode = self.how.get("mode", "good")
        self.arrived_ns = time.monotonic_ns()
        self.sent_ns = []

    async def answer(self):
        if self.mode == "hang-up":
            return
        if self.mode == "noise":
            self.writer.write(b"this is no HTTP\r\n\r\n")
        elif self.mode == "refuse":
            content = b'{"error": {"message": "the engine is tired", "code": 500}}'
            self.writer.write(b"HTTP/1.1 500 X\r\ncontent-length: %d\r\n\r\n%s" % (len(content), content))
        else:
            self.writer.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            )
            await self.stream()

    async def stream(self):
        num_tokens, num_choices = self.body["max_tokens"], self.body.get("n", 1)
        start = time.monotonic()
        for token in range(num_tokens):
            await asyncio.sleep(max(0.0, start + (token + 1) * self.how.get("gap_ms", 1) / 1000 - time.monotonic()))
            if token >= num_tokens // 2 and await self.misbehave():
                return
            self.sent_ns.append(time.monotonic_ns())
            finish = "length" if token == num_tokens - 1 else None
            for index in range(num_choices):
                choice = {"index": index, "text": f"t{token} ", "token_ids": [token], "finish_reason": finish}
                self.event({"choices": [choice]})
            await self.writer.drain()
            self.server.count_token(num_choices)
        self.event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": num_tokens * num_choices}})
        self.end()

    async def misbehave(self):
        """Do what the mode asks for in mid-stream; True when the stream is over."""
        if self.mode == "truncate":
            self.writer.transport.abort()
        elif self.mode == "stall":
            await asyncio.sleep(3600)
        elif self.mode == "error-event":
            self.event({"error": {"message": "engine core died", "code": 500}})
            self.end()
        else:
            return False
        return True

    def event(self, document):
        self.data(json.dumps(document).encode())

    def end(self):
        self.data(b"[DONE]")
        self.writer.write(b"0\r\n\r\n")

    def data(self, content):
        event = b"data: " + content + b"\n\n"
        self.writer.write(b"%x\r\n%s\r\n" % (len(event), event))


class Server:
    def __init__(self, options):
        self.options = options
        self.num_tokens = 0
        self.steps = options.step_log.open("a") if options.step_log else None
        self.truth = options.truth.open("a")

    def count_token(self, num_choices):
        self.num_tokens += 1
        if self.steps:
            now = time.monotonic_ns()
            step = {"step": self.num_tokens, "start_ns": now, "dur_ns": 1000, "clock": "host", "phase": "decode"}
            self.steps.write(json.dumps(step | {"num_seqs": num_choices, "output_tokens": num_choices}) + "\n")
            self.steps.flush()
        if self.num_tokens == self.options.compile_after:
            kernel = "Triton kernel JIT compilation during inference: _topk_kernel. This causes a latency spike"
            print(f"(EngineCore pid=1) WARNING [jit_monitor.py:140] {kernel}", flush=True)
        if self.num_tokens == self.options.die_after:
            print("fatal: out of luck", flush=True)
            signal.raise_signal(signal.SIGKILL)

    def tell(self, stream):
        """Write down the truth of a request: when it came, and again with all sends when it has ended."""
        truth = {"request_id": stream.request_id, "arrived_ns": stream.arrived_ns, "sent_ns": stream.sent_ns}
        self.truth.write(json.dumps(truth) + "\n")
        self.truth.flush()

    async def connected(self, reader, writer):
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                headers = {
                    name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])
                }
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                await self.respond(head[0].split()[1], headers, body, writer)
                await writer.drain()
                break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def respond(self, path, headers, body, writer):
        if path == "/v1/completions":
            stream = Stream(self, writer, json.loads(body), headers.get("x-request-id"))
            self.tell(stream)
            try:
                await stream.answer()
            finally:
                self.tell(stream)
            return
        ready = not self.options.never_ready
        content = b"[broken" if self.options.broken_info else b'{"version": "1.2", "colour": "blue"}'
        status = int(headers.get("x-status", 200 if ready else 503))
        writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content)


def start_worker():
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    print(f"worker {worker.pid}", flush=True)


async def main():
    options = arguments()
    print("paced server starting", flush=True)
    if options.ignore_term:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if options.with_worker:
        start_worker()
    await asyncio.sleep(options.start_delay_s)
    if options.die_saying:
        print(options.die_saying, flush=True)
        raise SystemExit(1)
    server = Server(options)
    listener = await asyncio.start_server(server.connected, "127.0.0.1", options.port)
    print("paced server listening", flush=True)
    async with listener:
        await listener.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
