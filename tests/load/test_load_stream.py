"""Reading a stream: what counts as output, and that only the bytes matter, not how they were cut."""

from hypothesis import given
from hypothesis import strategies as st
from support.servers.sse import choice, cut, event, read, told, used

from benchctl.load.answer import CompletionReader, _text
from benchctl.load.events import EventSplitter, decode_event

USAGE = used(3)


PLAIN = (
    event(choice("", role="assistant")),
    event(choice("Hel")),
    event(choice("lo ")),
    event(choice("wörld", finish="stop")),
    event(usage=USAGE),
    b"data: [DONE]\n\n",
)


def test_a_chat_stream_gives_text_arrivals_finish_reason_and_usage():
    reader = read(*PLAIN)
    (only,) = reader.choices()
    assert (only.text, only.finish_reason, only.chunk_ns) == ("Hello wörld", "stop", (1, 2, 3))
    assert (only.output_tokens, only.chunk_tokens) == (3, None)
    assert (reader.usage.prompt_tokens, reader.usage.cached_tokens) == (9, None)
    assert (reader.is_terminated, reader.error) == (True, None)
    cached = read(event(usage=USAGE | {"prompt_tokens_details": {"cached_tokens": 4}}))
    assert cached.usage.cached_tokens == 4


def test_one_chunk_without_token_ids_makes_all_counts_of_its_choice_unknown():
    (only,) = read(event(choice("a", ids=[1])), event(choice("b"))).choices()
    assert (only.chunk_tokens, only.output_tokens) == (None, None)


def test_what_the_last_event_alone_says_is_no_chunk_and_what_each_says_may_be_one_without_text():
    timings = [{"timings": {"predicted_n": count, "predicted_ms": 1.0}} for count in (1, 3, 4)]
    for events, arrivals, tokens, output in (
        ([choice("a"), choice("b"), (choice("", finish="length"), {"usage": USAGE})], (0, 1), None, 3),
        ([choice("a"), choice("b", finish="length"), (None, {"usage": USAGE, **timings[1]})], (0, 1), None, 3),
        (
            [
                choice(None, role="assistant"),
                (choice("a"), timings[0]),
                (choice("b"), timings[1]),
                choice(finish="length"),
                (None, {"usage": used(4), **timings[2]}),
            ],
            (1, 2, 4),
            (1, 2, 1),
            4,
        ),
    ):
        pairs = [each if isinstance(each, tuple) else (each, {}) for each in events]
        (only,) = read(*(event(*filter(None, [one]), **rest) for one, rest in pairs)).choices()
        assert (only.chunk_ns, only.chunk_tokens, only.output_tokens) == (arrivals, tokens, output)
        assert (only.text, only.finish_reason) == ("ab", "length")


def test_an_error_event_is_a_server_error_in_every_dialect():
    for data in (
        b'data: {"error": {"message": "engine died"}}\n\n',
        b'error: {"message": "engine died"}\n\n',
        b'event: error\ndata: {"type": "error", "error": {"message": "engine died"}}\n\n',
        b'data: {"object": "error", "message": "engine died"}\n\n',
        b'event: error\ndata: {"message": "engine died"}\n\n',
        b"event: error\ndata: engine died\n\n",
        b'data: {"choices": [], "error": "engine died"}\n\n',
    ):
        error = read(PLAIN[1], data, b"data: [DONE]\n\n").error
        assert error is not None, data
        assert (error.kind, "engine died" in error.message) == ("server-error", True)
    assert read(event(choice("a"), error=None)).error is None


def test_an_event_that_cannot_be_read_is_reported_with_its_beginning():
    for payload in (
        b"{not json}",
        b'{"choices": 7}',
        b'"text"',
        b'{"choices": [{"index": "\xff"}]}',
        b'{"choices": [{"index": -1}]}',
        b'{"usage": {"completion_tokens": 1e3}}',
        b'{"x":' + b"[" * 100_000,
    ):
        error = read(b"data: " + payload + b"\n\n").error
        assert error is not None, payload[:50]
        assert (error.kind, "cannot be read" in error.message) == ("malformed-stream", True)


FRAGMENTS = st.sampled_from(
    (
        *PLAIN,
        *(
            b"data: ",
            b"data:",
            b"\n",
            b"\n\n",
            b"\r",
            b"\r\n",
            b": ping",
            b"error: ",
            b"event: error",
            b"\xef\xbb\xbf",
        ),
        *(b"[DONE]", b'{"choices":', b"[{", b'"text":"a"', b'"index":1', b"}]}", b"\xff", b"{", b"}"),
        *(b'{"usage":{"completion_tokens":2}}', b'{"object": "error"}', b'{"error": null}'),
    )
)


