"""A server on a real clock whose use of the processor is known, started as vLLM's is.

Each token takes ``BUSY_MS`` milliseconds: with ``BUSY_WORK`` of computing, so that a neighbour on the same core
makes it slower, without it of sleep, so that nothing does and it disturbs nobody. ``BUSY_DIES_AFTER`` tokens, if it
is set, end it; ``BUSY_ONLY_ON_CORE`` limits that to a server on this core.
"""

import os

if os.environ.get("BUSY_WORK"):  # what else this machine does must not hide what servers do to each other
    try:
        os.nice(-12)
        with open("/proc/self/autogroup", "w") as group:  # noqa: PTH123 - pathlib would have to be imported
            group.write("-12")
    except OSError:
        pass

import argparse
import asyncio
import hashlib
import json
import time

TOKEN_S = float(os.environ.get("BUSY_MS", "5")) / 1000
COMPUTES = bool(os.environ.get("BUSY_WORK"))
DIES_AFTER = int(os.environ.get("BUSY_DIES_AFTER", "0"))
BLOCK = bytes(1 << 16)


def work(count):
    """So many hashes of one block."""
    for _ in range(count):
        hashlib.sha256(BLOCK).digest()


def hashes_per_token():
    """Hashes that take a token's time of the processor, whoever else uses it now."""
    before = time.thread_time()
    work(200)
    return max(1, round(TOKEN_S * 200 / (time.thread_time() - before)))


class Server:
    def __init__(self):
        self.num_tokens = 0
        self.per_token = hashes_per_token() if COMPUTES else 0
        self.is_mortal = os.environ.get("BUSY_ONLY_ON_CORE", "") in {"", *map(str, os.sched_getaffinity(0))}

    async def token(self):
        if COMPUTES:
            work(self.per_token)
            await asyncio.sleep(0)
        else:
            await asyncio.sleep(TOKEN_S)
        self.num_tokens += 1
        if self.is_mortal and self.num_tokens == DIES_AFTER:
            os._exit(3)

    async def connected(self, reader, writer):
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
            lengths = [line.partition(":")[2] for line in head if line.startswith("content-length:")]
            body = await reader.readexactly(int(lengths[0]) if lengths else 0)
            if head[0].split()[1] == "/v1/completions":
                await self.stream(writer, json.loads(body)["max_tokens"])
            else:
                content = b'{"version": "0.32.0"}'
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(content) + content)
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def stream(self, writer, num_tokens):
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for token in range(num_tokens):
            await self.token()
            finish = "length" if token == num_tokens - 1 else None
            choice = {"index": 0, "text": f"t{token} ", "token_ids": [token], "finish_reason": finish}
            self.event(writer, json.dumps({"choices": [choice]}))
            await writer.drain()
        usage = {"prompt_tokens": 8, "completion_tokens": num_tokens}
        self.event(writer, json.dumps({"choices": [], "usage": usage}))
        self.event(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")

    def event(self, writer, data):
        content = f"data: {data}\n\n".encode()
        writer.write(f"{len(content):x}\r\n".encode() + content + b"\r\n")


async def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    options, _ = parser.parse_known_args()
    listener = await asyncio.start_server(Server().connected, "127.0.0.1", options.port)
    async with listener:
        await listener.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
