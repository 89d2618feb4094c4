"""Rows of steps that draft and verify: each decoding row has several new tokens, and gains some of them."""

from typing import Final, NamedTuple

from benchctl.sim.config import SimConfig
from benchctl.sim.guided.rows import GuidedRows
from benchctl.sim.scheduling.block_manager import BlockManager
from benchctl.sim.scheduling.scheduler import ScheduledBatch, Scheduler
from benchctl.sim.scheduling.sequence import Sequence, SequenceStatus, StepClock
from benchctl.sim.speculation.rows import Drafting, DraftingRow


class DraftedRows(NamedTuple):
    """Decoding rows of a step by their drafts: entry k has the number of rows with k drafts, and their tokens."""

    rows: list[int]
    contexts: list[int]

    @property
    def num_rows(self) -> int:
        """Rows with at least one draft."""
        return sum(self.rows[1:])

    @property
    def num_tokens(self) -> int:
        """Drafts of all rows."""
        return sum(k * rows for k, rows in enumerate(self.rows))

    @property
    def num_positions(self) -> int:
        """Positions that the drafts see: draft j of a row of L tokens sees L + j."""
        per_row = zip(self.rows, self.contexts, strict=True)
        return sum(k * context + rows * k * (k + 1) // 2 for k, (rows, context) in enumerate(per_row))

    def drafting(self, number: int) -> tuple[int, int]:
        """The rows that draft in pass ``number``, from 1, and the sum of their tokens before the step."""
        return sum(self.rows[number:]), sum(self.contexts[number:])


class Verification(NamedTuple):
    """The tokens that the decoding rows of a step have gained."""

    accepted_by_position: list[int]
    num_output: int
    finished: list[Sequence]


class DraftingScheduler(Scheduler):
    """A scheduler whose decoding rows have room for their drafts, in the budget of tokens and in blocks.

    Every row keeps its newest token; drafts come in the order of rows as far as the budget and the context go. Room
    that rejected drafts have left is kept for the next ones.
    """

    def __init__(
        self,
        config: SimConfig,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        block_manager: BlockManager,
        clock: StepClock,
        *,
        guided: GuidedRows,
    ) -> None:
        super().__init__(
            max_num_seqs,
            max_num_batched_tokens,
            block_manager,
            clock,
            by_priority=config.scheduling == "priority",
            guided=guided,
        )
        self.rows: Final[dict[Sequence, DraftingRow]] = {}
        """The decoding rows, as ``decoding`` has them."""
        self._paused: Final[dict[Sequence, DraftingRow]] = {}
        """Rows that lost their memory; their streams go on where they stopped."""
        self._drafting: Final = Drafting(config)
        self._num_drafts: Final = config.num_speculative_tokens
        self._max_model_len: Final = config.max_model_len
        self._has_bonus: Final = config.bonus_token

    def schedule(self) -> ScheduledBatch:
        """Choose the drafts and the prompts of the next step, and give every row its blocks."""
        preempted_before = self.num_preemptions
        num_tokens = self._plan_drafts()
        prefills: list[tuple[Sequence, int]] = []
        if self.prefilling or self.num_waiting:
            self._schedule_prefills(prefills, self.max_num_batched_tokens - num_tokens)
        return ScheduledBatch(prefills, self.num_preemptions - preempted_before)

    def drafted_rows(self) -> DraftedRows:
        """The decoding rows of the present step by their number of drafts."""
        rows, contexts = [0] * (self._num_drafts + 1), [0] * (self._num_drafts + 1)
        for row in self.rows.values():
            rows[row.num_drafts] += 1
            contexts[row.num_drafts] += row.num_tokens
        return DraftedRows(rows, contexts)

    def rows_behind(self) -> tuple[int, int]:
        """The rows whose draft model lacks a token, and the sum of their tokens up to that one."""
        behind = [row.num_tokens - 1 for row in self.rows.values() if row.is_behind]
        return len(behind), sum(behind)

    def verify(self) -> Verification:
        """Give each decoding row its accepted drafts and one more token, as far as its answer goes.

        The one more replaces the first rejected draft, or is the bonus token.
        """
        accepted = [0] * (self._num_drafts + 1)
        finished: list[Sequence] = []
        num_output, has_bonus = 0, self._has_bonus
        for seq, row in self.rows.items():
            count = row.num_accepted() if row.num_drafts else 0
            accepted[count] += 1
            is_whole = row.num_drafts > 0 and count == row.num_drafts
            row.is_behind = is_whole and has_bonus
            left = seq.end - row.num_tokens
            gain = count if is_whole and not has_bonus else count + 1
            if gain >= left:
                gain = left
                finished.append(seq)
            row.gain(gain)
            num_output += gain
        self.decode_context += num_output
        by_position = [sum(accepted[position:]) for position in range(1, self._num_drafts + 1)]
        return Verification(by_position, num_output, finished)

    def finish_prefill(self, seq: Sequence) -> None:
        self.prefilling.remove(seq)
        self.decoding[seq] = None
        row = self._paused.pop(seq, None) or self._drafting.row_of(seq)
        self.rows[seq] = row
        row.begin(seq, self.block_manager.blocks_for(seq.num_tokens))
        self.decode_context += seq.num_tokens
        self.num_sampled_decodes += not seq.is_greedy

    def finish(self, seq: Sequence) -> None:
        super().finish(seq)
        self._paused.pop(seq, None)

    def preempt(self, seq: Sequence) -> None:
        if (row := self.rows.get(seq)) is not None:
            self._paused[seq] = row
        super().preempt(seq)

    def _leave(self, seq: Sequence) -> int:
        row = self.rows.pop(seq, None)
        if row is None:
            return super()._leave(seq)
        del self.decoding[seq]
        self.decode_context -= seq.num_tokens
        self.num_sampled_decodes -= not seq.is_greedy
        seq.end_decoding()
        return row.num_blocks

    def _plan_drafts(self) -> int:
        """Choose the drafts of each row and give it blocks for them; returns the tokens of all rows."""
        block_size, spare = self.block_manager.block_size, self.max_num_batched_tokens - len(self.rows)
        num_missing, limit = 0, self._max_model_len
        growing: list[tuple[DraftingRow, int]] = []
        for row in self.rows.values():
            num_drafts = self._num_drafts
            if num_drafts > spare or row.num_tokens + num_drafts > limit:
                num_drafts = max(0, min(spare, limit - row.num_tokens))
            row.num_drafts = num_drafts
            spare -= num_drafts
            if row.num_tokens + num_drafts > row.num_blocks * block_size:
                num_blocks = self.block_manager.blocks_for(row.num_tokens + num_drafts)
                num_missing += num_blocks - row.num_blocks
                growing.append((row, num_blocks))
        if num_missing > self.block_manager.num_free:
            self._preempt_for_drafts()
            return sum([1 + row.num_drafts for row in self.rows.values()])
        if num_missing:
            self.block_manager.take(num_missing)
            for row, num_blocks in growing:
                row.num_blocks = num_blocks
        return self.max_num_batched_tokens - spare

    def _preempt_for_drafts(self) -> None:
        """Give blocks to each row that needs some, in the order of ranks, and preempt while there are too few."""
        blocks = self.block_manager
        for seq, row in sorted(self.rows.items(), key=lambda item: item[0].rank):
            while seq.status is SequenceStatus.RUNNING:
                num_missing = blocks.blocks_for(row.num_tokens + row.num_drafts) - row.num_blocks
                if num_missing <= blocks.num_free:
                    if num_missing > 0:
                        blocks.take(num_missing)
                        row.num_blocks += num_missing
                    break
                self.preempt(self._last_in_rank())
