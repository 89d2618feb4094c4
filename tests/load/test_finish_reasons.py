"""Finish reasons: which answers are answers, in the words of each engine."""

import asyncio
import json

import pytest
from support.servers.paced_engine import call, request
from support.servers.parts_server import serving, writing
from support.servers.sse import answered
from support.servers.sse import request as asked

from benchctl.load.answer import error_of
from benchctl.load.client import StreamClient
from benchctl.load.schedule import Load
from benchctl.measure.sending import _crash_wait_s
from benchctl.profile.arrival import Arrival
from benchctl.profile.sections import Timeouts
from benchctl.records.finish_reasons import ENDINGS, ending_of, finish_error, is_cut, unknown_reasons
from benchctl.records.record import RequestRecord

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


def answer(finish_reason: object, *, is_chat: bool = False) -> bytes:
    said = {"delta": {"content": "b"}} if is_chat else {"text": "b"}
    last = {"choices": [{"index": 0, **said, "finish_reason": finish_reason}]}
    usage = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}}
    first = {"choices": [{"index": 0, **said, "finish_reason": None}]}
    events = [b"data: " + json.dumps(each).encode() + b"\n\n" for each in (first, last, usage)]
    return b"".join((HEAD, *events, b"data: [DONE]\n\n"))


def test_an_answer_that_ended_by_itself_at_its_limit_or_with_a_call_is_one():
    words = ("stop", "length", "tool_calls", "function_call", "eos", "word", "limit", "STOP", "tool-calls")
    objects = [({"type": "stop", "matched": 2}, "stop"), ({"type": "length", "length": 2}, "length")]
    for finish_reason, word in (*zip(words, words, strict=True), *objects):
        for is_chat in (False, True):
            ended = answered(answer(finish_reason, is_chat=is_chat))
            assert error_of(ended, asked()) is None, finish_reason
            assert [choice.finish_reason for choice in ended.reader.choices()] == [word]
            assert ending_of(word) is not None


@pytest.mark.parametrize(
    ("finish_reason", "kind", "message"),
    [
        ("error", "finish-error", "finish_reason 'error'"),
        ("abort", "finish-abort", "finish_reason 'abort'"),
        ("content_filter", "finish-content-filter", "finish_reason 'content_filter'"),
        ("cancelled", "finish-cancelled", "finish_reason 'cancelled'"),
        ({"type": "abort", "message": "out of KV cache"}, "finish-abort", "'abort': out of KV cache"),
        ("", "unfinished", ""),
        (None, "unfinished", ""),
        ({}, "unfinished", ""),
        (7, "malformed-stream", ""),
    ],
)
def test_an_answer_that_failed_or_has_no_reason_is_a_failure_of_its_own_class(finish_reason, kind, message):
    for wire in (answer(finish_reason), answer(finish_reason)[: -40 if message else None]):
        ended = answered(wire)
        error = error_of(ended, asked())
        assert (error.kind, message in error.message) == (kind, True), error
        assert not message or ended.reader.choices()[0].text == "bb"


def test_failures_of_a_load_are_counted_by_class():
    words = iter(["stop", "error", "abort", "error", "length", "sudden_death"])
    kept: list[RequestRecord] = []

    async def go():
        async def next_answer(writer):
            await writing(answer(next(words)))(writer)

        async with serving(next_answer) as url, StreamClient(url, Timeouts()) as client:
            load = Load(client, Arrival(kind="closed-loop", max_concurrency=1), kept.append)
            await load.drive(call(request(i, max_tokens=2)) for i in range(6))
            return load.summary()

    summary = asyncio.run(go())
    assert (summary.num_failed, summary.failures) == (3, {"finish-error": 2, "finish-abort": 1})
    assert _crash_wait_s(summary.failures.keys()) > 0
    assert [unknown_reasons(record) for record in kept] == [[]] * 5 + [["sudden_death"]]


def test_every_word_of_the_table_is_found_as_servers_write_it():
    for word, ending in ENDINGS.items():
        assert ending_of(word.upper()) == ending_of(word.replace("_", "-")) == ending
        assert (finish_error([word]) is not None) == ending.startswith("finish-")
        assert is_cut(word) == (ending == "limit")
