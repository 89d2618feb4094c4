"""The least that a client in Python can do: open connections, send requests, stamp and keep every read.

It understands nothing of what it reads, neither HTTP nor JSON; that a stream has ended it sees by the last bytes of
a chunked body, and sends the next request of ``--requests`` from there, on the same connection. What it costs on an
event loop is therefore the limit for any load generator on that loop.
``--decode`` adds, after the streams have ended, what nobody who counts tokens can leave out: decoding each event.

    python -m benchmarks.load.peers.limit_client http://127.0.0.1:8000 --streams 64 --output-len 500
        [--requests 256] [--loop uvloop|asyncio]

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


class Answer:
    """One request: its reads as they came, with the time of each."""

    def __init__(self, index: int, content: bytes) -> None:
        self.index = index
        self.content = content
        self.sent_ns = 0
        self.stamps_ns: list[int] = []
        self.reads: list[bytes] = []


class Slots:
    """A closed loop: each of its connections sends the next of ``answers`` as soon as it may."""

    def __init__(self, asked: argparse.Namespace, answers: list[Answer]) -> None:
        self.asked, self.address = asked, urlsplit(asked.url)
        self.waiting = iter(answers)
        self.num_left = len(answers)
        self.loop = asyncio.get_running_loop()
        self.done = self.loop.create_future()
        self.openings: set[asyncio.Task[Slot]] = set()

    async def open(self) -> "Slot":
        """A connection that has sent nothing yet."""
        _, slot = await self.loop.create_connection(lambda: Slot(self), self.address.hostname, self.address.port)
        return slot

    def replace(self, slot: "Slot") -> None:
        """Carry on what ``slot`` had to do over a new connection: the server has closed its own."""
        opening = self.loop.create_task(self.open())
        self.openings.add(opening)
        opening.add_done_callback(lambda done: done.result().send(slot.answer))
        opening.add_done_callback(self.openings.discard)

    def end(self) -> None:
        self.num_left -= 1
        if not self.num_left:
            self.done.set_result(None)


class Slot(asyncio.Protocol):
    """One connection, which carries one request or one after the other."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.answer: Answer | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def connection_lost(self, _: Exception | None) -> None:
        if self.answer is not None and not self.answer.reads:
            self.slots.replace(self)

    def send(self, again: Answer | None = None) -> None:
        self.answer = answer = again or next(self.slots.waiting, None)
        if answer is None:
            self.transport.close()
            return
        answer.sent_ns = time.monotonic_ns()
        self.transport.write(answer.content)

    def data_received(self, data: bytes) -> None:
        answer = self.answer
        if answer is None:
            return
        answer.stamps_ns.append(time.monotonic_ns())
        answer.reads.append(data)
        if data.endswith(END):
            self.send()
            self.slots.end()


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


async def stream(asked: argparse.Namespace) -> tuple[list[Answer], float]:
    """All requests, ``--streams`` at a time, each stream on a connection made before; and the CPU seconds from the
    first send on."""
    host = urlsplit(asked.url).netloc
    lengths = [asked.output_len] * (asked.requests or asked.streams)
    if asked.prompts:
        lengths = [json.loads(line)["output_len"] for line in asked.prompts.read_text().splitlines()]
    answers = [
        Answer(index, request(host, index, asked.input_len, output_len)) for index, output_len in enumerate(lengths)
    ]
    slots = Slots(asked, answers)
    first = [await slots.open() for _ in range(min(asked.streams, len(answers)))]
    before_s = time.process_time()
    for slot in first:
        slot.send()
    await slots.done
    return answers, time.process_time() - before_s


def num_tokens(answer: Answer) -> int:
    """Decodes each event; one that has a choice is a token."""
    decode = msgspec.json.Decoder(Event).decode
    lines = b"".join(answer.reads).split(b"\n")
    events = (decode(line[6:]) for line in lines if line.startswith(b"data: {"))
    return sum(len(event.choices) for event in events)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--requests", type=int, help="in all; default: one for each stream")
    parser.add_argument("--input-len", type=int, default=16, help="words of each prompt")
    parser.add_argument("--output-len", type=int, default=500)
    parser.add_argument("--prompts", type=Path, help="rows with the output_len of each request")
    parser.add_argument("--loop", choices=sorted(LOOPS), default="uvloop")
    parser.add_argument("--decode", action="store_true")
    parser.add_argument("--reads", type=Path, help="file for {request_id, sent_ns, stamps_ns} of each request")
    asked = parser.parse_args()
    gc.disable()  # nothing here makes cycles worth collecting
    answers, cpu_s = LOOPS[asked.loop](stream(asked))
    before_s = time.process_time()
    tokens = sum(map(num_tokens, answers)) if asked.decode else None
    if asked.reads:
        seen = [
            {"request_id": f"limit-{answer.index}", "sent_ns": answer.sent_ns, "stamps_ns": answer.stamps_ns}
            for answer in answers
        ]
        asked.reads.write_text(json.dumps(seen))
    found = {
        "reads": sum(len(answer.reads) for answer in answers),
        "bytes": sum(map(len, (data for answer in answers for data in answer.reads))),
        "tokens": tokens,
        "complete": sum(answer.reads[-1:] != [] and answer.reads[-1].endswith(END) for answer in answers),
        "streaming_cpu_s": cpu_s,
        "decoding_cpu_s": time.process_time() - before_s if asked.decode else None,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
