"""Every way in which a request can fail is a class of its own that keeps what had come, also of hostile servers."""

import asyncio
import json
import socket
import ssl
import struct
import subprocess
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TypeAlias

import httpx
import pytest
import uvloop
from msgspec.structs import replace
from support.servers.paced_engine import call, request, send
from support.servers.parts_server import Writer, serving, writing

from benchctl.load.client import StreamClient
from benchctl.load.exchange import Exchange
from benchctl.load.schedule import Load
from benchctl.profile.arrival import Arrival
from benchctl.profile.sections import Timeouts
from benchctl.records.files import encode
from benchctl.records.record import Call, RequestRecord
from benchctl.untrusted import LINE_BYTES, MESSAGE_CHARS

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2}}\n\ndata: [DONE]\n\n'
PROGRAMS = Path(__file__).parents[1] / "support" / "servers" / "programs"
TLS = PROGRAMS / "loopback.pem"


def token(number: int, finish: str = "null") -> bytes:
    return b'data: {"choices":[{"index":0,"text":"t%d ","finish_reason":%s}]}\n\n' % (number, finish.encode())


Answer: TypeAlias = Callable[[Writer], Awaitable[None]]
GOOD = HEAD + token(0) + token(1, '"length"') + USAGE


TWO_TOKENS = call(request(0, max_tokens=2))


async def record_from(url: str, asking: Call = TWO_TOKENS, **limits: float) -> RequestRecord:
    async with StreamClient(url, Timeouts(**limits)) as client:
        return await (await send(client, asking, 1)).record()


def asked(
    answer: Answer, asking: Call = TWO_TOKENS, *, context: ssl.SSLContext | None = None, **limits: float
) -> RequestRecord:
    """The record of a request that is answered so."""

    async def ask() -> RequestRecord:
        async with serving(answer, context) as url:
            return await record_from(url, asking, **limits)

    return asyncio.run(ask())


async def reset(writer: Writer) -> None:
    writer.write(HEAD + token(0))
    await writer.drain()
    await asyncio.sleep(0.05)
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@pytest.mark.parametrize(
    ("answer", "limits", "kind", "message", "num_chunks"),
    [
        (writing(30.0), {"first_token_s": 0.2}, "first-token-timeout", "0.2 s (timeouts.first_token_s)", 0),
        (
            writing(HEAD, *[b": still here\n\n", 0.05] * 40),
            {"first_token_s": 0.3},
            "first-token-timeout",
            "no token within 0.3 s",
            0,
        ),
        (
            writing(HEAD, token(0), *[b": still here\n\n", 0.05] * 40),
            {"between_tokens_s": 0.3},
            "between-tokens-timeout",
            "0.3 s (timeouts.between_tokens_s)",
            1,
        ),
        (
            writing(HEAD, token(0), 30.0),
            {"request_s": 0.3, "between_tokens_s": 5.0},
            "total-timeout",
            "0.3 s (timeouts.request_s)",
            1,
        ),
        (reset, {}, "reset", "the server reset the connection in mid-stream", 1),
        (writing(), {}, "early-close", "the server closed the connection before it answered", 0),
        (
            writing(HEAD.replace(b"connection: close", b"content-length: 999"), token(0)),
            {},
            "early-close",
            "in mid-stream",
            1,
        ),
        (writing(HEAD, token(0)), {}, "early-close", "0 of 1 choices finished", 1),
        (
            writing(b'HTTP/1.1 429 Slow Down\r\ncontent-length: 31\r\n\r\n{"error":{"message":"too many"}}'[:-1]),
            {},
            "http-status",
            "too many",
            0,
        ),
        (writing(b"HTTP/1.1 503 X\r\n\r\nno engine"), {}, "http-status", "no engine", 0),
        (writing(HEAD, token(0), b"data: {broken\n\n", USAGE), {}, "malformed-stream", "cannot be read", 1),
        (writing(b"220 mail.example ESMTP\r\n"), {}, "malformed-http", "the answer is not HTTP", 0),
        (
            writing(HEAD, token(0), b'data: {"error":{"message":"out of memory"}}\n\n'),
            {},
            "server-error",
            "out of memory",
            1,
        ),
        (
            writing(HEAD, token(0, '"stop"'), USAGE.replace(b":2}", b":1}")),
            {},
            "wrong-length",
            "1 output tokens where ignore_eos demands 2",
            1,
        ),
    ],
)
def test_each_failure_is_of_its_own_class(answer, limits, kind, message, num_chunks):
    record = asked(answer, **limits)
    assert (record.error.kind, message in record.error.message) == (kind, True), record.error
    assert sum(len(choice.chunk_ns) for choice in record.choices) == num_chunks
    assert record.done_ns >= record.sent_ns


