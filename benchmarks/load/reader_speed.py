"""What it costs to understand an event of a stream, beside the least that Python could do for it.

    python -m benchmarks.load.reader_speed [--events N] [--repeats N]

The limit parses HTTP with httptools and decodes each event's JSON with msgspec, and knows neither where events end,
nor whose tokens they bring, nor when. Best of all repeats, in microseconds per event.
"""

import argparse
import json
import time

import httptools

from benchctl.load.answer import Answer
from benchctl.load.events import decode_event

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


def best_us(function, reads, num_events, repeats):
    best_s = float("inf")
    for _ in range(repeats):
        start_s = time.perf_counter()
        function(reads)
        best_s = min(best_s, time.perf_counter() - start_s)
    return best_s / num_events * 1e6


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=100)
    options = parser.parse_args()
    print(f"{'form':<20} {'per read':>8} {'answer us':>10} {'limit us':>9} {'ratio':>6}")
    for form, write in FORMS.items():
        events = [b"data: " + json.dumps(write(i)).encode() + b"\n\n" for i in range(options.events)]
        chunks = [b"%x\r\n%s\r\n" % (len(event), event) for event in events]
        for per_read in (1, 8):
            reads = [b"".join(chunks[i : i + per_read]) for i in range(0, len(chunks), per_read)]
            answer_us, limit_us = (
                best_us(function, [HEAD, *reads], len(events), options.repeats)
                for function in (understood, at_least)
            )
            print(f"{form:<20} {per_read:>8} {answer_us:>10.2f} {limit_us:>9.2f} {answer_us / limit_us:>6.2f}")


if __name__ == "__main__":
    main()
