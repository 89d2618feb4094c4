"""The rows of the next step: by arrival, with chunked prefill and preemption."""

import heapq
from collections.abc import Callable, Iterable
from typing import Final

from benchctl.sim.drafts import Drafts
from benchctl.sim.guidance import GuidedRows
from benchctl.sim.sequences import BlockManager, Prefills, Sequence, SequenceStatus, StepClock


class Scheduler:
    """Continuous batching within three limits: sequences, tokens of a step, blocks.

    Decoding rows come first, then prompts begun, then the waiting queue by arrival until one does not fit. When
    blocks run out, the running sequence that began last gives up its blocks and computes everything again later.

    Of the decoding rows only sums are kept, which change when a row joins or leaves: ``decode_context``, the sum of
    their lengths, ``num_sampled_decodes``, those that are not greedy, and ``block_needs``: a row of L tokens at the
    begin of a step takes a new block if L - 1 is a multiple of the block size, so ``block_needs[s]`` counts
    the rows that do in every step whose number leaves remainder s. The step after which a row is over is known when
    it begins to decode: ``next_end`` is the nearest one.

    With ``drafts`` rows gain several tokens in a step: the clock stands still, and each row is looked at in each
    step.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        block_manager: BlockManager,
        *,
        guided: GuidedRows,
        drafts: Drafts | None = None,
        has_closing_step: bool = False,
    ) -> None:
        self.max_num_seqs: Final = max_num_seqs
        self.max_num_batched_tokens: Final = max_num_batched_tokens
        self.block_manager: Final = block_manager
        self.clock: Final = StepClock()
        """Steps that have been run, from which the lengths of decoding rows are counted."""
        self.prefilling: list[Sequence] = []
        self.decoding: dict[Sequence, None] = {}
        """The decoding rows in the order in which they began to decode."""
        self.guided: Final = guided
        """Those of them that ask for guidance."""
        self.drafts: Final = drafts
        """Those of them that draft, which are all of them or none."""
        self.num_waiting = 0
        self.decode_context = 0
        self.num_sampled_decodes = 0
        self.block_needs: Final = [0] * block_manager.block_size
        self.num_preemptions = 0
        self._closing_steps: Final = int(has_closing_step)
        self._waiting: list[tuple[int, Sequence]] = []
        self._ends: list[tuple[int, int, Sequence]] = []
        """Heap of the steps after which rows are over; one that left earlier stays until it comes to the top."""
        self._num_joins = 0

    @property
    def num_running(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    @property
    def has_work(self) -> bool:
        return bool(self.decoding or self.prefilling or self.num_waiting)

    def add(self, seq: Sequence) -> None:
        heapq.heappush(self._waiting, (seq.seq_id, seq))
        self.num_waiting += 1

    def schedule(self) -> tuple[Prefills, int]:
        """Choose the rows of the next step and give them their blocks.

        Returns what it computes besides the decoding rows, and the number of sequences that lost their memory.
        """
        preempted_before = self.num_preemptions
        num_tokens = len(self.decoding)
        if self.drafts is not None:
            num_tokens = self.drafts.choose(self.max_num_batched_tokens)
            if not self.drafts.take_blocks():
                self._preempt_until(self.decoding, self.drafts.take_blocks_of)
                num_tokens = self.drafts.num_tokens()
        elif num_needed := self.block_needs[self.clock.step % self.block_manager.block_size]:
            blocks = self.block_manager
            if num_needed <= blocks.num_blocks - blocks.num_used:
                blocks.take(num_needed)
            else:
                self._append_blocks()
                num_tokens = len(self.decoding)
        prefills: list[tuple[Sequence, int]] = []
        if self.prefilling or self.num_waiting:
            self._schedule_prefills(prefills, self.max_num_batched_tokens - num_tokens)
        return prefills, self.num_preemptions - preempted_before

    def finish_prefill(self, seq: Sequence) -> None:
        """Move a sequence from prefill to decoding, once its prompt is computed and its first token sampled."""
        self.prefilling.remove(seq)
        self.decoding[seq] = None
        seq.begin_decoding(self.clock)
        self.decode_context += seq.num_tokens
        self.num_sampled_decodes += not seq.is_greedy
        if self.drafts is not None:
            self.drafts.join(seq)
            return
        if seq.guided is not None:
            self.guided.join(seq.guided, seq.lead, self.clock.step)
        self.block_needs[(1 - seq.lead) % self.block_manager.block_size] += 1
        self._num_joins += 1
        seq.join = self._num_joins
        heapq.heappush(self._ends, (seq.end + self._closing_steps - seq.lead, seq.join, seq))

    def advance(self, num_steps: int) -> list[Sequence]:
        """Give each decoding row as many tokens; returns those that are over, in the order in which they joined."""
        self.clock.step += num_steps
        self.decode_context += num_steps * len(self.decoding)
        over: list[Sequence] = []
        ends, step = self._ends, self.clock.step
        while ends and ends[0][0] <= step:
            _, join, seq = heapq.heappop(ends)
            if seq.is_decoding and seq.join == join:
                over.append(seq)
        return over

    def next_end(self) -> int:
        """The step after which the next row is over; there must be a decoding row."""
        ends = self._ends
        while not (ends[0][2].is_decoding and ends[0][2].join == ends[0][1]):
            heapq.heappop(ends)
        return ends[0][0]

    def decode_lengths(self) -> tuple[int, int]:
        """Tokens of the shortest and of the longest decoding row, 0 without any."""
        leads = [seq.lead for seq in self.decoding]
        return (self.clock.step + min(leads), self.clock.step + max(leads)) if leads else (0, 0)

    def finish(self, seq: Sequence) -> None:
        """Remove a sequence for good, whatever its state."""
        num_blocks = self._leave(seq)
        seq.status = SequenceStatus.FINISHED
        self.block_manager.deallocate(seq, num_blocks)

    def preempt(self, seq: Sequence) -> None:
        """Put a running sequence back into the queue, without its blocks."""
        num_blocks = self._leave(seq)
        seq.status = SequenceStatus.WAITING
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self.block_manager.deallocate(seq, num_blocks)
        self.add(seq)

    def _leave(self, seq: Sequence) -> int:
        """Take a sequence out of its place; returns the number of its blocks."""
        if seq.status is SequenceStatus.WAITING:
            self.num_waiting -= 1
            return 0
        if not seq.is_decoding:
            self.prefilling.remove(seq)
            return self.block_manager.blocks_for(seq.num_tokens)
        del self.decoding[seq]
        num_tokens, block_size = seq.num_tokens, self.block_manager.block_size
        self.decode_context -= num_tokens
        self.num_sampled_decodes -= not seq.is_greedy
        if self.drafts is not None:
            num_blocks = self.drafts.leave(seq)
        else:
            if seq.guided is not None:
                self.guided.leave(seq.guided, self.clock.step)
            self.block_needs[(1 - seq.lead) % block_size] -= 1
            num_blocks = -((1 - num_tokens) // block_size)  # all tokens but the newest had room in the last step
        seq.end_decoding()
        return num_blocks

    def _append_blocks(self) -> None:
        """Give one more block to each row that needs it, and preempt while there is none."""
        blocks = self.block_manager
        remainder = self.clock.step % blocks.block_size

        def give(_: Sequence) -> bool:
            if blocks.num_free:
                blocks.take(1)
                return True
            return False

        needing = [seq for seq in self.decoding if (1 - seq.lead) % blocks.block_size == remainder]
        self._preempt_until(needing, give)

    def _preempt_until(self, rows: Iterable[Sequence], give: Callable[[Sequence], bool]) -> None:
        """Give blocks to these rows in the order of arrival, and preempt while one cannot be given its."""
        for seq in sorted(rows, key=lambda seq: seq.seq_id):
            while seq.status is SequenceStatus.RUNNING and not give(seq):
                self.preempt(self.prefilling[-1] if self.prefilling else next(reversed(self.decoding)))

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
