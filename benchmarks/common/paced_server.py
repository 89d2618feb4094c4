"""A server that streams tokens at set times and writes down when it did: the truth for load generators.

It speaks as much of the OpenAI protocol as they ask for (completions and chat, streamed or whole, /v1/models,
/health), computes nothing, and costs little: one process, one epoll loop, one ``send`` for each tick and stream.
Tokens come every ``--tick-ms``: at the same moment for all streams, as an engine's steps bring them
(``--phase common``), or for each stream at a moment of its own within the tick (``spread``). A tick that cannot be
kept is left out and counted: the server never bunches what it is late with.

    python -m benchmarks.common.paced_server --port 8000 --truth truth.jsonl [--tick-ms 20] [--phase common|spread]

``--truth`` gets one line for each streamed request that ended (``Truth``). Times are nanoseconds
of CLOCK_MONOTONIC, which all processes of a machine share. A request's arrival is the kernel's stamp, so that a
server that reads late does not move it. The clocks are related here and not by benchctl's code, which is what is
being checked. The last line of the output says what the server cost and how late it was.
"""

import argparse
import hashlib
import heapq
import json
import math
import random
import resource
import select
import signal
import socket
import struct
import time
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httptools
import msgspec

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"
STREAM_END = b"0\r\n\r\n"
DOCUMENT = {"id": "paced-0123456789abcdef", "created": 1700000000, "model": "paced"}


class Truth(msgspec.Struct, frozen=True, kw_only=True):
    """What the server did for one streamed request.

    ``event_tokens[i]`` are the tokens of the i-th event that carries output, ``send_events[j]`` how many such
    events the j-th send held, and ``sends_ns[j]`` the moment right before its system call.
    """

    request_id: str
    """The header ``x-request-id``, or else ``prompt_digest``."""
    prompt_digest: str
    arrived_ns: int
    """The kernel's receive stamp of the request's last byte."""
    read_ns: int
    sends_ns: list[int]
    send_events: list[int]
    event_tokens: list[int]
    is_complete: bool


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What a request asks for, from its body. Fields that only engines know are passed over."""

    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.num_tokens < 1 or self.n not in (None, 1):
            raise ValueError("max_tokens has to be at least 1, and n has to be 1")

    @property
    def num_tokens(self) -> int:
        """The length of the answer: the limit is always reached."""
        limit = self.max_completion_tokens if self.max_tokens is None else self.max_tokens
        return 16 if limit is None else limit

    @property
    def num_prompt_tokens(self) -> int:
        """Words of the text, or token ids where a list of them was sent: exact, though no model's count."""
        if isinstance(self.prompt, list):
            return len(self.prompt)
        return len((json.dumps(self.messages) if self.prompt is None else self.prompt).split())

    @property
    def has_usage(self) -> bool:
        return bool((self.stream_options or {}).get("include_usage"))

    @property
    def prompt_digest(self) -> str:
        """Recognises a request whose client sends no identity."""
        content = json.dumps(self.messages if self.prompt is None else self.prompt, sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]


def framed(content: bytes) -> bytes:
    """As one chunk of a chunked body."""
    return b"%x\r\n%s\r\n" % (len(content), content)


def event(document: Mapping[str, Any]) -> bytes:
    return framed(b"data: " + msgspec.json.encode(document) + b"\n\n")


def words(first: int, last: int) -> str:
    return "".join(f" t{token}" for token in range(first, last))


def usage(asked: Asked) -> dict[str, int]:
    prompt, output = asked.num_prompt_tokens, asked.num_tokens
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


def whole_answer(asked: Asked, *, is_chat: bool) -> dict[str, Any]:
    """An answer that is not streamed."""
    text = words(0, asked.num_tokens)
    said = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
    kind = "chat.completion" if is_chat else "text_completion"
    choices = [{"index": 0, **said, "finish_reason": "length"}]
    return {**DOCUMENT, "object": kind, "choices": choices, "usage": usage(asked)}


class Events:
    """The events of all streams. Those with tokens are made once and kept: a tick then only looks up its bytes."""

    def __init__(self, tokens_per_event: int) -> None:
        self.tokens_per_event = tokens_per_event
        self._made: dict[tuple[bool, int, int, bool], bytes] = {}

    def tokens(self, first: int, last: int, *, is_chat: bool, is_end: bool) -> bytes:
        """The event with the tokens from ``first`` to before ``last``."""
        key = (is_chat, first, last, is_end)
        if (found := self._made.get(key)) is None:
            text = words(first, last)
            choice = {"delta": {"content": text}} if is_chat else {"text": text}
            whole = {"index": 0, **choice, "logprobs": None, "finish_reason": "length" if is_end else None}
            found = self._made[key] = event({**DOCUMENT, "object": kind_of(is_chat=is_chat), "choices": [whole]})
        return found

    def end(self, asked: Asked, *, is_chat: bool) -> bytes:
        """What follows the event with the last token."""
        document = {**DOCUMENT, "object": kind_of(is_chat=is_chat), "choices": [], "usage": usage(asked)}
        return (event(document) if asked.has_usage else b"") + framed(DONE) + STREAM_END


