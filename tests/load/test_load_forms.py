"""Every form in which servers stream tokens, at every place where a read may cut it."""

import pytest
from support.servers.sse import (
    answered,
    choice,
    chunked,
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

from benchctl.load.answer import error_of

DONE = b"data: [DONE]\n\n"


def tool(arguments, **function):
    return [{"index": 0, "function": {"arguments": arguments, **function}}]


# Each form: the pieces that a server writes, and for each choice (text, tokens of each chunk, output tokens).
FORMS = {
    "a token per event of a chat": (
        [
            event(choice("", role="assistant")),
            event(choice("a ")),
            event(choice("ö", finish="stop")),
            total(2),
            DONE,
        ],
        [("a ö", None, 2)],
    ),
    "a token per event of a completion": (
        [event(written("a ")), event(written("ö")), event(written("", finish="length")), total(2), DONE],
        [("a ö", None, 2)],
    ),
    "the last token in the finish event": (
        [event(written("a", ids=[1])), event(written("b", ids=[2], finish="length")), total(2), DONE],
        [("ab", (1, 1), 2)],
    ),
    "several tokens per event, told by ids": (
        [event(choice("abc", ids=[1, 2, 3])), event(choice("de", ids=[4, 5], finish="stop")), total(5), DONE],
        [("abcde", (3, 2), 5)],
    ),
    "several tokens per event, told by running counts": (
        [
            event(choice("", role="assistant"), usage=used(0)),
            event(choice("abc"), usage=used(3)),
            event(choice("de", finish="stop"), usage=used(5)),
            total(5),
            DONE,
        ],
        [("abcde", (3, 2), 5)],
    ),
    "a first token without text, told by running counts": (
        [
            event(choice("", role="assistant"), usage=used(0)),
            event(choice(""), usage=used(1)),
            event(choice("ö"), usage=used(2)),
            event(choice("", finish="stop"), usage=used(2)),
            DONE,
        ],
        [("ö", (1, 1), 2)],
    ),
    "an only token without text, told by running counts": (
        [
            event(choice("", role="assistant"), usage=used(0)),
            event(choice("", finish="length"), usage=used(1)),
            DONE,
        ],
        [("", (1,), 1)],
    ),
    "tokens without text, told by ids": (
        [event(written("", ids=[1])), event(written("ö", ids=[2])), event(written("", ids=[], finish="stop"))],
        [("ö", (1, 1), 2)],
    ),
    "no token at all, told by ids": ([event(written("", ids=[], finish="stop")), DONE], [("", (), 0)]),
    "no token at all, told by usage": ([event(written("", finish="stop")), total(0), DONE], [("", None, 0)]),
    "usage in the finish event": (
        [event(choice("a")), event(choice("b")), event(choice(finish="length"), usage=used(2)), DONE],
        [("ab", None, 2)],
    ),
    "usage in the finish event, with the last token": (
        [event(choice("a")), event(choice("b", finish="length"), usage=used(2)), DONE],
        [("ab", None, 2)],
    ),
    "everything in one event": ([event(choice("abc", finish="stop"), usage=used(3)), DONE], [("abc", (3,), 3)]),
    "usage null until the last event": (
        [event(choice("a"), usage=None), event(choice("b", finish="stop"), usage=None), total(2), DONE],
        [("ab", None, 2)],
    ),
    "usage at the start and at the end, which is no running count": (
        [
            event(choice("", role="assistant"), usage=used(1)),
            event(choice("a")),
            event(choice("b")),
            event(choice(finish="stop"), usage=used(2)),
            DONE,
        ],
        [("ab", None, 2)],
    ),
    "a running count that starts anew, which is none": (
        [
            event(choice("a"), usage=used(4)),
            event(choice("b"), usage=used(1)),
            event(choice("c"), usage=used(2)),
            event(choice(finish="stop")),
            total(7),
            DONE,
        ],
        [("abc", None, 7)],
    ),
    "a running count with a gap that only ids fill": (
        [
            event(choice("a"), usage=used(1)),
            event(choice("b", ids=[7])),
            event(choice("c", finish="stop"), usage=used(3)),
        ],
        [("abc", None, 3)],
    ),
    "a running count with a gap at the call of a tool": (
        [
            event(choice("a"), usage=used(1)),
            event(choice(None, tool_calls=tool("{}"), ids=[7])),
            event(choice("c", finish="stop"), usage=used(3)),
        ],
        [("ac", None, 3)],
    ),
    "timings in every event": (
        [
            event(choice("a"), timings=so_far(1)),
            event(choice("bc"), timings=so_far(3)),
            event(choice(finish="length")),
            event(usage=used(4), timings=so_far(4)),
            DONE,
        ],
        [("abc", (1, 2, 1), 4)],
    ),
    "timings in every event and no usage": (
        [event(written("a"), timings=so_far(1)), event(written("bc", finish="length"), timings=so_far(3)), DONE],
        [("abc", (1, 2), 3)],
    ),
    "timings in the last event only": (
        [
            event(written("a")),
            event(written("b")),
            event(written("", finish="stop"), usage=used(2), timings=so_far(2)),
        ],
        [("ab", None, 2)],
    ),
    "reasoning before the answer": (
        [
            event(choice(reasoning_content="hm ")),
            event(choice(None, reasoning="so ")),
            event(choice("42")),
            event(choice("", reasoning_content=None, finish="stop")),
            total(3),
            DONE,
        ],
        [("hm so 42", None, 3)],
    ),
    "a refusal": ([event(choice(None, refusal="no", finish="stop")), total(1), DONE], [("no", None, 1)]),
    "a call of a tool": (
        [
            event(choice(None, role="assistant", tool_calls=[])),
            event(choice(None, tool_calls=tool("", name="search"))),
            event(choice(None, tool_calls=tool('{"q": 1}'))),
            event(choice(finish="tool_calls")),
            total(7),
            DONE,
        ],
        [("", None, 7)],
    ),
    "a call of a function of old": (
        [
            event(choice(None, function_call={"name": "f", "arguments": "{}"}, finish="function_call")),
            total(3),
            DONE,
        ],
        [("", None, 3)],
    ),
    "choices that take turns": (
        [
            event(choice("a", index=1)),
            event(choice("x", index=0)),
            event(choice("b", index=1, finish="stop")),
            event(choice("y", index=0)),
            event(choice("", index=0, finish="length")),
            total(4),
            DONE,
        ],
        [("xy", None, None), ("ab", None, None)],
    ),
    "choices in one event, counted by ids without usage": (
        [
            event(written("a", index=1, ids=[1]), written("x", index=0, ids=[2, 3])),
            event(written("", index=0, ids=[], finish="stop")),
            event(written("b", index=1, ids=[4], finish="stop")),
        ],
        [("x", (2,), 2), ("ab", (1, 1), 2)],
    ),
    "choices with running counts of which nobody knows whose they are": (
        [
            event(choice("a", index=1), usage=used(1)),
            event(choice("x", index=0), usage=used(1)),
            event(choice(index=0, finish="stop"), choice(index=1, finish="stop"), usage=used(2)),
            DONE,
        ],
        [("x", None, None), ("a", None, None)],
    ),
    "no word of an end but the finish reason": (
        [event(choice("a", finish="stop"), usage=used(1))],
        [("a", (1,), 1)],
    ),
    "comments that keep the connection alive": (
        [
            b": ping\n\n",
            event(choice("a")),
            b":\n\n: ping\n",
            event(choice("b", finish="stop")),
            b": bye\n\n",
            total(2),
        ],
        [("ab", None, 2)],
    ),
    "lines that end in CR LF": (
        [
            lines(piece, b"\r\n")
            for piece in (b": hi\n\n", event(choice("a")), event(choice("ö", finish="x")), total(2))
        ],
        [("aö", None, 2)],
    ),
    "lines that end in CR": (
        [
            lines(piece, b"\r")
            for piece in (b": hi\n\n", event(choice("a")), event(choice("ö", finish="x")), total(2))
        ],
        [("aö", None, 2)],
    ),
    "lines that end now so, now so": (
        [
            lines(event(choice("a")), b"\r"),
            lines(event(choice("b")), b"\r\n"),
            event(choice("c", finish="x")),
            total(3),
        ],
        [("abc", None, 3)],
    ),
    "data in several lines": (
        [b'data: {"choices":\ndata:[{"index": 0,\ndata:  "text": "a", "finish_reason": "stop"}]}\n\n', total(1)],
        [("a", None, 1)],
    ),
    "fields that say nothing of tokens": (
        [
            b"retry: 5\n\n",
            b"event: message\nid: 1\n" + event(choice("a", finish="stop")),
            b"id\n\n",
            total(1),
            DONE,
        ],
        [("a", None, 1)],
    ),
    "a byte order mark": ([b"\xef\xbb\xbf" + event(choice("a", finish="stop")), total(1), DONE], [("a", None, 1)]),
    "no space after the colon": (
        [event(choice("a", finish="stop")).replace(b"data: ", b"data:"), total(1).replace(b"data: ", b"data:")],
        [("a", None, 1)],
    ),
    "a last event without its blank line": (
        [event(choice("a")), event(choice("b", finish="stop")), total(2).rstrip()],
        [("ab", None, 2)],
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_tokens_of_each_form_are_what_the_server_said_wherever_reads_are_cut(form):
    pieces, truth = FORMS[form]
    n = len(truth)
    reader = read(*pieces, n=n)
    assert [(c.text, c.chunk_tokens, c.output_tokens) for c in reader.choices()] == truth
    for c in reader.choices():
        assert (len(c.chunk_chars), sum(c.chunk_chars)) == (len(c.chunk_ns), len(c.text))
    wire = chunked(*pieces)
    whole = answered(wire, n=n)
    assert error_of(whole, request(n)) is None
    assert told(whole.reader) == told(reader)
    for place in range(1, len(wire)):
        parts = answered(wire[:place], wire[place:], n=n)
        assert (told(parts.reader), parts.is_complete) == (told(reader), True)
    bytewise = answered(*(wire[i : i + 1] for i in range(len(wire))), n=n)
    assert told(bytewise.reader) == told(reader)


def test_calls_of_tools_are_chunks_without_text_and_a_count_that_proves_to_be_no_running_one_shows_none():
    for form in ("a call of a tool", "usage at the start and at the end, which is no running count"):
        (only,) = read(*FORMS[form][0]).choices()
        assert only.chunk_ns == (1, 2), form


@pytest.mark.parametrize(
    "pieces",
    [
        [event(choice("a")), event(choice("b", finish="stop")), DONE],
        [event(choice("a", ids=[1])), event(choice("b", finish="stop")), DONE],
        [event(choice("", finish="stop")), DONE],
    ],
    ids=["neither usage nor ids", "ids of some chunks", "no output at all"],
)
def test_tokens_that_nobody_counts_are_unknown_and_the_answer_is_of_no_use(pieces):
    answer = answered(chunked(*pieces))
    assert [c.output_tokens for c in answer.reader.choices()] == [None]
    error = error_of(answer, request())
    assert (error.kind, "tokens cannot be counted" in error.message) == ("malformed-stream", True)


def test_characters_are_counted_per_chunk_and_whole_where_a_read_cuts_them():
    pieces = [event(choice(text, ids=ids)) for text, ids in (("öß", [1]), ("", [2]))]
    wire = chunked(*pieces, event(choice("🙂!?", ids=[3, 4], finish="stop")))
    for place in range(1, len(wire)):
        (only,) = answered(wire[:place], wire[place:]).reader.choices()
        assert (only.text, only.chunk_chars, only.chunk_tokens) == ("öß🙂!?", (2, 0, 3), (1, 1, 2))
