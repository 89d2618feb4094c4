"""Reading a stream: what counts as output, whatever its telling and framing, and that no cut of bytes matters."""

from hypothesis import given, settings, strategies as st
from support.servers.sse import (
    HEAD,
    answered,
    choice,
    cut,
    event,
    lines,
    read,
    request,
    so_far,
    told,
    total,
    used,
    written,
)

from benchctl.load.answer import CompletionReader, _text, error_of
from benchctl.load.events import EventSplitter, decode_event

PLAIN = (
    event(choice("", role="assistant")),
    event(choice("Hel")),
    event(choice("lo ")),
    event(choice("wörld", finish="stop")),
    event(usage=used(3)),
    b"data: [DONE]\n\n",
)


def test_a_chat_stream_gives_text_arrivals_finish_reason_and_usage():
    reader = read(*PLAIN)
    (only,) = reader.choices()
    assert (only.text, only.finish_reason, only.chunk_ns) == ("Hello wörld", "stop", (1, 2, 3))
    assert (only.output_tokens, only.chunk_tokens, reader.usage.prompt_tokens) == (3, None, 9)
    assert (reader.is_terminated, reader.error, reader.usage.cached_tokens) == (True, None, None)
    assert read(event(usage=used(3, prompt_tokens_details={"cached_tokens": 4}))).usage.cached_tokens == 4


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


def test_several_data_lines_are_one_payload_and_a_byte_order_mark_is_one_only_at_the_start_of_the_stream():
    splitter = EventSplitter()
    assert splitter.feed(b"\xef\xbb\xbfdata: {\ndata: }\n\n: hello\n\nretry: 5\n\ndata:x\n\n") == [b"{\n}", b"x"]
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


def test_an_event_that_the_end_of_the_stream_cuts_is_kept_and_is_not_the_fault_of_who_wrote_it():
    reader = read(PLAIN[1], PLAIN[2][:30])
    assert reader.cut_event == PLAIN[2][6:30]
    assert reader.error is None
    assert read(PLAIN[1]).cut_event == b""
    assert read(b"data: [DONE]").is_terminated


CHUNKS = st.lists(st.tuples(st.text(min_size=1, max_size=4), st.integers(1, 3)), max_size=5)
WAYS = ("usage", "usage in finish", "running", "timings", "ids", "ids and usage")


@st.composite
def spoken_truths(draw):
    """Chunks (text, tokens) of each choice, told in one of several ways on a wire.

    The truth, the wire, the choice (or None) and the end of each piece in it, and whether chunks are counted.
    """
    way = draw(st.sampled_from(WAYS))
    num_choices = 1 if way in {"usage in finish", "running", "timings"} else draw(st.integers(1, 3))
    truth = [draw(CHUNKS) for _ in range(num_choices)]
    turns = draw(st.permutations([i for i, chunks in enumerate(truth) for _ in (*chunks, "finish")]))
    form = choice if draw(st.booleans()) else written
    pieces, count, position = [], 0, [0] * num_choices
    for index in turns:
        is_last = position[index] == len(truth[index])
        text, tokens = ("", 0) if is_last else truth[index][position[index]]
        position[index] += 1
        count += tokens
        ids = list(range(tokens)) if way.startswith("ids") else None
        rest = {"running": {"usage": used(count)}, "timings": {"timings": so_far(count)}}.get(way, {})
        if way == "usage in finish" and is_last:
            rest = {"usage": used(count)}
        if draw(st.booleans()):
            pieces.append((draw(st.sampled_from([b": ping\n\n", b"\n", b"id: 7\n\n"])), None))
        said = form(text, index=index, ids=ids, finish="length" if is_last else None)
        pieces.append((event(said, **rest), None if is_last else index))
    if way in {"usage", "ids and usage"}:
        pieces.append((total(count), None))
    if draw(st.booleans()):
        pieces.append((b"data: [DONE]\n\n", None))
    end = draw(st.sampled_from([b"\n", b"\r\n", b"\r"]))
    length = sum(len(lines(piece, end)) for piece, _ in pieces)
    fields = (b"transfer-encoding: chunked\r\n", b"content-length: %d\r\n" % length, b"")
    framing = draw(st.sampled_from(fields))
    is_chunked, wire, ends = framing == fields[0], HEAD + framing + b"\r\n", []
    for piece, whose in pieces:
        data = lines(piece, end)
        if is_chunked:
            parts = cut(data, [draw(st.integers(0, len(data)))])
            data = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
        wire += data
        # The blank line that ends an event is complete with its carriage return, where it has one.
        ends.append((whose, len(wire) - (2 if is_chunked else 0) - (2 if end == b"\r\n" else 1)))
    is_counted = way.startswith("ids") or way in {"running", "timings"}
    return truth, wire + (b"0\r\n\r\n" if is_chunked else b""), ends, is_counted


@settings(max_examples=60)
@given(spoken=spoken_truths(), data=st.data())
def test_a_generated_answer_is_understood_however_it_was_framed_and_cut(spoken, data):
    truth, wire, ends, is_counted = spoken
    n = len(truth)
    places = sorted(set(data.draw(st.lists(st.integers(1, len(wire) - 1), max_size=12))))
    answer = answered(*cut(wire, places), n=n)
    assert error_of(answer, request(n)) is None
    assert answer.is_complete
    records = answer.reader.choices(stamps_late=True)
    assert answer.reader.output_tokens == sum(tokens for chunks in truth for _, tokens in chunks)
    for record, chunks in zip(records, truth, strict=True):
        arrivals = [sum(place <= end for place in places) for whose, end in ends if whose == record.index]
        assert record.text == "".join(text for text, _ in chunks)
        assert record.finish_reason == "length"
        assert list(record.chunk_ns) == arrivals
        assert list(record.chunk_late_ns) == [10 * arrival for arrival in arrivals]
        if is_counted and chunks:
            assert record.chunk_tokens == tuple(tokens for _, tokens in chunks)
        if is_counted or n == 1:
            assert record.output_tokens == sum(tokens for _, tokens in chunks)