def kind_of(*, is_chat: bool) -> str:
    return "chat.completion.chunk" if is_chat else "text_completion"


@dataclass(slots=True, eq=False)
class Stream:
    """One answer under way."""

    asked: Asked
    request_id: str
    is_chat: bool
    arrived_ns: int
    read_ns: int
    num_tokens: int
    next_token: int = 0
    waiting: list[bytes] = field(default_factory=list)
    """Events that a later send takes along."""
    sends_ns: "array[int]" = field(default_factory=lambda: array("q"))
    send_events: "array[int]" = field(default_factory=lambda: array("q"))
    event_tokens: "array[int]" = field(default_factory=lambda: array("q"))

    @property
    def is_over(self) -> bool:
        return self.next_token >= self.num_tokens

    def tick(self, events: Events, coalesce: int) -> bytes:
        """The bytes to send at this tick: none while events are held back for a later one."""
        first = self.next_token
        last = self.next_token = min(first + events.tokens_per_event, self.num_tokens)
        is_end = last == self.num_tokens
        self.waiting.append(events.tokens(first, last, is_chat=self.is_chat, is_end=is_end))
        self.event_tokens.append(last - first)
        if len(self.waiting) < coalesce and not is_end:
            return b""
        if not self.send_events:
            self.waiting.insert(0, HEAD)
        self.send_events.append(len(self.waiting) - (not self.send_events))
        if is_end:
            self.waiting.append(events.end(self.asked, is_chat=self.is_chat))
        content = self.waiting[0] if len(self.waiting) == 1 else b"".join(self.waiting)
        self.waiting.clear()
        return content

    def truth(self) -> Truth:
        return Truth(
            request_id=self.request_id,
            prompt_digest=self.asked.prompt_digest,
            arrived_ns=self.arrived_ns,
            read_ns=self.read_ns,
            sends_ns=self.sends_ns.tolist(),
            send_events=self.send_events.tolist(),
            event_tokens=self.event_tokens.tolist(),
            is_complete=self.is_over,
        )


SO_TIMESTAMPNS = 35
ANCILLARY_BYTES = socket.CMSG_SPACE(16)
TIMESPEC = struct.Struct("@qq")
READ_BYTES = 1 << 16
IDLE_NS = 4_000_000
"""Truth is written out when the next tick is further away than this."""
GOLDEN = (math.sqrt(5) - 1) / 2
"""Its multiples, without their whole parts, fill the unit interval evenly however many there are."""
SHARES = {"p50": 0.5, "p99": 0.99, "max": 1.0}
MODELS = {
    "object": "list",
    "data": [{"id": "paced", "object": "model", "created": 1700000000, "owned_by": "paced"}],
}


