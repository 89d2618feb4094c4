"""The rows of the next step: first come, first served, with chunked prefill and preemption."""

from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from benchctl.sim.block_manager import BlockManager
from benchctl.sim.sequence import Sequence, SequenceStatus


class ScheduledBatch(NamedTuple):
    """Rows of one step. ``prefills`` pairs a sequence with the tokens computed for it; ``decodes`` compute one."""

    prefills: list[tuple[Sequence, int]]
    decodes: list[Sequence]
    num_preempted: int


class Scheduler:
    """Continuous batching within three limits: sequences, tokens of a step, blocks.

    Decoding rows come first, then prompts begun, then the waiting queue in its order until one does not fit.
    When blocks run out, the sequence that arrived last gives up its blocks and computes everything again later.

    ``decode_context`` is the sum of ``num_tokens`` over the decoding sequences, ``num_sampled_decodes`` counts
    those of them that are not greedy; both are updated with each event, never recounted.
    """

    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int, block_manager: BlockManager) -> None:
        self.max_num_seqs: Final = max_num_seqs
        self.max_num_batched_tokens: Final = max_num_batched_tokens
        self.block_manager: Final = block_manager
        self.waiting: deque[Sequence] = deque()
        self.prefilling: list[Sequence] = []
        self.decoding: list[Sequence] = []
        self.decode_context = 0
        self.num_sampled_decodes = 0
        self.num_preemptions = 0
        self._needs_block: list[Sequence] = []

    @property
    def num_running(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    @property
    def has_work(self) -> bool:
        return bool(self.decoding or self.prefilling or self.waiting)

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def schedule(self) -> ScheduledBatch:
        """Choose the rows of the next step and give them their blocks."""
        preempted_before = self.num_preemptions
        if self._needs_block:
            self._append_blocks()
        prefills: list[tuple[Sequence, int]] = []
        if self.prefilling or self.waiting:
            self._schedule_prefills(prefills, self.max_num_batched_tokens - len(self.decoding))
        return ScheduledBatch(prefills, self.decoding, self.num_preemptions - preempted_before)

    def finish_prefill(self, seq: Sequence) -> None:
        """Move a sequence from prefill to decoding, once its prompt is computed and its first token sampled."""
        self.prefilling.remove(seq)
        self.decoding.append(seq)
        self.decode_context += seq.num_tokens
        self.num_sampled_decodes += not seq.is_greedy
        self.expect_event(seq)

    def expect_event(self, seq: Sequence) -> None:
        """Set the number of tokens at which a decoding sequence ends or needs a block."""
        capacity = len(seq.block_table) * self.block_manager.block_size
        if seq.num_tokens > capacity:
            self._needs_block.append(seq)
            capacity += self.block_manager.block_size
        seq.next_event = min(capacity + 1, seq.end)

    def finish(self, seqs: list[Sequence]) -> None:
        """Remove sequences for good, whatever their state."""
        leaving = set(seqs)
        self._remove(leaving.__contains__)
        for seq in seqs:
            seq.status = SequenceStatus.FINISHED
            self.block_manager.deallocate(seq)

    def preempt(self, seq: Sequence) -> None:
        """Put a running sequence back to the front of the queue, without its blocks."""
        self._remove(lambda other: other is seq)
        seq.status = SequenceStatus.WAITING
        self.block_manager.deallocate(seq)
        self.waiting.appendleft(seq)
        seq.num_preemptions += 1
        self.num_preemptions += 1

    def _append_blocks(self) -> None:
        needing = sorted(self._needs_block, key=lambda seq: seq.seq_id)
        self._needs_block = []
        for seq in needing:
            while seq.status is SequenceStatus.RUNNING and not self.block_manager.can_append():
                self.preempt(max(self.decoding + self.prefilling, key=lambda other: other.seq_id))
            if seq.status is SequenceStatus.RUNNING:
                self.block_manager.append(seq)

    def _schedule_prefills(self, prefills: list[tuple[Sequence, int]], budget: int) -> None:
        for seq in self.prefilling:
            if budget <= 0:
                return
            budget -= self._schedule_chunk(seq, budget, prefills)
        while budget > 0 and self.waiting and self.num_running < self.max_num_seqs:
            seq = self.waiting[0]
            if not self.block_manager.can_allocate(seq):
                return
            self.waiting.popleft()
            self.block_manager.allocate(seq)
            seq.status = SequenceStatus.RUNNING
            self.prefilling.append(seq)
            budget -= self._schedule_chunk(seq, budget, prefills)

    def _schedule_chunk(self, seq: Sequence, budget: int, prefills: list[tuple[Sequence, int]]) -> int:
        num_tokens = min(seq.num_tokens - seq.num_computed, budget)
        self.block_manager.publish(seq, seq.num_computed + num_tokens)
        prefills.append((seq, num_tokens))
        return num_tokens

    def _remove(self, leaves: Callable[[Sequence], bool]) -> None:
        for seq in self.decoding:
            if leaves(seq):
                self.decode_context -= seq.num_tokens
                self.num_sampled_decodes -= not seq.is_greedy
        self.decoding = [seq for seq in self.decoding if not leaves(seq)]
        self.prefilling = [seq for seq in self.prefilling if not leaves(seq)]
        self._needs_block = [seq for seq in self._needs_block if not leaves(seq)]
        if any(leaves(seq) for seq in self.waiting):
            self.waiting = deque(seq for seq in self.waiting if not leaves(seq))
