"""What is kept of a load in memory to judge by: every request without its arrivals, and a part of those.

Whether the client was late, or tokens came in bursts, tens of thousands of arrivals show as well as millions.
"""

from typing import Final

import msgspec

from benchctl.records.directory import LoadedRun
from benchctl.records.run import ClientSample, RequestRecord, RunRecord

NUM_CHUNKS: Final = 20_000
"""Arrivals that are kept, those of the requests that ended first: two megabytes."""


class LoadEvidence:
    """Takes in records and samples as they pass."""

    def __init__(self, num_chunks: int = NUM_CHUNKS) -> None:
        self._room = num_chunks
        self._requests: list[RequestRecord] = []
        self._samples: list[ClientSample] = []

    def take(self, record: RequestRecord) -> None:
        """Keep ``record``, and its arrivals while there is room: those of the last that has some are kept whole."""
        num_chunks = sum(len(choice.chunk_ns) for choice in record.choices)
        choices = record.choices if self._room > 0 else ()
        self._room -= num_chunks
        bare = tuple(msgspec.structs.replace(choice, text="") for choice in choices)
        self._requests.append(msgspec.structs.replace(record, choices=bare))

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
