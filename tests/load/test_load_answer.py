"""An answer from raw reads: HTTP in all its framings, why it ended, what is wrong with it, and other bytes."""

import asyncio
import itertools

import pytest
from hypothesis import given, settings, strategies as st
from support.servers import paced_engine as paced
from support.servers.parts_server import serving, writing
from support.servers.sse import HEAD, answered, choice, chunked, cut, event, request, told, total, used, written

from benchctl.load.answer import Answer, error_of
from benchctl.load.client import StreamClient
from benchctl.load.schedule import Load
from benchctl.measure.sending import _crash_wait_s
from benchctl.profile.arrival import Arrival
from benchctl.profile.sections import Timeouts
from benchctl.records.finish_reasons import ENDINGS, ending_of, finish_error, is_cut, unknown_reasons
from benchctl.records.record import RequestError, RequestRecord

DONE = b"data: [DONE]\n\n"
EVENTS = (
    event(written("a ", ids=[1])),
    event(written("ö", ids=[2])),
    event(written("", ids=[3], finish="length")),
    event(usage=used(3)),
    DONE,
)
BODY = b"".join(EVENTS)
CHUNKED = chunked(*EVENTS)
LENGTH = HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
CLOSE = HEAD + b"\r\n" + BODY
REFUSAL = b'HTTP/1.1 429 Busy\r\ncontent-length: 36\r\n\r\n{"error": {"message": "come later"}}'


def test_an_answer_is_understood_in_each_framing_wherever_it_is_cut_and_complete_with_its_end():
    for wire in (CHUNKED, LENGTH, CLOSE):
        for place in range(1, len(wire)):
            answer = answered(wire[:place], wire[place:])
            (only,) = answer.reader.choices()
            assert (only.text, only.chunk_tokens, answer.status) == ("a ö", (1, 1, 1), 200)
            assert error_of(answer, request()) is None
        answer = Answer(1)
        answer.feed(1, 0, wire[:-1])
        assert not answer.is_complete
        answer.feed(2, 0, wire[-1:])
        assert answer.is_complete == answer.is_over == (wire != CLOSE), "without framing, the connection ends it"
        answer.finish(3)
        assert answer.is_complete


def test_bytes_behind_the_end_of_the_answer_change_nothing():
    for wire in (CHUNKED, LENGTH):
        for more in (b"HTTP/1.1 500 Oops\r\n\r\n", b"junk", CHUNKED):
            for reads in ([wire + more], [wire, more], [wire + more[:3], more[3:]]):
                answer = answered(*reads)
                assert (answer.status, answer.reader.choices()[0].text) == (200, "a ö")
                assert error_of(answer, request()) is None


def chunk(piece, more=0):
    """``piece`` as a chunk of a body, whose stated size is larger by ``more``."""
    return b"%x\r\n%s\r\n" % (len(piece) + more, piece)


TOKEN = event(written("a", ids=[7]))
ODD = st.one_of(
    st.builds(written, st.sampled_from(["", "ö\n"]), index=st.integers(0, 1), ids=st.sampled_from([None, []])).map(
        event
    ),
    st.builds(choice, index=st.integers(0, 1), reasoning=st.just("c")).map(event),
    st.just(event(written("a"), usage=used(3))),
    st.sampled_from(
        [DONE, b": alive\n\n", b"data: {}{}\n\n", b"data: {\n\n", b"data: }\n\n", TOKEN[:9], TOKEN * 2]
    ),
)
STREAM = HEAD + b"transfer-encoding: chunked\r\n\r\n"


@given(st.lists(st.one_of(*[st.just(TOKEN)] * 3, ODD), max_size=20), st.lists(st.integers(0, 2000), max_size=3))
@settings(deadline=None)
def test_reads_that_are_decoded_together_give_what_each_gives_by_itself(pieces, places):
    parts = [chunk(piece) for piece in pieces]
    agree([STREAM, *cut(b"".join(parts) + b"0\r\n\r\n", [*itertools.accumulate(map(len, parts)), *places])])


