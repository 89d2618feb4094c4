"""The steps after which decoding rows are over, the next one first."""

import heapq

from benchctl.sim.scheduling.sequence import Sequence


class RowEnds:
    """A heap of rows. Those that lost their memory or were dropped stay in it until they come to its top."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Sequence]] = []
        self._num_joins = 0

    def add(self, seq: Sequence, step: int) -> None:
        """Take in a row that begins to decode and is over after this step."""
        self._num_joins += 1
        seq.join = self._num_joins
        heapq.heappush(self._heap, (step, seq.join, seq))

    def next_step(self) -> int:
        """The step after which the next row is over; there must be a decoding row."""
        heap = self._heap
        while not (heap[0][2].is_decoding and heap[0][2].join == heap[0][1]):
            heapq.heappop(heap)
        return heap[0][0]

    def pop_until(self, step: int) -> list[Sequence]:
        """The rows that are over by this step, in the order in which they began to decode."""
        due: list[Sequence] = []
        heap = self._heap
        while heap and heap[0][0] <= step:
            _, join, seq = heapq.heappop(heap)
            if seq.is_decoding and seq.join == join:
                due.append(seq)
        return due
