"""The rows of the next step: by arrival or by priority, with chunked prefill and preemption."""

import heapq
from typing import Final, NamedTuple

from benchctl.sim.guided_rows import GuidedRows
from benchctl.sim.sequences import BlockManager, Prefills, Sequence, SequenceStatus, StepClock


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


class ScheduledBatch(NamedTuple):
    """The part of a step besides a token for each decoding row."""

    prefills: Prefills
    num_preempted: int


_DECODES_ONLY: Final = ScheduledBatch((), 0)


class Scheduler:
    """Continuous batching within three limits: sequences, tokens of a step, blocks.

    Decoding rows come first, then prompts begun, then the waiting queue by rank until one does not fit. The rank
    is the arrival, or with ``by_priority`` the request's priority and then the arrival. When blocks run out, the
    running sequence of the highest rank gives up its blocks and computes everything again later.

    Of the decoding rows only sums are kept, which change when a row joins or leaves: ``decode_context``, the sum of
    their lengths, ``num_sampled_decodes``, those that are not greedy, and ``block_needs``: a row of L tokens at the
    begin of a step takes a new block if L - 1 is a multiple of the block size, so ``block_needs[s]`` counts
    the rows that do in every step whose number leaves remainder s.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        block_manager: BlockManager,
        clock: StepClock,
        *,
        by_priority: bool = False,
        guided: GuidedRows,
    ) -> None:
        self.max_num_seqs: Final = max_num_seqs
        self.max_num_batched_tokens: Final = max_num_batched_tokens
        self.block_manager: Final = block_manager
        self.prefilling: list[Sequence] = []
        self.decoding: dict[Sequence, None] = {}
        """The decoding rows in the order in which they began to decode."""
        self.guided: Final = guided
        """Those of them that ask for guidance."""
        self.num_waiting = 0
        self.decode_context = 0
        self.num_sampled_decodes = 0
        self.block_needs: Final = [0] * block_manager.block_size
        self.num_preemptions = 0
        self._clock: Final = clock
        self._by_priority: Final = by_priority
        self._waiting: list[tuple[tuple[int, int], Sequence]] = []

    @property
    def num_running(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    @property
    def has_work(self) -> bool:
        return bool(self.decoding or self.prefilling or self.num_waiting)

    def add(self, seq: Sequence) -> None:
        if self._by_priority:
            seq.rank = (seq.request.priority, seq.seq_id)
        self._wait(seq)

    def schedule(self) -> ScheduledBatch:
        """Choose the rows of the next step and give them their blocks."""
        preempted_before = self.num_preemptions
        if num_needed := self.block_needs[self._clock.step % self.block_manager.block_size]:
            blocks = self.block_manager
            if num_needed <= blocks.num_blocks - blocks.num_used:
                blocks.take(num_needed)
            else:
                self._append_blocks()
        if not self.prefilling and not self.num_waiting:
            return _DECODES_ONLY
        prefills: list[tuple[Sequence, int]] = []
        self._schedule_prefills(prefills, self.max_num_batched_tokens - len(self.decoding))
        return ScheduledBatch(prefills, self.num_preemptions - preempted_before)

    def finish_prefill(self, seq: Sequence) -> None:
        """Move a sequence from prefill to decoding, once its prompt is computed and its first token sampled."""
        self.prefilling.remove(seq)
        self.decoding[seq] = None
        seq.begin_decoding(self._clock)
        if seq.guided is not None:
            self.guided.join(seq)
        self.decode_context += seq.num_tokens
        self.num_sampled_decodes += not seq.is_greedy
        self.block_needs[(1 - seq.lead) % self.block_manager.block_size] += 1

    def advance(self, num_steps: int) -> None:
        """Give each decoding row as many tokens."""
        self._clock.step += num_steps
        self.decode_context += num_steps * len(self.decoding)

    def finish(self, seq: Sequence) -> None:
        """Remove a sequence for good, whatever its state."""
        was_decoding = seq.is_decoding
        num_blocks = self._leave(seq)
        seq.status = SequenceStatus.FINISHED
        if was_decoding and seq.request.answer_hashes:
            self.block_manager.keep_answer(seq)
        self.block_manager.deallocate(seq, num_blocks)

    def preempt(self, seq: Sequence) -> None:
        """Put a running sequence back into the queue, without its blocks."""
        num_blocks = self._leave(seq)
        seq.status = SequenceStatus.WAITING
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self.block_manager.deallocate(seq, num_blocks)
        self._wait(seq)

    def _wait(self, seq: Sequence) -> None:
        heapq.heappush(self._waiting, (seq.rank, seq))
        self.num_waiting += 1

    def _needing_steps(self, seq: Sequence) -> int:
        """Remainder of the steps in which a decoding row takes a block."""
        return (1 - seq.lead) % self.block_manager.block_size

    def _leave(self, seq: Sequence) -> int:
        """Take a sequence out of its place; returns the number of its blocks."""
        if seq.status is SequenceStatus.WAITING:
            self.num_waiting -= 1
            return 0
        if not seq.is_decoding:
            self.prefilling.remove(seq)
            return self.block_manager.blocks_for(seq.num_tokens)
        del self.decoding[seq]
        if seq.guided is not None:
            self.guided.leave(seq)
        num_tokens, block_size = seq.num_tokens, self.block_manager.block_size
        self.decode_context -= num_tokens
        self.num_sampled_decodes -= not seq.is_greedy
        self.block_needs[(1 - seq.lead) % block_size] -= 1
        seq.end_decoding()
        return -((1 - num_tokens) // block_size)  # all tokens but the newest had room in the last step

    def _append_blocks(self) -> None:
        """Give one more block to each row that needs it, and preempt while there is none."""
        remainder = self._clock.step % self.block_manager.block_size
        needing = [seq for seq in self.decoding if self._needing_steps(seq) == remainder]
        for seq in sorted(needing, key=lambda seq: seq.rank):
            while seq.status is SequenceStatus.RUNNING and not self.block_manager.num_free:
                self.preempt(self._last_in_rank())
            if seq.status is SequenceStatus.RUNNING:
                self.block_manager.take(1)

    def _last_in_rank(self) -> Sequence:
        if self._by_priority:
            return max([*self.decoding, *self.prefilling], key=lambda seq: seq.rank)
        return self.prefilling[-1] if self.prefilling else next(reversed(self.decoding))

    def _schedule_prefills(self, prefills: list[tuple[Sequence, int]], budget: int) -> None:
        for seq in self.prefilling:
            if budget <= 0:
                return
            budget -= self._schedule_chunk(seq, budget, prefills)
        while budget > 0 and self.num_waiting and self.num_running < self.max_num_seqs:
            while (seq := self._waiting[0][1]).status is SequenceStatus.FINISHED:
                heapq.heappop(self._waiting)
            if not self.block_manager.allocate(seq):
                return
            heapq.heappop(self._waiting)
            self.num_waiting -= 1
            seq.status = SequenceStatus.RUNNING
            self.prefilling.append(seq)
            budget -= self._schedule_chunk(seq, budget, prefills)

    def _schedule_chunk(self, seq: Sequence, budget: int, prefills: list[tuple[Sequence, int]]) -> int:
        num_tokens = min(seq.num_tokens - seq.num_computed, budget)
        if seq.request.prompt.block_hashes:
            self.block_manager.publish(seq, seq.num_computed + num_tokens)
        prefills.append((seq, num_tokens))
        return num_tokens
