"""Generated answers: whatever the truth, its telling, framing and cutting, the tokens and their times come out."""

import re

from hypothesis import given, settings
from hypothesis import strategies as st
from support.servers.sse import (
    HEAD,
    answered,
    choice,
    chunked,
    cut,
    event,
    lines,
    request,
    so_far,
    total,
    used,
    written,
)

from benchctl.load.answer import error_of

# A generated truth: for each choice its chunks (text, tokens), told in one of several ways.
CHUNKS = st.lists(st.tuples(st.text(min_size=1, max_size=4), st.integers(1, 3)), max_size=5)
WAYS = ("usage", "usage in finish", "running", "timings", "ids", "ids and usage")


@st.composite
def told_truths(draw):
    """(chunks of each choice, pieces that tell them, for each piece the choice whose chunk it is or None)."""
    way = draw(st.sampled_from(WAYS))
    num_choices = 1 if way in {"usage in finish", "running", "timings"} else draw(st.integers(1, 3))
    truth = [draw(CHUNKS) for _ in range(num_choices)]
    turns = draw(st.permutations([i for i, chunks in enumerate(truth) for _ in (*chunks, "finish")]))
    form = choice if draw(st.booleans()) else written
    pieces, whose, count, position = [], [], 0, [0] * num_choices
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
            pieces.append(draw(st.sampled_from([b": ping\n\n", b"\n", b"id: 7\n\n"])))
            whose.append(None)
        pieces.append(event(form(text, index=index, ids=ids, finish="length" if is_last else None), **rest))
        whose.append(None if is_last else index)
    if way in {"usage", "ids and usage"}:
        pieces.append(total(count))
    if draw(st.booleans()):
        pieces.append(b"data: [DONE]\n\n")
    whose += [None] * (len(pieces) - len(whose))
    is_counted = way.startswith("ids") or way in {"running", "timings"}
    return truth, pieces, whose, is_counted


@st.composite
def spoken_truths(draw):
    """A told truth on the wire: also the bytes, and the place behind each piece."""
    truth, pieces, whose, is_counted = draw(told_truths())
    end = draw(st.sampled_from([b"\n", b"\r\n", b"\r"]))
    pieces = [lines(piece, end) for piece in pieces]
    body, framing = b"".join(pieces), draw(st.sampled_from(["chunked", "length", "close"]))
    if framing == "chunked":
        parts = cut(body, draw(st.lists(st.integers(0, len(body)), max_size=8)))
        wire = chunked(*parts)
    else:
        length = b"content-length: %d\r\n" % len(body) if framing == "length" else b""
        parts, wire = [body], HEAD + length + b"\r\n" + body
    wire_of_body = [place for part in _places_of(parts, wire) for place in part]
    ends, done = [], 0
    for piece in pieces:
        done += len(piece)
        # The blank line that ends an event is complete with its carriage return, where it has one.
        ends.append(wire_of_body[done - (2 if end == b"\r\n" else 1)])
    return truth, wire, list(zip(whose, ends, strict=True)), is_counted


def _places_of(parts, wire):
    """For each part of the body the places of its bytes in ``wire``."""
    begin = wire.index(b"\r\n\r\n") + 4
    for part in parts:
        if b"chunked" in wire[:begin]:
            begin += re.match(rb"(\r\n)?[0-9a-f]+\r\n", wire[begin:]).end()
        yield range(begin, begin + len(part))
        begin += len(part)


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
