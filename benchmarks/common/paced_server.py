"""A server that streams tokens at set times and writes down when it did: the truth for load generators.

It speaks as much of the OpenAI protocol as they ask for (completions and chat, streamed or whole, /v1/models,
/health), computes nothing, and costs little: one process, one epoll loop, one ``send`` for each tick and stream.
Tokens come every ``--tick-ms``: at the same moment for all streams, as an engine's steps bring them
(``--phase common``), or for each stream at a moment of its own within the tick (``spread``). A tick that cannot be
kept is left out and counted: the server never bunches what it is late with.

    python -m benchmarks.common.paced_server --port 8000 --truth truth.jsonl [--tick-ms 20] [--phase common|spread]

``--truth`` gets one line for each streamed request that ended (``Truth`` in paced_answer.py). Times are nanoseconds
of CLOCK_MONOTONIC, which all processes of a machine share. A request's arrival is the kernel's stamp, so that a
server that reads late does not move it. The clocks are related here and not by benchctl's code, which is what is
being checked. ``GET /stats``, and the last line of the output, say what the server cost and how late it was.
"""

import argparse
import heapq
import math
import resource
import select
import signal
import socket
import struct
import time
from array import array
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httptools
import msgspec

from benchmarks.common.paced_answer import Asked, Events, Stream, Truth, whole_answer

SO_TIMESTAMPNS = 35
ANCILLARY_BYTES = socket.CMSG_SPACE(16)
TIMESPEC = struct.Struct("@qq")
READ_BYTES = 1 << 16
IDLE_NS = 4_000_000
"""Truth is written out when the next tick is further away than this."""
GOLDEN = (math.sqrt(5) - 1) / 2
"""Its multiples, without their whole parts, fill the unit interval evenly however many there are."""
FRAMING = b"transfer-encoding: chunked\r\n"
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


def quantile_ms(values_ns: Sequence[int], share: float) -> float | None:
    """The smallest value that ``share`` of them do not exceed."""
    ordered = sorted(values_ns)
    return round(ordered[max(0, math.ceil(share * len(ordered)) - 1)] / 1e6, 4) if ordered else None


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
        self.reply_bytes(status, msgspec.json.encode(document))

    def reply_bytes(self, status: str, content: bytes) -> None:
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
        if path in ("/v1/completions", "/v1/chat/completions"):
            self.complete(connection, is_chat="chat" in path)
        elif path == "/v1/models":
            connection.reply("200 OK", MODELS)
        elif path == "/stats":
            connection.reply("200 OK", self.stats())
        elif path in ("/health", "/"):
            connection.reply("200 OK", {})
        else:
            connection.reply("404 Not Found", {"error": {"message": f"nothing is served at {path}"}})

    def complete(self, connection: Connection, *, is_chat: bool) -> None:
        try:
            asked = msgspec.json.decode(connection.body, type=Asked)
        except msgspec.DecodeError as error:
            connection.reply("400 Bad Request", {"error": {"message": str(error)}})
            return
        if not asked.stream:
            connection.reply_bytes("200 OK", whole_answer(asked, is_chat=is_chat))
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
            if self.options.closes == "said":
                content = content.replace(FRAMING, FRAMING + b"connection: close\r\n", 1)
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
            if self.options.closes is not None:
                self.drop(connection, "the answer has ended")

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
            "open": sum(connection.stream is not None for connection in self.connections.values()),
            "cpu_s": round(usage.ru_utime + usage.ru_stime, 4),
            "lag_ms": {name: quantile_ms(self.lags_ns, share) for name, share in SHARES.items()},
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
    parser.add_argument("--coalesce", type=int, default=1, metavar="K", help="events in one send, every K ticks")
    closes = "close each connection after its answer, having said so in the head of the answer or not"
    parser.add_argument("--closes", choices=("said", "silently"), help=closes)
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
