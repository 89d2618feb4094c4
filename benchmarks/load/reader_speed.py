"""What it costs to understand an event of a stream, beside the least that Python could do for it.

    python -m benchmarks.load.reader_speed [--events N] [--repeats N]

The limit parses HTTP with httptools and decodes each event's JSON with msgspec, and knows neither where events end,
nor whose tokens they bring, nor when. Microseconds per event, the median of all repeats.
"""

import json
import time
from functools import partial

import httptools

from benchctl.load.answer import Answer
from benchctl.load.events import decode_event
from benchmarks.common.harness import compared, options, write

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def document(choice, **rest):
    told = {"index": 0, **choice, "logprobs": None, "finish_reason": None}
    return {"id": "cmpl-0123456789abcdef", "object": "x", "created": 1, "model": "m", "choices": [told], **rest}


FORMS = {
    "completion": lambda i: document({"text": f" t{i}"}),
    "completion with ids": lambda i: document({"text": f" t{i}", "token_ids": [i]}),
    "chat": lambda i: document({"delta": {"content": f" t{i}"}}),
    "running usage": lambda i: document({"text": " t"}, usage={"prompt_tokens": 9, "completion_tokens": i + 1}),
    "running timings": lambda i: document({"text": " t"}, timings={"predicted_n": i + 1, "predicted_ms": 3.5}),
}


def us_per_event(function, reads, num_events):
    start_s = time.perf_counter()
    function(reads)
    return {"us": (time.perf_counter() - start_s) / num_events * 1e6}


def understood(reads):
    answer = Answer(1)
    feed = answer.feed
    for t_ns, data in enumerate(reads):
        feed(t_ns, 0, data)


class Bare:
    def __init__(self):
        self.pieces = []
        self.on_body = self.pieces.append


def at_least(reads):
    bare = Bare()
    feed, pieces = httptools.HttpResponseParser(bare).feed_data, bare.pieces
    for data in reads:
        feed(data)
        for piece in pieces:
            decode_event(piece[6:-2])
        pieces.clear()


def main():
    asked = options(__doc__, events=500, repeats=100)
    tables = {}
    for form, make in FORMS.items():
        events = [b"data: " + json.dumps(make(i)).encode() + b"\n\n" for i in range(asked.events)]
        chunks = [b"%x\r\n%s\r\n" % (len(event), event) for event in events]
        for per_read in (1, 8):
            reads = [HEAD, *(b"".join(chunks[i : i + per_read]) for i in range(0, len(chunks), per_read))]
            ways = {"limit": partial(us_per_event, at_least, reads, len(events))}
            ways["benchctl"] = partial(us_per_event, understood, reads, len(events))
            title = f"{form}, {per_read} in each read"
            tables[title] = compared(title, ways, rounds=asked.repeats, ratios=["us"])
    write(asked.json, tables)


if __name__ == "__main__":
    main()