def test_tokens_that_keep_coming_never_reach_the_limit_between_them():
    parts = (HEAD, 0.4, token(0), 0.4, token(1, '"length"'), 0.4, USAGE)
    record = asked(writing(*parts), between_tokens_s=0.9, first_token_s=0.9)
    assert record.error is None


@pytest.mark.parametrize(
    ("waits", "limits", "kind"),
    [
        ((0.06, 0.0), {"first_token_s": 0.05}, "first-token-timeout"),
        ((0.0, 0.06), {"between_tokens_s": 0.05}, "between-tokens-timeout"),
    ],
)
def test_a_token_that_was_just_too_late_was_too_late_whenever_anybody_looked(waits, limits, kind):
    before, between = waits
    parts = (HEAD, before, token(0), between, token(1, '"length"'), USAGE)
    records = [asked(writing(*parts), **limits) for _ in range(4)]
    assert [record.error and record.error.kind for record in records] == [kind] * 4


def test_a_server_that_repeats_the_key_does_not_bring_it_into_the_results():
    body = b'{"error":{"message":"bad key Bearer sesame-open, sesame-open"}}'
    refusal = b"HTTP/1.1 401 X\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
    keyed = replace(call(request(0)), headers={"Authorization": "Bearer sesame-open"})
    record = asked(writing(refusal), keyed)
    assert record.error.message == "bad key Bearer [redacted: Authorization], [redacted: Authorization]"


def test_a_port_that_nobody_listens_on_one_that_nobody_accepts_from_and_no_host_are_told_apart():
    with socket.socket() as closed, socket.socket() as full, ExitStack() as fillers:
        closed.bind(("127.0.0.1", 0))
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):
            filler = fillers.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        hosts = [f"127.0.0.1:{each.getsockname()[1]}" for each in (closed, full)]
        hosts.append("no-such-host.invalid:1")
        records = [asyncio.run(record_from(f"http://{host}", connect_s=0.3)) for host in hosts]
    kinds = [record.error and record.error.kind for record in records]
    assert kinds == ["connect-refused", "connect-timeout", "connect-failed"]
    assert {(record.sent_ns, record.status) for record in records} == {(None, None)}


def test_a_client_that_is_held_up_while_it_connects_blames_no_connection(monkeypatch: pytest.MonkeyPatch):
    connect = socket.create_connection

    def connect_late(*args: object) -> socket.socket:
        time.sleep(0.5)
        return connect(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "create_connection", connect_late)

    async def ask() -> list[RequestRecord]:
        async with serving(writing(GOOD)) as url, StreamClient(url, Timeouts(connect_s=0.2)) as client:
            first = await asyncio.gather(*(send(client, call(request(i, max_tokens=2)), 1) for i in range(3)))
            ended: asyncio.Future[Exchange] = asyncio.get_running_loop().create_future()
            late = client.begin(call(request(3, max_tokens=2)), ended.set_result)
            client.prepare(late)
            asyncio.get_running_loop().call_soon(time.sleep, 0.5)
            await asyncio.sleep(0.3)
            client.launch(late)
            await ended
            return [await exchange.record() for exchange in (*first, late)]

    assert [record.error for record in uvloop.run(ask())] == [None] * 4


def test_a_redirect_is_refused_and_says_which_address_to_give():
    ends = (b"content-length: 0\r\n\r\n", b"transfer-encoding: chunked\r\n\r\nno length\r\n")
    for there in ("https://127.0.0.1:1/v1", "http://127.0.0.1:1/v1", "/v2/completions"):
        for end in ends:
            record = asked(writing(b"HTTP/1.1 307 X\r\nlocation: %s\r\n%s" % (there.encode(), end)))
            assert (record.error.kind, record.error.status) == ("http-status", 307)
            assert (
                record.error.message == f"the server redirects requests to {there}; use that address for the server"
            )


@pytest.fixture(name="tls")
def _tls() -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(TLS)
    return context


