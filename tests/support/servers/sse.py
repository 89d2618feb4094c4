"""Streamed answers as servers write them: events, choices, and HTTP around them."""

import itertools
import json

from benchctl.load.answer import Answer, CompletionReader
from benchctl.records.record import PreparedRequest

HEAD = b"HTTP/1.1 200 OK\r\nserver: x\r\ncontent-type: text/event-stream\r\n"


def event(*choices, **rest):
    return b"data: " + json.dumps({"choices": list(choices), **rest}, ensure_ascii=False).encode() + b"\n\n"


def choice(content=None, *, index=0, finish=None, ids=None, **delta):
    """What a chat event says of one choice."""
    if content is not None:
        delta["content"] = content
    return {"index": index, "delta": delta, "finish_reason": finish, "token_ids": ids}


def written(text, *, index=0, finish=None, ids=None):
    """What an event of a completion says of one choice."""
    return {"index": index, "text": text, "finish_reason": finish, "token_ids": ids}


def used(completion_tokens, **rest):
    return {"prompt_tokens": 9, "completion_tokens": completion_tokens, **rest}


def total(count):
    """The last event, of which the count is for the whole request."""
    return event(usage=used(count))


def so_far(count):
    """What llama-server says of the request in each event."""
    return {"prompt_n": 9, "predicted_n": count, "predicted_ms": 1.5}


def lines(data, end):
    """``data`` with ``end`` at the end of each line."""
    return data.replace(b"\n", end)


def request(n=1, *, max_tokens=99, ignore_eos=False):
    return PreparedRequest(
        request_id="r",
        index=0,
        arrival_ns=0,
        prompt="?",
        prompt_tokens=9,
        max_tokens=max_tokens,
        ignore_eos=ignore_eos,
        n=n,
        seed=0,
        source="test",
    )


def read(*events, n=1):
    """A reader after ``events``, of which the i-th arrived at i and was read 10 i later."""
    reader = CompletionReader(n)
    for i, data in enumerate(events):
        reader.feed(i, data, 10 * i)
    reader.finish(len(events))
    return reader


def chunked(*pieces):
    """An HTTP answer that sends each of ``pieces`` as a chunk."""
    body = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces if piece)
    return HEAD + b"transfer-encoding: chunked\r\n\r\n" + body + b"0\r\n\r\n"


def cut(data, places):
    """``data`` in parts that begin at ``places``."""
    edges = sorted({0, len(data), *(min(place, len(data)) for place in places)})
    return [data[a:b] for a, b in itertools.pairwise(edges)]


def answered(*reads, n=1):
    """An answer after ``reads``, of which the i-th arrived at i; then the connection ended."""
    answer = Answer(n)
    for i, data in enumerate(reads):
        answer.feed(i, 10 * i, data)
    answer.finish(len(reads))
    return answer


def told(reader):
    """All that a reader understood, but for times."""
    choices = [
        (c.index, c.text, c.chunk_chars, c.chunk_tokens, c.output_tokens, c.finish_reason, len(c.chunk_ns))
        for c in reader.choices()
    ]
    usage = reader.usage
    stated = usage and (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)
    kind = reader.error and reader.error.kind  # the message may quote the read that shows the error
    return choices, stated, reader.output_tokens, kind, reader.cut_event, reader.is_terminated