def test_only_whole_chunks_with_an_event_of_one_choice_are_decoded_together():
    other = event(written("b", index=1))
    start = [STREAM, chunk(TOKEN)]
    agree(
        [*start, chunk(other), chunk(b": a comment\n\n"), *[chunk(TOKEN), chunk(other)] * 3, b"0\r\n\r\n"]
    )  # choices take turns
    lengths = [len(TOKEN), 255, 256]  # as many digits, or one more
    for more, length in itertools.product((-1, 0, 1), lengths):
        token = event(written("a" * (length - len(TOKEN) + 1), ids=[7]))
        agree([*start, chunk(TOKEN), chunk(token, more), chunk(TOKEN), b"0\r\n\r\n"])
    agree([*start, chunk(TOKEN).replace(b"\r\ndata", b" \r\ndata"), b"0x" + chunk(TOKEN), b"0\r\n\r\n"])
    within = b": a comment\r\n\r\n" + chunk(TOKEN)[:-2]  # the end of one chunk that looks like a chunk
    agree([*start, chunk(within)[: -len(chunk(TOKEN))], chunk(TOKEN), chunk(TOKEN), b"0\r\n\r\n"])
    agree([*start, chunk(TOKEN.replace(b'"choices"', b'\n"choices"')), chunk(TOKEN + TOKEN[:-2]), b"0\r\n\r\n"])
    agree([*start, chunk(TOKEN), chunk(TOKEN[:-2] + TOKEN[6:]), chunk(TOKEN), b"0\r\n\r\n"])


def agree(reads):
    """Assert that an answer is the same whether its reads are decoded together or one by one."""
    together, times = Answer(2), [*range(len(reads))]
    together.feed_all(times, times, reads)
    together.finish(len(reads))
    each = answered(*reads, n=2)
    assert [c.chunk_ns for c in together.reader.choices()] == [c.chunk_ns for c in each.reader.choices()]
    assert told(together.reader) == told(each.reader)
    assert error_of(together, request(n=2)) == error_of(each, request(n=2))


def test_an_answer_cut_short_is_an_early_close_and_what_came_is_kept():
    for place in range(len(CHUNKED)):
        answer = answered(CHUNKED[:place])
        error = error_of(answer, request())
        assert error.kind == "early-close"
        assert ("before it answered" in error.message) == (answer.status is None)
        assert not answer.is_complete
        assert all("a ö".startswith(only.text) for only in answer.reader.choices())
    for num_bytes in range(len("data: {"), len(b"".join(EVENTS[:3]).rstrip())):
        error = error_of(answered(HEAD + b"\r\n" + BODY[:num_bytes]), request())
        assert (error and error.kind) == "early-close"
    error = error_of(answered(chunked(EVENTS[0] + EVENTS[1][:20])), request())
    assert error.message == 'the stream ended in the middle of an event: {"choices": [{'


def test_what_is_left_without_a_blank_line_arrives_with_the_read_that_completes_the_answer():
    wire = chunked(*EVENTS[:2], EVENTS[2].rstrip())
    answer = answered(wire[:-5], wire[-5:], b"")
    assert answer.reader.choices(stamps_late=True)[0].chunk_ns == (0, 0, 1)
    assert answer.reader.choices(stamps_late=True)[0].chunk_late_ns == (0, 0, 10)
    assert error_of(answer, request()) is None


def test_headers_are_those_of_the_answer_and_neither_of_interim_answers_nor_of_its_trailers():
    early = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n"
    wire = early + CHUNKED.removesuffix(b"\r\n") + b"x-time: 3\r\n\r\n"
    for place in range(len(early) + 20):
        answer = answered(wire[:place], wire[place:])
        assert answer.status == 200
        assert [name for name, _ in answer.headers] == [b"server", b"content-type", b"transfer-encoding"]
        assert error_of(answer, request()) is None


@pytest.mark.parametrize(
    ("body", "stated"),
    [
        (b'{"error": {"message": "too long", "type": "invalid"}}', "too long"),
        (b'{"object": "error", "message": "no such model"}', "no such model"),
        (b'{"error": "in one word"}', '"in one word"'),
        (b'{"detail": "Not Found"}', '{"detail": "Not Found"}'),
        (b"Internal\nServer Error", "Internal Server Error"),
        (b"x" * 9000, "x" * 200 + "…"),
        (b'{"error":' * 2000, ('{"error":' * 23)[:200] + "…"),
        (b"\xff", "\ufffd"),
        (b"", "no message"),
    ],
)
def test_a_refusal_is_quoted_whatever_its_form(body, stated):
    answer = answered(b"HTTP/1.1 500 X\r\n\r\n" + body)
    assert error_of(answer, request()) == RequestError(kind="http-status", message=stated, status=500)
    assert (answer.body_head, answer.reader.choices()) == (body[:4096], ())


