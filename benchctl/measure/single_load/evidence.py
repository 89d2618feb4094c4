"""The part of a load that is kept in memory to judge it: each request with its first arrivals, and some of the
others.

Tens of thousands of arrivals show as well as millions whether the client was late or tokens came in bursts. But
only its own first token shows how well that of a request is known.
"""

from collections.abc import Mapping
from typing import Final

import msgspec

from benchctl.analysis.metrics.bounds import Bounds, metric_bounds
from benchctl.records.loaded import LoadedRun
from benchctl.records.record import ChoiceRecord, RequestRecord, RunRecord
from benchctl.records.schema import ClientSample

NUM_CHUNKS: Final = 20_000
"""Arrivals that are kept, of requests from the whole load; they take two megabytes."""
NUM_REQUESTS: Final = 8
"""Requests that keep their arrivals however many these are, so that the end of a load is covered, too."""
_SPAN: Final = 1 << 32
_GOLDEN: Final = 2_654_435_769
"""Its multiples fill the span evenly, and are not in step with worker processes that take turns."""


class LoadEvidence:
    """Collects records and samples of a load while it is sent."""

    def __init__(self, num_chunks: int = NUM_CHUNKS, num_requests: int = NUM_REQUESTS) -> None:
        self._most_chunks, self._enough_requests = num_chunks, num_requests
        self._requests: list[RequestRecord] = []
        self._whole: dict[int, int] = {}
        """Number of arrivals by the index of each request that still has them."""
        self._num_chunks = 0
        self._limit = _SPAN
        self._samples: list[ClientSample] = []

    def take(self, record: RequestRecord) -> None:
        """Keep ``record``, and its arrivals if it is one of the sample."""
        index = len(self._requests)
        is_whole = _rank(index) < self._limit
        bare = msgspec.structs.replace(
            record, choices=tuple(msgspec.structs.replace(choice, text="") for choice in record.choices)
        )
        self._requests.append(bare if is_whole else _with_first_read(bare))
        if is_whole:
            self._whole[index] = sum(len(choice.chunk_ns) for choice in bare.choices)
            self._num_chunks += self._whole[index]
        while self._num_chunks > self._most_chunks and len(self._whole) > self._enough_requests:
            self._thin()

    def _thin(self) -> None:
        """Drop the arrivals of every second request that still has them."""
        self._limit //= 2
        for index in [index for index in self._whole if _rank(index) >= self._limit]:
            self._num_chunks -= self._whole.pop(index)
            self._requests[index] = _with_first_read(self._requests[index])

    def take_sample(self, sample: ClientSample) -> None:
        self._samples.append(sample)

    def bounds(self) -> Mapping[str, Bounds]:
        """The metrics of the load that depend on arrivals which are only known between bounds."""
        whole = [self._requests[index] for index in self._whole]
        return metric_bounds(self._requests, whole, self._samples)

    def as_run(self, record: RunRecord) -> LoadedRun:
        """The collected part of the load as a run that can be judged."""
        return LoadedRun(
            record=record,
            requests=tuple(
                request if index in self._whole else msgspec.structs.replace(request, choices=())
                for index, request in enumerate(self._requests)
            ),
            steps=(),
            gpu=(),
            host=(),
            prometheus=(),
            warnings=(),
            client=tuple(self._samples),
        )


def _with_first_read(record: RequestRecord) -> RequestRecord:
    """The record with only the first read of each choice: the chunks that share the first time."""
    return msgspec.structs.replace(record, choices=tuple(map(_first_read, record.choices)))


def _first_read(choice: ChoiceRecord) -> ChoiceRecord:
    num_chunks = choice.chunk_ns.count(choice.chunk_ns[0]) if choice.chunk_ns else 0
    late_ns = choice.chunk_late_ns
    return ChoiceRecord(
        index=choice.index,
        chunk_ns=choice.chunk_ns[:num_chunks],
        chunk_late_ns=None if late_ns is None else late_ns[:num_chunks],
    )


def _rank(index: int) -> int:
    return index * _GOLDEN % _SPAN
