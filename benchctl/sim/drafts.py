"""Speculative decoding: drafts of the decoding rows, their acceptance, and the price of both models.

A step drafts for the rows that decode at its start and verifies these drafts; a prompt that ends in it drafts from
the next step on. Drafts that a rejection or the end of the answer makes void are computed all the same, and those
after the end count as accepted, as vLLM counts them.

    draft    = pass over the decoding rows and the step's prompts, then K - 1 passes over the rows that draft on
    backfill = expansion: what the rows whose bonus token lacks its predecessor add to the first pass
               prefill:   a pass of its own over these tokens
    verify   = model_forward and sampler of the model, with 1 + K new tokens in each decoding row

A pass of a draft model is a step of it without its schedule. With ``draft_cost`` c it is c times a step of the
model itself, so that a step of decoding rows takes K c + 1 + backfill / step times one that verifies nothing, as
far as verifying takes no longer than decoding.
"""

from bisect import bisect_left
from collections.abc import Callable
from itertools import accumulate
from operator import mul
from typing import Final, NamedTuple

import msgspec

from benchctl.sim.config import SimConfig
from benchctl.sim.costs.cost_model import CostModel, StepBatch, cost_model_for
from benchctl.sim.sequences import BlockManager, Sequence
from benchctl.workload.seeded import named_stream


class DraftingRow:
    """The drafts of one sequence: its stream of acceptances, and the blocks that they need.

    One uniform number u decides a verification: the first i drafts are accepted where u < P(i). ``negated`` has
    -P(1) to -P(K), which ascend.
    """

    __slots__ = ("_draw", "_negated", "is_behind", "num_blocks", "num_drafts")

    def __init__(self, negated: tuple[float, ...], draw: Callable[[], float]) -> None:
        self._negated = negated
        self._draw = draw
        self.num_blocks = 0
        """Blocks of the sequence, those that rejected drafts have filled among them."""
        self.num_drafts = 0
        """Tokens drafted in the present step."""
        self.is_behind = False
        """Whether the draft model lacks the token before the newest one, because that one was a bonus token."""

    def num_accepted(self) -> int:
        """Accepted drafts of the next verification."""
        return min(bisect_left(self._negated, -self._draw()), self.num_drafts)


class DraftedRows(NamedTuple):
    """Decoding rows of a step by their drafts: entry k has the number of rows with k drafts, and their tokens."""

    rows: list[int]
    contexts: list[int]

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


