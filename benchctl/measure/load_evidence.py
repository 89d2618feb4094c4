"""What is kept of a load in memory to judge by: every request without its arrivals, and a part of those.

Whether the client was late, or tokens came in bursts, tens of thousands of arrivals show as well as millions.
"""

from typing import Final

import msgspec

from benchctl.records.directory import LoadedRun
from benchctl.records.run import ClientSample, RequestRecord, RunRecord

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
        bare = tuple(msgspec.structs.replace(choice, text="") for choice in record.choices) if is_whole else ()
        self._requests.append(msgspec.structs.replace(record, choices=bare))
        if is_whole:
            self._whole[place] = sum(len(choice.chunk_ns) for choice in bare)
            self._num_chunks += self._whole[place]
        while self._num_chunks > self._most_chunks and len(self._whole) > self._enough_requests:
            self._thin()

    def _thin(self) -> None:
        """Let go of the arrivals of every second request that has its own."""
        self._limit //= 2
        for place in [place for place in self._whole if _rank(place) >= self._limit]:
            self._num_chunks -= self._whole.pop(place)
            self._requests[place] = msgspec.structs.replace(self._requests[place], choices=())

    def take_sample(self, sample: ClientSample) -> None:
        self._samples.append(sample)

    def as_run(self, record: RunRecord) -> LoadedRun:
        """What was kept, in the shape in which runs are judged."""
        return LoadedRun(
            record=record,
            requests=tuple(self._requests),
            steps=(),
            gpu=(),
            host=(),
            prometheus=(),
            warnings=(),
            client=tuple(self._samples),
        )


def _rank(place: int) -> int:
    return place * _GOLDEN % _SPAN
