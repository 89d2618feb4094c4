"""What is kept of a load in memory to judge by: every request with its first arrival, and a part of the others.

Whether the client was late, or tokens came in bursts, tens of thousands of arrivals show as well as millions. How
well the first token of each request is known shows in no other.
"""

from collections.abc import Mapping
from typing import Final

import msgspec

from benchctl.analysis.metrics.bounds import Bounds, metric_bounds
from benchctl.records.loaded import LoadedRun
from benchctl.records.request import ChoiceRecord, RequestRecord
from benchctl.records.run import RunRecord
from benchctl.records.samples import ClientSample

NUM_CHUNKS: Final = 20_000
"""Arrivals that are kept, of requests from the whole load: two megabytes."""
NUM_REQUESTS: Final = 8
"""Requests that are kept with their arrivals however long they are, so that the end of a load is seen, too."""
_SPAN: Final = 1 << 32
_GOLDEN: Final = 2_654_435_769
"""Its multiples fill the span evenly, and do not keep step with processes that take turns."""


class LoadEvidence:
    """Takes in records and samples as they pass."""

    def __init__(self, num_chunks: int = NUM_CHUNKS, num_requests: int = NUM_REQUESTS) -> None:
        self._most_chunks, self._enough_requests = num_chunks, num_requests
        self._requests: list[RequestRecord] = []
        self._whole: dict[int, int] = {}
        """Places of the requests that still have their arrivals, with how many these are."""
        self._num_chunks = 0
        self._limit = _SPAN
        self._samples: list[ClientSample] = []

    def take(self, record: RequestRecord) -> None:
        """Keep ``record``, and its arrivals where it is one of those that stand for the load."""
        place = len(self._requests)
        is_whole = _rank(place) < self._limit
        bare = msgspec.structs.replace(
            record, choices=tuple(msgspec.structs.replace(choice, text="") for choice in record.choices)
        )
        self._requests.append(bare if is_whole else _with_first_read(bare))
        if is_whole:
            self._whole[place] = sum(len(choice.chunk_ns) for choice in bare.choices)
            self._num_chunks += self._whole[place]
        while self._num_chunks > self._most_chunks and len(self._whole) > self._enough_requests:
            self._thin()

    def _thin(self) -> None:
        """Let go of the arrivals of every second request that has its own."""
        self._limit //= 2
        for place in [place for place in self._whole if _rank(place) >= self._limit]:
            self._num_chunks -= self._whole.pop(place)
            self._requests[place] = _with_first_read(self._requests[place])

    def take_sample(self, sample: ClientSample) -> None:
        self._samples.append(sample)

    def bounds(self) -> Mapping[str, Bounds]:
        """The metrics of the load that rest on arrivals which are only known between bounds."""
        whole = [self._requests[place] for place in self._whole]
        return metric_bounds(self._requests, whole, self._samples)

    def as_run(self, record: RunRecord) -> LoadedRun:
        """What was kept, in the shape in which runs are judged."""
        return LoadedRun(
            record=record,
            requests=tuple(
                request if place in self._whole else msgspec.structs.replace(request, choices=())
                for place, request in enumerate(self._requests)
            ),
            steps=(),
            gpu=(),
            host=(),
            prometheus=(),
            warnings=(),
            client=tuple(self._samples),
        )


def _with_first_read(record: RequestRecord) -> RequestRecord:
    """The record with what the first read brought of each choice: the chunks that share the first time."""
    return msgspec.structs.replace(record, choices=tuple(map(_first_read, record.choices)))


def _first_read(choice: ChoiceRecord) -> ChoiceRecord:
    num_chunks = choice.chunk_ns.count(choice.chunk_ns[0]) if choice.chunk_ns else 0
    late_ns = choice.chunk_late_ns
    return ChoiceRecord(
        index=choice.index,
        chunk_ns=choice.chunk_ns[:num_chunks],
        chunk_late_ns=None if late_ns is None else late_ns[:num_chunks],
    )


def _rank(place: int) -> int:
    return place * _GOLDEN % _SPAN