def test_a_refusal_cut_short_is_one_and_an_answer_without_events_is_quoted_from_all_its_reads():
    assert error_of(answered(REFUSAL[:-5]), request()).kind == "http-status"
    answer = answered(HEAD + b"\r\nall ", b"at ", b"once")
    assert error_of(answer, request()).message == "the answer holds no events: all at once"


@pytest.mark.parametrize(
    ("wire", "message"),
    [
        (b"this is no HTTP\r\n\r\n", "the answer is not HTTP (Expected HTTP/"),
        (b"HTTP/9.9 200 OK\r\n\r\n", "the answer is not HTTP (Invalid HTTP version)"),
        (
            HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
            "the answer breaks in the framing of its body (Invalid",
        ),
        (b"HTTP/1.1 101 Go\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n", "the server changes to another protocol"),
        (HEAD + b"content-encoding: gzip, br\r\n\r\n\x1f\x8b", "the answer is compressed (gzip, br)"),
        (HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n1\r\nx\r\n", "the answer is compressed (gzip)"),
    ],
)
def test_what_cannot_be_read_as_http_is_told_so(wire, message):
    for reads in ([wire], [wire[i : i + 1] for i in range(len(wire))]):
        answer = answered(*reads)
        error = error_of(answer, request())
        assert error.kind == "malformed-http"
        assert error.message.startswith(message)
        assert answer.reader.choices() == ()
    answer = Answer(1)
    answer.feed(1, 0, wire)
    assert (answer.is_over, answer.is_complete) == (True, False), "though the connection stays open"


def test_tokens_before_a_break_of_the_framing_are_kept_and_a_plain_coding_is_no_compression():
    answer = answered(HEAD + b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\nzz\r\n" % (len(EVENTS[0]), EVENTS[0]))
    assert answer.reader.choices()[0].text == "a "
    assert error_of(answer, request()).kind == "malformed-http"
    assert error_of(answered(HEAD + b"content-encoding: identity\r\n\r\n" + BODY), request()) is None


@pytest.mark.parametrize(
    ("events", "n", "kind", "message"),
    [
        ([b'{"choices": [{"text": "all at once"}]}'], 1, "malformed-stream", "the answer holds no events: {"),
        ([], 1, "early-close", "the stream ended with 0 of 1 choices finished"),
        (EVENTS[:2], 1, "early-close", "the stream ended with 0 of 1 choices finished"),
        (EVENTS, 2, "unfinished", "[DONE] with 1 of 2 choices finished"),
        ([event(written("a", index=1, finish="stop")), total(1)], 1, "unrequested-choice", "holds a choice 1"),
        ([EVENTS[0], b"data: {oops}\n\n", *EVENTS[2:]], 1, "malformed-stream", "an event cannot be read"),
        ([EVENTS[0], event(error={"message": "engine died"})], 1, "server-error", "engine died"),
        ([*EVENTS[:4], event(error={"message": "died after the last word"})], 1, "server-error", "died after"),
        (
            [event(written("a", finish="length"), usage=used(2))],
            1,
            "wrong-length",
            "2 output tokens where ignore_eos",
        ),
        ([event(written("a", finish="length", ids=[1, 2, 3, 4]))], 1, "wrong-length", "demands 3"),
        (
            [event(written("a", finish="length"), usage=used(4000))],
            1,
            "wrong-length",
            "usage counts 4000 output tokens where at most 3 were requested",
        ),
        ([event(written("a", finish="length"), usage=used(1 << 33))], 1, "malformed-stream", "completion_tokens"),
    ],
)
def test_each_fault_of_a_stream_has_its_kind(events, n, kind, message):
    error = error_of(answered(chunked(*events), n=n), request(n, max_tokens=3, ignore_eos=True))
    assert (error.kind, message in error.message) == (kind, True), error


def test_what_the_server_says_of_its_failure_counts_more_than_how_the_stream_ends():
    died = event(error={"message": "engine died"})
    for wire in (chunked(EVENTS[0], died)[:-5], chunked(EVENTS[0], died)[:-5] + b"zz\r\n"):
        assert error_of(answered(wire), request()).kind == "server-error"


def test_an_answer_may_stop_early_unless_its_length_is_demanded_and_never_be_far_longer():
    for max_tokens in (3, 9):
        assert error_of(answered(CHUNKED), request(max_tokens=max_tokens)) is None
        demanded = error_of(answered(CHUNKED), request(max_tokens=max_tokens, ignore_eos=True))
        assert (demanded is None) == (max_tokens == 3)
    for count, kind in ((100, None), (135, None), (1000, "wrong-length")):
        error = error_of(
            answered(chunked(event(written("a", finish="stop")), total(count))), request(max_tokens=100)
        )
        assert (error and error.kind) == kind


PIECES = st.sampled_from(
    (
        *(CHUNKED, LENGTH, CLOSE, REFUSAL, *EVENTS, HEAD),
        *(b"\r\n", b"\n", b"0\r\n\r\n", b"5\r\nhello\r\n", b"ffffffffffffffff"),
    )
)


@settings(max_examples=60)
@given(
    pieces=st.lists(PIECES | st.binary(max_size=6), max_size=6),
    holes=st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 2000), st.binary(max_size=3)), max_size=3),
    places=st.lists(st.integers(0, 2000), max_size=10),
)
def test_no_bytes_whatever_raise_and_each_answer_is_complete_or_in_error(pieces, holes, places):
    wire = b"".join(pieces)
    for begin, end, patch in holes:
        wire = wire[:begin] + patch + wire[end:]
    whole, parts = answered(wire), answered(*cut(wire, places))
    bytewise = answered(*(wire[i : i + 1] for i in range(len(wire))))
    error, *others = (error_of(answer, request()) for answer in (whole, parts, bytewise))
    assert [other and other.kind for other in others] == [error and error.kind] * 2
    assert told(whole.reader) == told(parts.reader) == told(bytewise.reader)
    assert (whole.status, whole.is_complete) == (parts.status, parts.is_complete)
    if error is None:
        (only,) = whole.reader.choices()
        assert only.finish_reason is not None
        assert only.output_tokens is not None
        assert whole.is_complete


