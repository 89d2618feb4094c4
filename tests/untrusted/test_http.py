"""Documents of servers: read within bounds of size and time, whatever the server sends."""

import asyncio
import gzip
import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from threading import Event

import httpx
import pytest
from support.servers.parts_server import Writer, serving, writing

import benchctl
from benchctl.load.control import control_client
from benchctl.measure.sending import undescribed_fields
from benchctl.measure.telemetry.samplers import prometheus_samples
from benchctl.profile.sections import Timeouts
from benchctl.untrusted.http import fetch, fetch_json, fetch_now, recordable

MIB = 1 << 20
HEAD = b"HTTP/1.1 200 OK\r\n"
CLOSE = HEAD + b"connection: close\r\n\r\n"
CHUNK = b"%x\r\n%s\r\n" % (MIB, b" " * MIB)


def zipped(content: bytes) -> bytes:
    body = gzip.compress(content, mtime=0)  # the time would differ in every process
    return HEAD + b"content-encoding: gzip\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)


def document(content: bytes) -> bytes:
    return HEAD + b"content-length: %d\r\n\r\n%s" % (len(content), content)


def endless(head: bytes, part: bytes, sent: list[int]) -> Callable[[Writer], Awaitable[None]]:
    async def answer(writer: Writer) -> None:
        writer.write(head)
        while True:
            writer.write(part)
            await writer.drain()
            sent[0] += len(part)

    return answer


def fetched(
    answer: Callable[[Writer], Awaitable[None]], *, is_plain: bool = True, **limits: float
) -> httpx.Response:
    async def go() -> httpx.Response:
        async with serving(answer) as url:
            plain = control_client(url, Timeouts())
            async with plain if is_plain else httpx.AsyncClient(base_url=url) as client:
                return await fetch(client, "GET", "/v1/models", **limits)

    return asyncio.run(go())


def test_a_document_is_read_whole() -> None:
    for is_plain in (True, False):
        for wire in (document(b'{"a": 1}'), zipped(b'{"a": 1}')):
            response = fetched(writing(wire), is_plain=is_plain)
            assert (response.status_code, response.json()) == (200, {"a": 1})


@pytest.mark.parametrize("is_plain", [True, False])
@pytest.mark.parametrize(
    ("head", "part"),
    [
        (CLOSE, b" " * MIB),
        (HEAD + b"content-length: 99999999999\r\n\r\n", b" " * MIB),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n", CHUNK),
        (HEAD + b"x-endless: ", b"x" * MIB),
        (HEAD, b"x: 1\r\n" * 10_000),
    ],
    ids=["until close", "content-length", "chunked", "one header", "headers"],
)
def test_reading_stops_at_the_bound(head: bytes, part: bytes, is_plain: bool) -> None:
    sent = [0]
    with pytest.raises(httpx.RemoteProtocolError):
        fetched(endless(head, part, sent), is_plain=is_plain)
    assert sent[0] < 32 * MIB


@pytest.mark.parametrize("is_plain", [True, False])
def test_what_was_compressed_is_unpacked_up_to_the_bound_and_a_byte_now_and_then_ends_with_the_time(
    is_plain,
) -> None:
    bomb = zipped(bytes(200 * MIB))
    assert len(bomb) < MIB
    with pytest.raises(httpx.RemoteProtocolError, match="more than 16 MiB"):
        fetched(writing(bomb), is_plain=is_plain)
    drip = writing(CLOSE, *[part for _ in range(100) for part in (b" ", 0.1)])
    with pytest.raises(httpx.ReadTimeout, match=r"not answered within 0\.5 s"):
        fetched(drip, is_plain=is_plain, limit_s=0.5)


def test_a_coding_that_was_not_requested_is_refused() -> None:
    for coding in (b"br", b"zstd", b"\x1b[2J"):
        wire = HEAD + b"content-encoding: " + coding + b"\r\ncontent-length: 4\r\n\r\nabcd"
        with pytest.raises(httpx.HTTPError) as caught:
            fetched(writing(wire))
        assert "\x1b" not in str(caught.value)


def test_what_is_no_json_object_is_one_kind_of_error_and_describes_nothing() -> None:
    async def go(content: bytes, *, is_object: bool) -> None:
        async with serving(writing(document(content))) as url, control_client(url, Timeouts()) as client:
            assert await undescribed_fields(client, ["a"]) == ()
            if not is_object:
                with pytest.raises(httpx.DecodingError, match="does not answer with a JSON object"):
                    await fetch_json(client, "/server_info")

    deep = (b"[" * 100_000, b'{"a":' * 100_000)
    for content in (b"[]", b"17", b"null", b"{", b'"a"', b"\xff", b"", *deep, b'{"a": \x00}'):
        asyncio.run(go(content, is_object=False))
    for schema in (5, {"properties": 7}, {"properties": [["a"]]}, {"$ref": 3}, {"$ref": "#/x"}):
        path = {"post": {"requestBody": {"content": {"application/json": {"schema": schema}}}}}
        asyncio.run(go(json.dumps({"paths": {"/v1/completions": path}}).encode(), is_object=True))


def test_what_a_server_states_of_itself_fits_into_a_record() -> None:
    for stated, recorded in (
        ("vllm 1.2", "vllm 1.2"),
        (4096, 4096),
        (None, None),
        ({"a": [1, 2.5, True]}, {"a": [1, 2.5, True]}),
        ("x" * 3_000_000, "x" * 2000),
        (10**30, 10**30),
        ({"a": 10**5000}, "(a value that no record holds)"),
        (list(range(100_000)), json.dumps(list(range(100_000)), separators=(",", ":"))[:2000]),
    ):
        assert recordable(stated) == recorded


@pytest.mark.parametrize(
    ("page", "problem"),
    [
        (b"a 1\n" * 1_000_000, "50000 lines"),
        (b"a_long_name_of_a_counter_of_a_server 1\n" * 1_000_000, "more than 4 MiB"),
        (b"a{" + b",".join(b'l%d="x"' % i for i in range(100_000)) + b"} 1\n", "16384 characters"),
    ],
)
def test_a_page_of_counters_beyond_all_sizes_ends_the_sampler_and_not_the_load(page: bytes, problem: str) -> None:
    async def go() -> None:
        async with serving(writing(document(page))) as url:
            with pytest.raises((OSError, ValueError), match=problem):
                await asyncio.to_thread(next, prometheus_samples(f"{url}/metrics", 1.0, Event()))

    asyncio.run(go())


def test_a_blocking_client_is_bounded_as_well() -> None:
    async def go() -> None:
        async with serving(endless(CLOSE, b" " * MIB, [0])) as url:
            with httpx.Client() as client, pytest.raises(httpx.RemoteProtocolError, match="more than 2 MiB"):
                await asyncio.to_thread(fetch_now, client, url, limit_s=5.0, max_bytes=2 * MIB)

    asyncio.run(go())


def test_every_request_for_a_document_goes_through_the_bound() -> None:
    package = Path(benchctl.__file__).parent
    unbounded = re.compile(r"(?:client|control|_client)\.(?:get|post|request|stream)\(")
    files = [path for room in ("engines", "measure", "cli", "micro") for path in (package / room).rglob("*.py")]
    assert len(files) > 80
    assert [str(path) for path in files if unbounded.search(path.read_text())] == []