class Drafts:
    """The decoding rows of a server that speculates: their drafts, and room for them.

    Every row keeps its newest token; drafts come in the order of rows as far as the budget and the context go. Room
    that rejected drafts have left is kept for the next ones. Each row has a stream of its own, so that its tokens
    do not depend on other rows. A stream is that of the request and of the server life (``noise_seed``): two lives
    differ in the drafts that they accept, as two real servers do, and one life repeated does not. The stream of a
    row that loses its memory goes on where it stopped.
    """

    def __init__(self, config: SimConfig, block_manager: BlockManager, target: CostModel) -> None:
        """Raises UsageError for a draft model whose shape is unknown."""
        self._num_drafts: Final = config.num_speculative_tokens
        acceptance = config.acceptances
        self._acceptance: Final = (acceptance * self._num_drafts if len(acceptance) == 1 else acceptance)[
            : self._num_drafts
        ]
        self._spread: Final = config.acceptance_spread
        self._noise_seed: Final = config.noise_seed
        self._negated: Final = _negated(self._acceptance)
        self._max_model_len: Final = config.max_model_len
        self._has_bonus: Final = config.bonus_token
        self._block_manager: Final = block_manager
        self._costs: Final = DraftCosts(config, target)
        self._rows: Final[dict[Sequence, DraftingRow]] = {}
        self._growing: Final[list[tuple[DraftingRow, int]]] = []
        """Rows that need more blocks for their drafts, and the blocks that they then have."""

    def join(self, seq: Sequence) -> None:
        """Take in a sequence that begins to decode, for the first time or again."""
        row = seq.drafting = seq.drafting or self._row_of(seq)
        row.num_blocks = self._block_manager.blocks_for(
            seq.num_tokens - 1
        )  # those of its prompt: all but the newest
        row.is_behind = False
        self._rows[seq] = row

    def leave(self, seq: Sequence) -> int:
        """Let go of a row; returns the number of its blocks."""
        return self._rows.pop(seq).num_blocks

    def choose(self, max_tokens: int) -> int:
        """Choose the drafts of each row for a step of ``max_tokens``; returns the tokens of all rows."""
        spare, block_size = max_tokens - len(self._rows), self._block_manager.block_size
        most, limit = self._num_drafts, self._max_model_len
        self._growing.clear()
        for seq, row in self._rows.items():
            num_drafts, num_tokens = most, seq.lead
            if most > spare or num_tokens + most > limit:
                num_drafts = max(0, min(spare, limit - num_tokens))
            row.num_drafts = num_drafts
            spare -= num_drafts
            if num_tokens + num_drafts > row.num_blocks * block_size:
                self._growing.append((row, self._block_manager.blocks_for(num_tokens + num_drafts)))
        return max_tokens - spare

    def take_blocks(self) -> bool:
        """Give all rows the blocks that their drafts need; False, and none is given, where there are too few."""
        num_missing = sum([num_blocks - row.num_blocks for row, num_blocks in self._growing])
        if num_missing > self._block_manager.num_free:
            return False
        if num_missing:
            self._block_manager.take(num_missing)
            for row, num_blocks in self._growing:
                row.num_blocks = num_blocks
        return True

    def take_blocks_of(self, seq: Sequence) -> bool:
        """Give one row the blocks that its drafts need; False where there are too few."""
        row, blocks = self._rows[seq], self._block_manager
        num_missing = max(0, blocks.blocks_for(seq.lead + row.num_drafts) - row.num_blocks)
        if num_missing > blocks.num_free:
            return False
        blocks.take(num_missing)
        row.num_blocks += num_missing
        return True

    def num_tokens(self) -> int:
        """Tokens of all rows: the newest of each, and its drafts."""
        return sum([1 + row.num_drafts for row in self._rows.values()])

    def describe(self, batch: StepBatch) -> tuple[StepBatch, tuple[float, ...]]:
        """The batch with the drafts that it verifies, and the times of the passes that make them in ns."""
        rows, contexts = [0] * (self._num_drafts + 1), [0] * (self._num_drafts + 1)
        for seq, row in self._rows.items():
            rows[row.num_drafts] += 1
            contexts[row.num_drafts] += seq.lead
        drafted = DraftedRows(rows, contexts)
        behind = [seq.lead - 1 for seq, row in self._rows.items() if row.is_behind]
        return verified(batch, drafted), self._costs.passes_ns(batch, drafted, len(behind), sum(behind))

    def verify(self) -> tuple[int, list[int], int, list[Sequence]]:
        """Give each row its accepted drafts and one more token, as far as its answer goes.

        The one more replaces the first rejected draft, or is the bonus token. Returns the number of rows that had
        drafts, the accepted drafts by position, the tokens that all rows have gained, and the rows that are over.
        """
        accepted = [0] * (self._num_drafts + 1)
        finished: list[Sequence] = []
        num_drafts = num_output = 0
        has_bonus = self._has_bonus
        for seq, row in self._rows.items():
            count, is_whole = 0, False
            if row.num_drafts:
                num_drafts += 1
                count = row.num_accepted()
                is_whole = count == row.num_drafts
            accepted[count] += 1
            row.is_behind = is_whole and has_bonus
            left = seq.end - seq.lead
            gain = count if is_whole and not has_bonus else count + 1
            if gain >= left:
                gain = left
                finished.append(seq)
            seq.lead += gain  # the clock of these rows stands still
            num_output += gain
        by_position = [sum(accepted[position:]) for position in range(1, self._num_drafts + 1)]
        return num_drafts, by_position, num_output, finished

    def _row_of(self, seq: Sequence) -> DraftingRow:
        request = seq.request
        name = f"drafts:{self._noise_seed}:{request.prompt.digest}:{seq.choice}"
        draw = named_stream(request.seed, name).random
        if not self._spread:
            return DraftingRow(self._negated, draw)
        shift = self._spread * (2 * draw() - 1)
        return DraftingRow(_negated(tuple(a + shift * min(a, 1 - a) for a in self._acceptance)), draw)