def test_tls_goes_through_a_transport_of_httpx_and_says_so_and_fails_as_without(tls, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(TLS))
    record = asked(writing(GOOD), context=tls)
    assert record.error is None
    assert (record.route, record.stamps, record.completion_tokens) == ("httpx", "loop", 2)
    assert record.choices[0].chunk_late_ns is None
    cut = HEAD.replace(b"connection: close", b"content-length: 999")
    for answer, kind, message in (
        (writing(), "early-close", "the server closed the connection before it answered"),
        (writing(HEAD, token(0)), "early-close", "0 of 1 choices finished"),
        (writing(cut, token(0)), "early-close", "mid-stream"),
        (writing(b"220 mail.example ESMTP\r\n\r\n"), "malformed-http", "the answer is not HTTP"),
        (writing(b"HTTP/1.1 503 X\r\n\r\nno engine"), "http-status", "no engine"),
    ):
        error = asked(answer, context=tls).error
        assert (error.kind, message in error.message) == (kind, True), error


def test_a_server_that_cannot_be_spoken_to_over_tls_says_why(tls):
    async def go() -> tuple[RequestRecord, RequestRecord]:
        async with serving(writing(GOOD), tls) as url:
            async with StreamClient(url, Timeouts()) as client:
                with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
                    await client.control.get("/v1/models")
            distrusted = await record_from(url)
        return distrusted, await record_from(url)

    distrusted, absent = asyncio.run(go())
    assert (distrusted.error.kind, absent.error.kind) == ("connect-failed", "connect-refused")
    assert "certificate verify failed" in distrusted.error.message


def test_a_large_prompt_is_sent_whole_though_the_socket_takes_it_in_parts():
    assert asked(writing(GOOD), call(request(0, max_tokens=2, padding="x" * 20_000_000))).error is None


BODY = GOOD.removeprefix(HEAD)
CHUNKED = HEAD.replace(b"connection: close", b"transfer-encoding: chunked") + b"%x\r\n%s\r\n" % (len(BODY), BODY)
SIZED = HEAD.replace(b"connection: close", b"content-length: %d" % len(BODY)) + BODY
HEAD_END = SIZED.index(b"\r\n\r\n")


def test_an_answer_is_over_with_its_last_byte_though_its_connection_stays_open():
    for parts in (
        (CHUNKED, b"0\r\n\r\n"),
        (CHUNKED, b"0", b"\r", b"\n\r", b"\n"),
        (CHUNKED[:20], CHUNKED[20:] + b"0\r\n\r\n"),
        (SIZED,),
        (SIZED[:HEAD_END], SIZED[HEAD_END:200], SIZED[200:]),
        (b"HTTP/1.1 100 Continue\r\n\r\n", SIZED[:100], SIZED[100:]),
    ):
        record = asked(writing(*[piece for part in parts for piece in (part, 0.02)], 30.0), request_s=5.0)
        assert (record.error, record.completion_tokens) == (None, 2), parts


