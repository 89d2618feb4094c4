"""The least that a client in Python can do: open connections, send requests, stamp and keep every read.

It understands nothing of what it reads, neither HTTP nor JSON; that a stream has ended it sees by the last bytes of
a chunked body. What it costs on an event loop is therefore the limit for any load generator on that loop.
``--decode`` adds, after the streams have ended, what nobody who counts tokens can leave out: decoding each event.

    python scripts/bench/limit_client.py http://127.0.0.1:8000 --streams 64 --output-len 500 [--loop uvloop|asyncio]

Prints one JSON object: reads, bytes, tokens (null without ``--decode``), CPU of the streaming and of the decoding,
and with ``--reads`` writes the stamps of each request's reads to a file.
"""

import argparse
import asyncio
import gc
import json
import time
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import msgspec
import uvloop

END = b"0\r\n\r\n"
LOOPS = {"uvloop": uvloop.run, "asyncio": asyncio.run}


class Choice(msgspec.Struct, gc=False):
    text: str


class Event(msgspec.Struct, gc=False):
    choices: list[Choice]


class Reader(asyncio.Protocol):
    """One request: its reads as they came, with the time of each."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.sent_ns = 0
        self.stamps_ns: list[int] = []
        self.reads: list[bytes] = []
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def send(self) -> None:
        self.sent_ns = time.monotonic_ns()
        self.transport.write(self.content)

    def data_received(self, data: bytes) -> None:
        self.stamps_ns.append(time.monotonic_ns())
        self.reads.append(data)
        if data.endswith(END):
            self.transport.close()

    def connection_lost(self, _error: Exception | None) -> None:
        self.ended.set_result(None)


def request(host: str, index: int, input_len: int, output_len: int) -> bytes:
    """One streamed completion of ``output_len`` tokens."""
    body = msgspec.json.encode(
        {
            "model": "paced",
            "prompt": " ".join(f"w{index + word}" for word in range(input_len)),
            "max_tokens": output_len,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\nx-request-id: limit-{index}\r\n"
    return f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


async def stream(asked: argparse.Namespace) -> tuple[list[Reader], float]:
    """All requests at once, each on its own connection made before; and the CPU seconds from the first send on."""
    address, loop = urlsplit(asked.url), asyncio.get_running_loop()
    contents = [request(address.netloc, index, asked.input_len, asked.output_len) for index in range(asked.streams)]
    readers = [
        (await loop.create_connection(lambda content=content: Reader(content), address.hostname, address.port))[1]  # type: ignore[misc]
        for content in contents
    ]
    before_s = time.process_time()
    for reader in readers:
        reader.send()
    await asyncio.gather(*(reader.ended for reader in readers))
    return readers, time.process_time() - before_s


def num_tokens(reader: Reader) -> int:
    """Decodes each event; one that has a choice is a token."""
    decode = msgspec.json.Decoder(Event).decode
    lines = b"".join(reader.reads).split(b"\n")
    events = (decode(line[6:]) for line in lines if line.startswith(b"data: {"))
    return sum(len(event.choices) for event in events)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=16, help="words of each prompt")
    parser.add_argument("--output-len", type=int, default=500)
    parser.add_argument("--loop", choices=sorted(LOOPS), default="uvloop")
    parser.add_argument("--decode", action="store_true")
    parser.add_argument("--reads", type=Path, help="file for {request_id, sent_ns, stamps_ns} of each request")
    asked = parser.parse_args()
    gc.disable()  # nothing here makes cycles worth collecting
    readers, cpu_s = LOOPS[asked.loop](stream(asked))
    before_s = time.process_time()
    tokens = sum(map(num_tokens, readers)) if asked.decode else None
    if asked.reads:
        seen = [
            {"request_id": f"limit-{index}", "sent_ns": reader.sent_ns, "stamps_ns": reader.stamps_ns}
            for index, reader in enumerate(readers)
        ]
        asked.reads.write_text(json.dumps(seen))
    found = {
        "reads": sum(len(reader.reads) for reader in readers),
        "bytes": sum(map(len, (data for reader in readers for data in reader.reads))),
        "tokens": tokens,
        "complete": sum(reader.reads[-1:] != [] and reader.reads[-1].endswith(END) for reader in readers),
        "streaming_cpu_s": cpu_s,
        "decoding_cpu_s": time.process_time() - before_s if asked.decode else None,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
