"""Connections of a load: used again where the server keeps them, else opened ahead; the kernel stamps arrivals."""

import asyncio
import struct
import time
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from support.servers.paced_engine import PacedEngine, call, request, running, send
from support.servers.sse import event, total, written

from benchctl.load import clocks
from benchctl.load.client import StreamClient
from benchctl.load.clocks import KernelClock
from benchctl.load.schedule import Load
from benchctl.profile.arrival import Arrival
from benchctl.profile.sections import Timeouts
from benchctl.units import NS_PER_MS, NS_PER_S

BODY = b"".join((event(written("a", ids=[1])), event(written("a", ids=[1], finish="length")), total(2)))


@dataclass
class Server:
    """Answers with two tokens each, and closes a connection after ``answers`` of them or when it lies idle.

    ``framing`` says what ends a body: its last chunk, its ``length``, or the ``end`` of the connection. In place of
    all that it sends ``whole``.
    """

    answers: int | None = None
    says_so: bool = False
    idle_s: float | None = None
    line_end: bytes = b"\n"
    trailers: bytes = b""
    framing: str = "chunks"
    version: bytes = b"1.1"
    fields: bytes = b""
    whole: bytes | None = None
    asked: Counter[bytes] = field(default_factory=Counter)
    num_used_connections: int = 0
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def serve(self, reader, writer):
        self.tasks.add(asyncio.current_task())
        num_answers = 0
        try:
            while self.answers is None or num_answers < self.answers:
                head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), self.idle_s)
                lines = head.lower().split(b"\r\n")
                await reader.readexactly(
                    next(int(line[15:]) for line in lines if line.startswith(b"content-length:"))
                )
                self.asked[next(line[14:] for line in lines if line.startswith(b"x-request-id:"))] += 1
                num_answers += 1
                self.num_used_connections += num_answers == 1
                wire = self.wire(is_last=num_answers == self.answers)
                for part in (wire[: len(wire) // 2], wire[len(wire) // 2 :]):
                    writer.write(part)
                    await writer.drain()
                    await asyncio.sleep(0.01)
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    def wire(self, *, is_last):
        if self.whole is not None:
            return b"HTTP/1.1 200 OK\r\n" + self.whole
        closing = b"connection: close\r\n" if is_last and self.says_so else b""
        body = BODY.replace(b"\n", self.line_end)
        framing, sent = {
            "chunks": (
                b"transfer-encoding: chunked\r\n",
                b"%x\r\n%s\r\n0\r\n" % (len(body), body) + self.trailers + b"\r\n",
            ),
            "length": (b"Content-Length: %d\r\n" % len(body), body),
            "end": (b"", body),
        }[self.framing]
        return b"HTTP/%s 200 OK\r\n" % self.version + closing + self.fields + framing + b"\r\n" + sent

    @asynccontextmanager
    async def running(self):
        server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        async with server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            for task in self.tasks:
                task.cancel()
            await asyncio.gather(*self.tasks, return_exceptions=True)


def records_of(server, arrival, requests):
    async def go():
        records = []
        async with server.running() as url, StreamClient(url, Timeouts(connect_s=5.0)) as client:
            await Load(client, Arrival(**arrival), records.append).drive([call(one) for one in requests])
        return records

    return asyncio.run(go())


REQUESTS = [request(i, max_tokens=2) for i in range(40)]
ONCE_EACH = {f"r{i}".encode(): 1 for i in range(40)}


def measured(**forms):
    """The records of 40 requests over four slots, each of which was asked once, and the server."""
    server = Server(**forms)
    records = records_of(server, {"kind": "closed-loop", "max_concurrency": 4}, REQUESTS)
    assert (len(records), server.asked) == (40, ONCE_EACH)
    return records, server


def test_a_closed_loop_uses_as_many_connections_as_it_has_slots_where_the_server_keeps_them():
    whole = b'{"choices": [{"index": 0, "text": "ab", "finish_reason": "length"}]}'
    no_stream = b"content-length: %d\r\n\r\n%s" % (len(whole), whole)
    for forms, failure in (
        ({}, None),
        ({"framing": "length"}, None),
        ({"framing": "length", "fields": b"Connection:Keep-Alive\r\n"}, None),
        ({"framing": "length", "fields": b"Connection: keep-alive\r\n", "version": b"1.0"}, None),
        ({"line_end": b"\r\n"}, None),
        ({"line_end": b"\r"}, None),
        ({"trailers": b"server-timing: total;dur=1\r\n"}, None),
        ({"whole": no_stream}, "malformed-stream"),
    ):
        records, server = measured(**forms)
        assert {record.error and record.error.kind for record in records} == {failure}, forms
        assert failure or [len(record.choices[0].chunk_ns) for record in records] == [2] * 40
        assert server.num_used_connections == 4, forms


def test_a_connection_is_not_used_again_where_the_answer_does_not_allow_it():
    for forms in (
        {"framing": "length", "fields": b"Connection:Close\r\n"},
        {"framing": "length", "fields": b"connection: TE, close\r\n"},
        {"framing": "length", "version": b"1.0"},
        {"framing": "end", "answers": 1},
        {"framing": "end", "answers": 1, "version": b"1.0", "fields": b"Connection: keep-alive\r\n"},
        {"whole": b"content-length: %d\r\n\r\n%s" % (len(BODY), BODY + b"more")},
    ):
        records, server = measured(**forms)
        assert "whole" in forms or {record.error for record in records} == {None}, forms
        assert server.num_used_connections == 40, forms
        assert not any(record.is_resent for record in records)


@pytest.mark.parametrize("says_so", [True, False], ids=["having said so", "silently"])
@pytest.mark.parametrize("answers", [1, 3])
def test_each_request_is_answered_once_by_a_server_that_closes_connections(answers, says_so):
    records, server = measured(answers=answers, says_so=says_so)
    assert {record.error for record in records} == {None}
    assert server.num_used_connections >= 40 / answers
    num_resent = sum(record.is_resent for record in records)
    assert num_resent == 0 if says_so else num_resent <= 40 / answers
    assert answers != 1 or num_resent <= 4, "once is enough to learn that this server closes all"


def test_requests_that_come_while_the_server_closes_idle_connections_are_answered():
    server = Server(idle_s=0.03)  # by which also those are closed that lie ready for a request that is not due yet
    requests = [request(i, max_tokens=2, arrival_ns=i * 45 * NS_PER_MS) for i in range(40)]
    records = records_of(server, {"kind": "trace"}, requests)
    assert [record.error for record in records] == [None] * 40
    assert server.asked == ONCE_EACH


HOUR_NS = 3600 * NS_PER_S


class Wall:
    """A wall clock that a test sets, and the monotonic clock beside it."""

    now_ns = 1_000 * NS_PER_S
    offset_ns = HOUR_NS
    width_ns = 100

    def stamp(self, at_ns: int) -> bytes:
        return struct.pack("@qq", *divmod(at_ns + self.offset_ns, NS_PER_S))


@pytest.fixture(name="wall")
def _wall(monkeypatch):
    wall = Wall()
    monkeypatch.setattr(clocks, "realtime_less_monotonic", lambda: (wall.width_ns, wall.now_ns, wall.offset_ns))
    return wall


def test_a_stamp_is_the_time_of_arrival_and_never_later_than_the_read(wall):
    clock = KernelClock()
    read_ns = wall.now_ns + 50 * NS_PER_MS
    assert clock.arrival_ns(wall.stamp(read_ns - 7_000), read_ns) == read_ns - 7_000
    assert clock.arrival_ns(wall.stamp(read_ns + 3_000), read_ns) == read_ns  # two clocks are never read at once
    assert clock.arrival_ns(wall.stamp(read_ns + 1 * NS_PER_MS), read_ns) is None
    assert clock.arrival_ns(b"", read_ns) is None
    wall.width_ns, wall.offset_ns = 5 * NS_PER_MS, HOUR_NS + 2 * NS_PER_MS
    clock.sample()
    assert len(clock.offsets) == 1, "a look that was interrupted teaches nothing"


@pytest.mark.parametrize("step_ns", [NS_PER_S, -NS_PER_S, 40_000, -HOUR_NS], ids=str)
def test_no_read_since_the_last_look_before_a_clock_was_set_has_a_time_of_the_kernel(wall, step_ns):
    clock = KernelClock()
    before_ns, early = wall.now_ns + 10 * NS_PER_MS, wall.stamp(wall.now_ns + 9 * NS_PER_MS)
    wall.now_ns += 20 * NS_PER_MS
    clock.sample()
    between_ns, unsure = wall.now_ns + 5 * NS_PER_MS, wall.stamp(wall.now_ns + 4 * NS_PER_MS)
    wall.now_ns += 100 * NS_PER_MS
    wall.offset_ns += step_ns
    clock.sample()
    after_ns, late = wall.now_ns + 10 * NS_PER_MS, wall.stamp(wall.now_ns + 9 * NS_PER_MS)
    assert [offset.realtime_less_monotonic_ns for offset in clock.offsets] == [HOUR_NS, HOUR_NS + step_ns]
    assert clock.arrival_ns(early, before_ns) == before_ns - NS_PER_MS
    assert clock.arrival_ns(unsure, between_ns) is None
    assert clock.arrival_ns(late, after_ns) is None
    wall.now_ns += 200 * NS_PER_MS
    clock.sample()
    assert clock.arrival_ns(wall.stamp(wall.now_ns), wall.now_ns) is None, "for the rest of the load"


def test_times_of_streams_hold_though_the_loop_stands_still_again_and_again(tmp_path):
    async def go(how):
        async with StreamClient(how.base_url, how.timeouts) as client:
            asking = asyncio.create_task(send(client, call(request(0, max_tokens=30, gap_ms=20)), 0))
            while not asking.done():
                await asyncio.sleep(0.001)
                time.sleep(0.015)  # noqa: ASYNC251 - the loop is to stand still
            return await (await asking).record()

    with running(tmp_path) as how:
        record = asyncio.run(go(how))
    assert record.error is None
    if record.stamps != "kernel":
        pytest.skip("this kernel does not stamp what arrives (SO_TIMESTAMPNS)")
    truth = PacedEngine(truth=tmp_path / "truth.jsonl").truths()["r0"]
    (choice,) = record.choices
    errors_ns = sorted(seen - sent for seen, sent in zip(choice.chunk_ns, truth["sent_ns"], strict=True))
    late_ns = sorted(choice.chunk_late_ns)
    assert late_ns[len(late_ns) * 3 // 4] > 3 * NS_PER_MS
    # The server may be held up between its note and its send, but not in half of them.
    assert 0 <= errors_ns[len(errors_ns) // 2] < 1 * NS_PER_MS