def _negated(acceptance: tuple[float, ...]) -> tuple[float, ...]:
    """-P(i) for the i-th draft and all before it."""
    return tuple(-probability for probability in accumulate(acceptance, mul))


def verified(batch: StepBatch, drafted: DraftedRows) -> StepBatch:
    """The batch with its drafts: each has logits, attends to all before it, and lengthens its row."""
    num_drafts, longest = drafted.num_tokens, len(drafted.rows) - 1
    positions = drafted.num_positions
    return msgspec.structs.replace(
        batch,
        num_decode_tokens=batch.num_decode_tokens + num_drafts,
        num_sampling=batch.num_sampling + num_drafts,
        context_tokens=batch.context_tokens + num_drafts,
        attended_positions=batch.attended_positions + positions,
        decode_context=batch.decode_context + num_drafts,
        longest_decode=batch.longest_decode + longest if batch.longest_decode else 0,
        draft_tokens=num_drafts,
        draft_positions=positions,
    )


class DraftCosts:
    """Prices of the draft model's passes, in nanoseconds that are not rounded yet."""

    def __init__(self, config: SimConfig, target: CostModel) -> None:
        if config.draft_model is None:
            self._model, self._share = target, config.draft_cost or 0.0
        else:
            draft = config.model_copy(update={"model": config.draft_model, "num_speculative_tokens": 0})
            self._model, self._share = cost_model_for(draft), 1.0
        self._is_own_model: Final = config.draft_model is not None
        self._backfill: Final = config.backfill if config.bonus_token else "none"

    def passes_ns(
        self, batch: StepBatch, drafted: DraftedRows, rows_behind: int, context: int
    ) -> tuple[float, ...]:
        """All drafting passes over a batch whose rows have one new token each, and the backfill where there is one.

        The draft model lacks a token of ``rows_behind`` rows, whose tokens up to that one are ``context``.
        """
        first_ns = drafts_ns = self._pass_ns(batch)
        for number in range(2, len(drafted.rows)):
            rows, tokens = drafted.drafting(number)
            if rows:
                drafts_ns += self._pass_ns(_decodes(batch, rows, tokens + rows * (number - 1)))
        if self._backfill == "none":
            return (drafts_ns,)
        if not rows_behind:
            return drafts_ns, 0.0
        if self._backfill == "prefill":
            return drafts_ns, self._pass_ns(_prefills(rows_behind, context))
        return drafts_ns, self._pass_ns(_expanded(batch, rows_behind, context)) - first_ns

    def _pass_ns(self, batch: StepBatch) -> float:
        if not self._share:
            return 0.0
        cost = self._model.price(batch)
        return self._share * (cost.total_ns() - (cost.schedule if self._is_own_model else 0))


def _decodes(batch: StepBatch, rows: int, context: int) -> StepBatch:
    """Decoding rows alone, their contexts after the pass adding up to ``context``."""
    return StepBatch(
        num_seqs=rows,
        num_prefill_tokens=0,
        num_decode_tokens=rows,
        num_sampling=rows,
        context_tokens=context,
        attended_positions=context,
        is_greedy=batch.is_greedy,
        decode_context=context,
        shortest_decode=batch.shortest_decode,
        longest_decode=batch.longest_decode,
    )


def _expanded(batch: StepBatch, rows: int, context: int) -> StepBatch:
    """The batch with more rows, each for the token before the newest one of another."""
    return msgspec.structs.replace(
        batch,
        num_seqs=batch.num_seqs + rows,
        num_decode_tokens=batch.num_decode_tokens + rows,
        num_sampling=batch.num_sampling + rows,
        context_tokens=batch.context_tokens + context,
        attended_positions=batch.attended_positions + context,
        decode_context=batch.decode_context + context,
    )


def _prefills(rows: int, context: int) -> StepBatch:
    """A prompt of one token for each row, which samples nothing."""
    return StepBatch(
        num_seqs=rows,
        num_prefill_tokens=rows,
        num_decode_tokens=0,
        num_sampling=0,
        context_tokens=context,
        attended_positions=context,
        is_greedy=None,
    )