def ended_by(finish_reason: object, said=written) -> bytes:
    return chunked(event(said("b")), event(said("b", finish=finish_reason)), total(2), DONE)


def test_an_answer_that_ended_by_itself_at_its_limit_or_with_a_call_is_one_in_the_words_of_each_engine():
    words = ("stop", "length", "tool_calls", "function_call", "eos", "word", "limit", "STOP", "tool-calls")
    objects = [({"type": "stop", "matched": 2}, "stop"), ({"type": "length", "length": 2}, "length")]
    for finish_reason, word in (*zip(words, words, strict=True), *objects):
        for said in (written, choice):
            answer = answered(ended_by(finish_reason, said))
            assert error_of(answer, request()) is None, finish_reason
            assert [each.finish_reason for each in answer.reader.choices()] == [word]
            assert ending_of(word) is not None
    for word, ending in ENDINGS.items():
        assert ending_of(word.upper()) == ending_of(word.replace("_", "-")) == ending
        assert (finish_error([word]) is not None) == ending.startswith("finish-")
        assert is_cut(word) == (ending == "limit")


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
    for wire in (ended_by(finish_reason), ended_by(finish_reason)[: -40 if message else None]):
        answer = answered(wire)
        error = error_of(answer, request())
        assert (error.kind, message in error.message) == (kind, True), error
        assert not message or answer.reader.choices()[0].text == "bb"


def test_failures_of_a_load_are_counted_by_class():
    words = iter(["stop", "error", "abort", "error", "length", "sudden_death"])
    kept: list[RequestRecord] = []

    async def next_answer(writer):
        await writing(ended_by(next(words)))(writer)

    async def go():
        async with serving(next_answer) as url, StreamClient(url, Timeouts()) as client:
            load = Load(client, Arrival(kind="closed-loop", max_concurrency=1), kept.append)
            await load.drive(paced.call(paced.request(i, max_tokens=2)) for i in range(6))
            return load.summary

    summary = asyncio.run(go())
    assert (summary.num_failed, summary.failures) == (3, {"finish-error": 2, "finish-abort": 1})
    assert _crash_wait_s(summary.failures.keys()) > 0
    assert [unknown_reasons(record) for record in kept] == [[]] * 5 + [["sudden_death"]]
