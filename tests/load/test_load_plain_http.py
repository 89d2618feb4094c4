"""What is asked of a server beside the measured streams, by a transport of our own."""

import asyncio
import gzip
from collections.abc import Awaitable, Callable

import httpx
import pytest
from support.servers.parts_server import serving, writing

from benchctl.load.control import control_client
from benchctl.profile.sections import Timeouts

BODY = b'{"data": [{"id": "paced"}]}'
HALVES = b"%x\r\n%s\r\n%x\r\n%s\r\n0\r\n\r\n" % (9, BODY[:9], len(BODY) - 9, BODY[9:])


def asked(
    *parts: bytes | float,
    ask: Callable[[httpx.AsyncClient], Awaitable[httpx.Response]] = lambda client: client.get("/v1/models?x=1"),
) -> tuple[httpx.Response, bytes]:
    """What a server that writes ``parts``, waits the seconds among them and then closes is understood to say, and
    what it was asked.
    """
    received = bytearray()

    async def go() -> httpx.Response:
        async with (
            serving(writing(*parts), received=received) as url,
            control_client(f"{url}/base", Timeouts()) as client,
        ):
            return await ask(client)

    return asyncio.run(go()), bytes(received)


@pytest.mark.parametrize(
    "parts",
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(BODY), BODY), 30.0),
        (b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(BODY), BODY[:4], 0.01, BODY[4:], 30.0),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + HALVES, 30.0),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", HALVES[:20], 0.01, HALVES[20:], 30.0),
        (b"HTTP/1.1 200 OK\r\n\r\n" + BODY,),
        (b"HTTP/1.0 200 OK\r\n\r\n" + BODY[:3], 0.01, BODY[3:]),
        (b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\nHTTP/1.1 200 OK\r\n\r\n" + BODY,),
        (b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(BODY), BODY + b"and more"),),
        (b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\n\r\n" + gzip.compress(BODY, mtime=0),),
    ],
)
def test_an_answer_is_read_however_its_end_is_told(parts):
    response, request = asked(*parts)
    assert (response.status_code, response.json()) == (200, {"data": [{"id": "paced"}]})
    assert request.startswith(b"GET /base/v1/models?x=1 HTTP/1.1\r\nHost: 127.0.0.1:")
    assert request.lower().count(b"connection: close") == 1
    assert b"content-length" not in request.lower()


def test_status_headers_and_body_arrive_both_ways():
    response, request = asked(
        b"HTTP/1.1 404 Nothing here\r\nx-one: 1\r\nX-One: 2\r\ncontent-length: 0\r\n\r\n",
        ask=lambda client: client.post("/run", json={"a": 1}, headers={"authorization": "Bearer k"}),
    )
    assert (response.status_code, response.headers.get_list("x-one"), response.content) == (404, ["1", "2"], b"")
    head, _, body = request.partition(b"\r\n\r\n")
    assert body == b'{"a":1}'
    assert {b"content-length: 7", b"authorization: Bearer k"} <= set(head.replace(b"Auth", b"auth").split(b"\r\n"))


@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified"])
def test_an_answer_without_a_body_ends_with_its_head(status):
    response, _ = asked(b"HTTP/1.1 %s\r\n\r\n" % status, 30.0)
    assert response.content == b""


def test_the_head_alone_is_waited_for_where_only_it_was_asked_for():
    response, _ = asked(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n", 30.0, ask=lambda client: client.head("/"))
    assert response.status_code == 200


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        ((), httpx.RemoteProtocolError, "before its answer was whole"),
        ((b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf",), httpx.RemoteProtocolError, "before its answer"),
        ((b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhalf",), httpx.RemoteProtocolError, "whole"),
        ((b"220 mail.example ESMTP\r\n",), httpx.RemoteProtocolError, "the answer is not HTTP"),
        ((30.0,), httpx.ReadTimeout, "the time is up"),
        ((b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf", 30.0), httpx.ReadTimeout, "the time is up"),
    ],
)
def test_an_answer_that_does_not_come_whole_is_an_error(parts, error, message):
    with pytest.raises(error, match=message):
        asked(*parts, ask=lambda client: client.get("/", timeout=0.3))


def test_an_address_where_nobody_is_or_that_is_none_is_an_error_that_says_why():
    async def ask(url: str) -> None:
        async with control_client(url, Timeouts()) as client:
            await client.get("/")

    with pytest.raises(httpx.ConnectError) as refused:
        asyncio.run(ask("http://127.0.0.1:1"))
    assert isinstance(refused.value.__cause__, ConnectionRefusedError)
    with pytest.raises(httpx.ConnectError, match="not known"):
        asyncio.run(ask("http://no-such-host.invalid"))