def realtime_less_monotonic_ns() -> int:
    """From the tightest of a few brackets: the wall clock read between two looks at the monotonic one."""
    brackets = []
    for _ in range(9):
        before_ns, real_ns, after_ns = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        brackets.append((after_ns - before_ns, real_ns - (before_ns + after_ns) // 2))
    return min(brackets)[1]


def quantiles_ms(values_ns: Sequence[int]) -> dict[str, float | None]:
    """The smallest values that these shares of all do not exceed."""
    ordered = sorted(values_ns)
    return {
        name: round(ordered[max(0, math.ceil(share * len(ordered)) - 1)] / 1e6, 4) if ordered else None
        for name, share in SHARES.items()
    }


class Connection:
    """One client: its parser's callbacks gather a request, and what it does not read yet waits in ``unsent``."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.parser = httptools.HttpRequestParser(self)
        self.stream: Stream | None = None
        self.unsent = bytearray()
        self.arrived_ns = self.read_ns = 0
        self.has_request = False
        self.path, self.request_id, self.body = "", "", bytearray()

    def on_message_begin(self) -> None:
        self.path, self.request_id, self.body = "", "", bytearray()

    def on_url(self, url: bytes) -> None:
        self.path += url.decode("latin-1")

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"x-request-id":
            self.request_id = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.has_request = True

    def send(self, content: bytes) -> bool:
        """False when some of it has to wait until the client reads."""
        if not self.unsent:
            try:
                sent = self.sock.send(content)
            except BlockingIOError:
                sent = 0
            if sent == len(content):
                return True
            content = content[sent:]
        self.unsent += content
        return False

    def reply(self, status: str, document: object) -> None:
        content = msgspec.json.encode(document)
        head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        self.send(head.encode() + content)


class PacedServer:
    """Accepts, reads, and sends each stream's next token when it is due."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.tick_ns: int = round(options.tick_ms * 1e6)
        self.events = Events(options.tokens_per_chunk)
        self.epoll = select.epoll()
        self.connections: dict[int, Connection] = {}
        self.due: list[tuple[int, int, Connection, Stream]] = []
        """A heap: when, number of the request, for whom, what."""
        self.ended: deque[Stream] = deque()
        self.lags_ns = array("q")
        self.num_requests = self.num_tokens = self.num_missed_ticks = self.num_backed_up = 0
        self.offset_ns = realtime_less_monotonic_ns()
        self.is_stopping = False
        self.truth = options.truth.open("ab") if options.truth else None
        self.listener = socket.create_server(("127.0.0.1", options.port), backlog=4096)
        self.random = random.Random(1)
        self.listener.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)  # accepted sockets inherit it
        self.listener.setblocking(False)
        self.epoll.register(self.listener.fileno(), select.EPOLLIN)

    def serve(self) -> None:
        while not self.is_stopping:
            self.send_due()
            wait_ns = self.due[0][0] - time.monotonic_ns() if self.due else 10 * IDLE_NS
            if self.ended and wait_ns > IDLE_NS:
                self.write(self.ended.popleft().truth())
                wait_ns = 0
            # select(2) waits by the microsecond, epoll_wait(2) by the millisecond.
            if wait_ns <= 0 or select.select([self.epoll.fileno()], [], [], wait_ns / 1e9)[0]:
                for number, happened in self.epoll.poll(0):
                    self.attend(number, happened)
        self.close()

    def attend(self, number: int, happened: int) -> None:
        if number == self.listener.fileno():
            self.accept()
            return
        connection = self.connections[number]
        try:
            if happened & select.EPOLLOUT:
                content = bytes(connection.unsent)
                connection.unsent.clear()
                if connection.send(content):
                    self.epoll.modify(number, select.EPOLLIN)
            if happened & ~select.EPOLLOUT:
                self.read(connection)
        except OSError as error:
            self.drop(connection, str(error))
        except httptools.HttpParserError as error:
            print(f"a connection that speaks no HTTP is closed: {error}", flush=True)
            self.drop(connection, "its client speaks no HTTP")

    def accept(self) -> None:
        while True:
            try:
                sock, _ = self.listener.accept()
            except BlockingIOError:
                return
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.connections[sock.fileno()] = Connection(sock)
            self.epoll.register(sock.fileno(), select.EPOLLIN)

    def read(self, connection: Connection) -> None:
        data, ancillary, _, _ = connection.sock.recvmsg(READ_BYTES, ANCILLARY_BYTES)
        if not data:
            self.drop(connection, "its client closed the connection")
            return
        connection.read_ns = connection.arrived_ns = time.monotonic_ns()
        for _level, kind, stamp in ancillary:
            if kind == SO_TIMESTAMPNS:
                seconds, nanoseconds = TIMESPEC.unpack(stamp)
                connection.arrived_ns = seconds * 1_000_000_000 + nanoseconds - self.offset_ns
        connection.parser.feed_data(data)
        if connection.has_request:
            connection.has_request = False
            self.answer(connection)

    def drop(self, connection: Connection, why: str) -> None:
        self.epoll.unregister(connection.sock.fileno())
        del self.connections[connection.sock.fileno()]
        connection.sock.close()
        if connection.stream is not None:
            print(f"request {connection.stream.request_id} broke off: {why}", flush=True)
            self.ended.append(connection.stream)
            connection.stream = None

    def answer(self, connection: Connection) -> None:
        path = connection.path.partition("?")[0]
        pages: dict[str, Any] = {"/v1/models": MODELS, "/health": {}, "/": {}}
        if path in ("/v1/completions", "/v1/chat/completions"):
            self.complete(connection, is_chat="chat" in path)
        elif path in pages:
            connection.reply("200 OK", pages[path])
        else:
            connection.reply("404 Not Found", {"error": {"message": f"nothing is served at {path}"}})

    def complete(self, connection: Connection, *, is_chat: bool) -> None:
        try:
            asked = msgspec.json.decode(connection.body, type=Asked)
        except msgspec.DecodeError as error:
            connection.reply("400 Bad Request", {"error": {"message": str(error)}})
            return
        if not asked.stream:
            connection.reply("200 OK", whole_answer(asked, is_chat=is_chat))
            return
        stream = connection.stream = Stream(
            asked=asked,
            request_id=connection.request_id or asked.prompt_digest,
            is_chat=is_chat,
            arrived_ns=connection.arrived_ns,
            read_ns=connection.read_ns,
            num_tokens=asked.num_tokens,
        )
        self.num_requests += 1
        heapq.heappush(self.due, (self.first_ns(stream), self.num_requests, connection, stream))

    def first_ns(self, stream: Stream) -> int:
        """When its first token is due. Requests that come together would share a phase if arrival alone gave it."""
        first_ns: int = stream.arrived_ns + self.options.ttft_ticks * self.tick_ns
        if self.options.phase == "common":
            return -(-first_ns // self.tick_ns) * self.tick_ns
        return first_ns + int(self.num_requests * GOLDEN % 1 * self.tick_ns)

    def send_due(self) -> None:
        due, tick_ns, monotonic_ns = self.due, self.tick_ns, time.monotonic_ns
        now_ns = monotonic_ns()
        while due and due[0][0] <= now_ns:
            due_ns, number, connection, stream = due[0]
            if connection.stream is not stream:  # its client has gone
                heapq.heappop(due)
                continue
            content = stream.tick(self.events, self.options.coalesce)
            now_ns = monotonic_ns()
            self.lags_ns.append(now_ns - due_ns)
            if stream.is_over:
                heapq.heappop(due)
            else:
                num_late = (now_ns - due_ns) // tick_ns
                self.num_missed_ticks += num_late
                heapq.heapreplace(due, (due_ns + (num_late + 1) * tick_ns, number, connection, stream))
            if content:
                self.send(connection, stream, content, now_ns)

    def send(self, connection: Connection, stream: Stream, content: bytes, now_ns: int) -> None:
        stream.sends_ns.append(now_ns)
        try:
            is_sent = connection.send(content)
        except OSError as error:
            self.drop(connection, str(error))
            return
        if not is_sent:
            self.num_backed_up += 1
            self.epoll.modify(connection.sock.fileno(), select.EPOLLIN | select.EPOLLOUT)
        if stream.is_over:
            connection.stream = None
            self.num_tokens += stream.num_tokens
            self.ended.append(stream)
            if is_sent and self.random.random() < self.options.close_frac:
                self.drop(connection, "it was closed behind its answer")

    def write(self, truth: Truth) -> None:
        if self.truth:
            self.truth.write(msgspec.json.encode(truth) + b"\n")
            self.truth.flush()

    def stats(self) -> dict[str, Any]:
        """``lag_ms``: how much later than due sends were made; ``backed_up``: sends that a client's full socket
        held up; ``tokens``: of complete answers."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return {
            "requests": self.num_requests,
            "tokens": self.num_tokens,
            "ticks": len(self.lags_ns),
            "missed_ticks": self.num_missed_ticks,
            "backed_up": self.num_backed_up,
            "cpu_s": round(usage.ru_utime + usage.ru_stime, 4),
            "lag_ms": quantiles_ms(self.lags_ns),
        }

    def close(self) -> None:
        for connection in list(self.connections.values()):
            self.drop(connection, "the server stops")
        for stream in self.ended:
            self.write(stream.truth())
        self.listener.close()
        print(msgspec.json.encode(self.stats()).decode(), flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0, help="on 127.0.0.1; default: a free one, which it prints")
    parser.add_argument("--truth", type=Path)
    parser.add_argument("--tick-ms", type=float, default=20.0)
    parser.add_argument("--ttft-ticks", type=int, default=1, help="ticks from arrival to the first token")
    parser.add_argument("--phase", choices=("common", "spread"), default="common")
    parser.add_argument("--tokens-per-chunk", type=int, default=1, metavar="K")
    parser.add_argument("--close-frac", type=float, default=0.0, help="share of answers that end their connections")
    parser.add_argument("--coalesce", type=int, default=1, metavar="K", help="events in one send, every K ticks")
    return parser.parse_args()


def main() -> None:
    server = PacedServer(arguments())

    def stop(*_: object) -> None:
        server.is_stopping = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    print(f"listening on {server.listener.getsockname()[1]}", flush=True)
    server.serve()


if __name__ == "__main__":
    main()