@pytest.fixture(scope="module", name="hostile")
def _hostile() -> Iterator[str]:
    with subprocess.Popen(
        [sys.executable, str(PROGRAMS / "hostile_server.py")], stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.kill()


@pytest.mark.parametrize(
    ("attack", "kind", "message"),
    [
        ("line", "oversized-line", "no end within 16 MiB"),
        ("line-until-close", "oversized-line", "no end within 16 MiB"),
        ("data-lines", "oversized-line", "no end within 16 MiB"),
        ("values", "oversized-line", "more than 262144 values"),
        ("choices", "unrequested-choice", "a choice 1 where choices 0 to 0 were requested"),
        ("choice-201", "unrequested-choice", "a choice 200 where"),
        ("far-choice", "malformed-stream", "cannot be read"),
        ("tokens", "oversized-answer", "no end within 32 MiB"),
        ("after-done", "oversized-answer", "after [DONE]"),
        ("comments", "oversized-line", "no end within 16 MiB"),
        ("head", "oversized-head", "64 KiB"),
        ("headers", "oversized-head", "256 headers"),
        ("many-headers", "oversized-head", "256 headers"),
        ("interim", "oversized-head", "64 KiB"),
        ("extension", "oversized-answer", "no end within 32 MiB"),
        ("trailers", "oversized-answer", "no end within 32 MiB"),
        ("error-body", "http-status", "xxxx"),
        ("error-length", "http-status", "xxxx"),
        ("gzip", "malformed-http", "compressed (gzip), which was not requested"),
        ("negative-length", "malformed-http", "not HTTP"),
        ("huge-length", "malformed-http", "not HTTP"),
        ("chunk-size", "malformed-http", "breaks in the framing"),
        ("nested", "malformed-stream", "nested too deeply"),
        ("nested-error", "malformed-stream", "nested too deeply"),
        ("nested-call", "malformed-stream", "nested too deeply"),
        ("number-token", "malformed-stream", "$.choices[0].text"),
        ("list-token", "malformed-stream", "$.choices[0].text"),
        ("word-ids", "malformed-stream", "$.choices[0].token_ids[0]"),
        ("broken-text", "malformed-stream", "not UTF-8"),
        ("surrogate", "malformed-stream", "cannot be read"),
        ("bare-nul", "malformed-stream", "invalid character"),
        ("minus-usage", "malformed-stream", "$.usage.completion_tokens"),
        ("huge-usage", "malformed-stream", "$.usage.completion_tokens"),
        ("true-usage", "malformed-stream", "$.usage.completion_tokens"),
        ("float-usage", "malformed-stream", "$.usage.completion_tokens"),
        ("text-usage", "malformed-stream", "$.usage.completion_tokens"),
        ("null-usage", "malformed-stream", "tokens cannot be counted"),
    ],
)
def test_each_attack_is_one_failed_request_of_its_class(hostile, attack, kind, message):
    record = asyncio.run(record_from(f"{hostile}/{attack}", request_s=60.0))
    assert (record.error.kind, message in record.error.message) == (kind, True), record.error
    assert len(record.error.message) <= MESSAGE_CHARS
    assert len(encode(record)) < LINE_BYTES


def test_a_byte_per_second_ends_with_the_time_of_the_request_and_an_endless_finish_reason_is_cut(hostile):
    assert asyncio.run(record_from(f"{hostile}/drip", request_s=1.0)).error.kind == "total-timeout"
    record = asyncio.run(record_from(f"{hostile}/long-reason"))
    assert (record.error, record.choices[0].finish_reason) == (None, "x" * 64)


def test_the_load_goes_on_among_attacks(hostile):
    kept: list[RequestRecord] = []
    paths = ["good", "choices", "good", "tokens", "head", "good", "after-done", "nested", "good"]

    async def go() -> None:
        async with StreamClient(hostile, Timeouts(request_s=60.0)) as client:
            load = Load(client, Arrival(kind="closed-loop", max_concurrency=2), kept.append)
            await load.drive(
                replace(call(request(i, max_tokens=2)), path=f"/{path}/v1") for i, path in enumerate(paths)
            )

    asyncio.run(go())
    fine = {record.index for record in kept if record.error is None}
    assert (len(kept), fine) == (len(paths), {i for i, path in enumerate(paths) if path == "good"})


MEASURED = textwrap.dedent(
    """
    import asyncio, json, re, sys
    from pathlib import Path
    from support.servers.paced_engine import call, request, send
    from benchctl.load.client import StreamClient
    from benchctl.profile.sections import Timeouts

    async def go(url, num_streams):
        async with StreamClient(url, Timeouts(request_s=60.0)) as client:
            asked = [send(client, call(request(i, max_tokens=2)), 1) for i in range(num_streams)]
            return [(await exchange.record()).error.kind for exchange in await asyncio.gather(*asked)]

    def peak_mb():
        return int(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024

    url, num_streams, *attacks = sys.argv[1:]
    asyncio.run(go(url + "/choice-201", 1))
    before_mb = peak_mb()
    told = [(asyncio.run(go(f"{url}/{attack}", int(num_streams))), peak_mb() - before_mb) for attack in attacks]
    print(json.dumps(told))
    """
)


@pytest.mark.slow
def test_lines_of_200_megabytes_at_several_streams_take_little_memory(hostile):
    attacks = {"tokens": "oversized-answer", "line": "oversized-line", "values": "oversized-line"}
    arguments = [sys.executable, "-c", MEASURED, hostile, "4", *attacks]
    path = {"PYTHONPATH": ":".join(filter(None, sys.path))}
    told = subprocess.run(arguments, capture_output=True, text=True, check=True, env=path, timeout=120)
    for (kinds, grown_mb), (attack, kind) in zip(json.loads(told.stdout), attacks.items(), strict=True):
        assert kinds == [kind] * 4
        assert grown_mb < 4 * 2 * LINE_BYTES / (1 << 20), attack
