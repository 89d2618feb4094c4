"""An answer from raw reads: HTTP in all its framings, what is wrong with it, and bytes that are no answer."""

import gc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.servers.sse import HEAD, answered, chunked, cut, event, request, told, total, used, written

from benchctl.load.answer import Answer, error_of
from benchctl.records.record import RequestError

EVENTS = (
    event(written("a ", ids=[1])),
    event(written("ö", ids=[2])),
    event(written("", ids=[3], finish="length")),
    event(usage=used(3)),
    b"data: [DONE]\n\n",
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


def test_headers_are_those_of_the_server_and_trailers_are_none_of_them():
    answer = answered(CHUNKED.removesuffix(b"\r\n") + b"x-time: 3\r\n\r\n")
    assert [name for name, _ in answer.headers] == [b"server", b"content-type", b"transfer-encoding"]
    assert error_of(answer, request()) is None


def test_bytes_behind_the_end_of_the_answer_change_nothing():
    for wire in (CHUNKED, LENGTH):
        for more in (b"HTTP/1.1 500 Oops\r\n\r\n", b"junk", CHUNKED):
            for reads in ([wire + more], [wire, more], [wire + more[:3], more[3:]]):
                answer = answered(*reads)
                assert (answer.status, answer.reader.choices()[0].text) == (200, "a ö")
                assert error_of(answer, request()) is None


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


def test_an_end_in_the_middle_of_an_event_is_told_with_its_beginning():
    body = EVENTS[0] + EVENTS[1][:20]
    error = error_of(answered(chunked(body)), request())
    assert error.message == 'the stream ended in the middle of an event: {"choices": [{'


def test_what_is_left_without_a_blank_line_arrives_with_the_read_that_completes_the_answer():
    wire = chunked(*EVENTS[:2], EVENTS[2].rstrip())
    answer = answered(wire[:-5], wire[-5:], b"")
    assert answer.reader.choices(stamps_late=True)[0].chunk_ns == (0, 0, 1)
    assert answer.reader.choices(stamps_late=True)[0].chunk_late_ns == (0, 0, 10)
    assert error_of(answer, request()) is None


def test_interim_answers_are_skipped():
    early = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n"
    for place in range(len(early) + 20):
        wire = early + CHUNKED
        answer = answered(wire[:place], wire[place:])
        assert (answer.status, answer.headers[0]) == (200, (b"server", b"x"))
        assert error_of(answer, request()) is None


@pytest.mark.parametrize(
    ("body", "stated"),
    [
        (b'{"error": {"message": "too long", "type": "invalid"}}', "too long"),
        (b'{"object": "error", "message": "no such model"}', "no such model"),
        (b'{"error": "in one word"}', '"in one word"'),
        (b'{"detail": "Not Found"}', '{"detail": "Not Found"}'),
        (b"Internal\nServer Error", "Internal Server Error"),
        (b"x" * 500, "x" * 200 + "…"),
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


def test_what_an_answer_without_events_says_is_quoted_from_all_its_reads():
    answer = answered(HEAD + b"\r\nall ", b"at ", b"once")
    assert error_of(answer, request()).message == "the answer holds no events: all at once"


def test_a_refusal_cut_short_is_still_a_refusal():
    assert error_of(answered(REFUSAL[:-5]), request()).kind == "http-status"


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


def test_bytes_that_are_no_http_end_the_answer_though_the_connection_stays_open():
    answer = Answer(1)
    answer.feed(1, 0, b"this is no HTTP\r\n\r\n")
    assert (answer.is_over, answer.is_complete) == (True, False)
    answer.feed(2, 0, CHUNKED)
    assert answer.status is None


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


def test_an_answer_may_stop_early_unless_its_length_is_demanded():
    for max_tokens in (3, 9):
        assert error_of(answered(CHUNKED), request(max_tokens=max_tokens)) is None
        demanded = error_of(answered(CHUNKED), request(max_tokens=max_tokens, ignore_eos=True))
        assert (demanded is None) == (max_tokens == 3)


def test_usage_beyond_what_was_requested_fails_whether_or_not_the_length_is_demanded():
    for count, kind in ((100, None), (135, None), (1000, "wrong-length")):
        answer = answered(chunked(event(written("a", finish="stop")), total(count)))
        error = error_of(answer, request(max_tokens=100))
        assert (error and error.kind) == kind


def test_an_answer_that_is_over_needs_no_search_for_cycles_to_be_freed():
    for reads in ([CHUNKED], [CLOSE], [CHUNKED[:50]], [b"junk"], [b"junk", b"more"]):
        gc.collect()
        gc.disable()
        try:
            answered(*reads)
            assert gc.collect() == 0, reads
        finally:
            gc.enable()


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
    error = error_of(whole, request())
    assert (error and error.kind) == _kind(parts) == _kind(bytewise)
    assert told(whole.reader) == told(parts.reader) == told(bytewise.reader)
    assert (whole.status, whole.is_complete) == (parts.status, parts.is_complete)
    if error is None:
        (only,) = whole.reader.choices()
        assert only.finish_reason is not None
        assert only.output_tokens is not None
        assert whole.is_complete


def _kind(answer):
    error = error_of(answer, request())
    return error and error.kind


@given(place=st.integers(0, len(CHUNKED) - 1), bit=st.integers(0, 7))
def test_a_flipped_bit_never_raises(place, bit):
    wire = bytearray(CHUNKED)
    wire[place] ^= 1 << bit
    answer = answered(bytes(wire))
    error = error_of(answer, request())
    assert error is not None or answer.reader.num_finished == 1