@given(parts=st.lists(FRAGMENTS | st.binary(max_size=5), max_size=25), places=st.lists(st.integers(0, 900)))
def test_no_bytes_whatever_raise_and_no_cut_changes_what_they_say(parts, places):
    data = b"".join(parts)
    whole = told(read(data, n=2))
    assert told(read(*cut(data, places), n=2)) == whole
    assert told(read(*(data[i : i + 1] for i in range(len(data))), n=2)) == whole
    assert told(read(*parts, n=2)) == whole


SAID = st.builds(
    dict,
    index=st.integers(0, 1),
    text=st.sampled_from([None, "", "a"]),
    delta=st.sampled_from([None, {}, {"content": "b"}, {"reasoning": "c"}, {"tool_calls": [{}]}]),
    token_ids=st.sampled_from([None, [], [7], [7, 8]]),
    finish_reason=st.sampled_from([None, "stop"]),
)


@given(said=st.lists(SAID, max_size=12), n=st.integers(1, 2))
def test_the_short_way_for_common_events_gives_what_the_long_way_gives(said, n):
    short, long = CompletionReader(n), CompletionReader(n)
    for t_ns, one in enumerate(said):
        data = event(one | {"index": min(one["index"], n - 1)})
        short.feed(t_ns, data, t_ns)
        (choice_event,) = decode_event(data[6:-2]).choices
        text = _text(choice_event.delta) if choice_event.text is None else choice_event.text
        long._take_choice(t_ns, t_ns, choice_event, text, None)
    assert short.choices(stamps_late=True) == long.choices(stamps_late=True)


def test_several_data_lines_are_one_payload_and_comments_are_none():
    splitter = EventSplitter()
    assert splitter.feed(b"\xef\xbb\xbfdata: {\ndata: }\n\n: hello\n\nretry: 5\n\ndata:x\n\n") == [b"{\n}", b"x"]


def test_a_byte_order_mark_is_one_only_at_the_start_of_the_stream():
    splitter = EventSplitter()
    assert splitter.feed(b"\xef") == splitter.feed(b"\xbb") == []
    assert splitter.feed(b"\xbfdata: 1\n\n\xef\xbb\xbfdata: 2\n\n") == [b"1"]
    assert splitter.feed(b"\xef\xbb\xbfdata: 3\n\n") == []


def test_an_event_that_comes_alone_is_read_as_it_is_behind_what_came_before():
    after = b"\xef\xbb\xbf" + PLAIN[3]  # for the mark is one only at the start
    befores = [b"", b"\r", b"\n", b": ping\r", b"data: [\n", b"data: [", b"event: error\n", b"id: 1\n", b"da"]
    for before in (*befores, b"\xef\xbb\xbf"):
        for first in (b"", PLAIN[1]):
            whole = told(read(first + before + PLAIN[2] + after))
            assert told(read(first, before, PLAIN[2], after)) == whole, before
            assert told(read(first + before, PLAIN[2], after)) == whole, before
    alone = b'data: {"choices":\r[{"text": "a"}]}\n\n'  # a carriage return ends a line
    assert read(PLAIN[1], alone).error is not None
    assert told(read(PLAIN[1], alone)) == told(read(PLAIN[1] + alone))


def test_chunks_of_one_read_share_its_time_and_tell_how_late_it_was_when_asked():
    reader = read(PLAIN[1], PLAIN[2] + PLAIN[3] + PLAIN[1][:5], PLAIN[1][5:])
    (only,) = reader.choices(stamps_late=True)
    assert (only.chunk_ns, only.chunk_late_ns) == ((0, 1, 1, 2), (0, 10, 10, 20))
    assert reader.choices()[0].chunk_late_ns is None
    assert reader.last_chunk_ns == 2
    assert read(PLAIN[0]).last_chunk_ns == 0


def test_an_event_that_the_end_of_the_stream_cuts_is_kept_and_is_not_the_fault_of_who_wrote_it():
    reader = read(PLAIN[1], PLAIN[2][:30])
    assert reader.cut_event == PLAIN[2][6:30]
    assert reader.error is None
    assert read(PLAIN[1]).cut_event == b""
    assert read(b"data: [DONE]").is_terminated
