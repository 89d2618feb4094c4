"""Speculative decoding: drafts of the decoding rows, their acceptance, and the price of both models."""

import dataclasses
from bisect import bisect_left
from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from benchctl.errors import UsageError
from benchctl.profile.choices import acceptance_by_position
from benchctl.sim.config import SimConfig
from benchctl.sim.costs.cost_model import CostModel, NoiseSource, StepBatch, cost_model_for
from benchctl.sim.engine import Pricing, SimulatedEngine
from benchctl.sim.guidance import UNGUIDED
from benchctl.sim.guided_rows import GuidedRows
from benchctl.sim.requests import Request
from benchctl.sim.scheduler import ScheduledBatch, Scheduler
from benchctl.sim.sequences import BlockManager, Prefills, Sequence, SequenceStatus, StepClock
from benchctl.sim.steps import DraftedStep
from benchctl.sim.walk import Walk
from benchctl.steptime.speculation_law import survival
from benchctl.workload.seeded import named_stream


class DraftingRow:
    """A sequence that decodes: a clock for its length, its blocks, and its stream of acceptances.

    One uniform number u decides a verification: the first i drafts are accepted where u < P(i). ``negated`` has
    -P(1) to -P(K), which ascend.
    """

    __slots__ = ("_clock", "_draw", "_negated", "is_behind", "num_blocks", "num_drafts", "num_tokens")

    def __init__(self, negated: tuple[float, ...], draw: Callable[[], float]) -> None:
        self._negated = negated
        self._draw = draw
        self._clock = StepClock()
        self.num_tokens = 0
        """Length of the sequence."""
        self.num_blocks = 0
        """Blocks of the sequence, those that rejected drafts have filled among them."""
        self.num_drafts = 0
        """Tokens drafted in the present step."""
        self.is_behind = False
        """Whether the draft model lacks the token before the newest one, because that one was a bonus token."""

    def begin(self, seq: Sequence, num_blocks: int) -> None:
        """Let a sequence decode from now on, which holds so many blocks."""
        self._clock = StepClock()
        seq.begin_decoding(self._clock)
        self.num_tokens, self.num_blocks, self.is_behind = seq.num_tokens, num_blocks, False

    def gain(self, num_tokens: int) -> None:
        """Lengthen the sequence."""
        self._clock.step += num_tokens
        self.num_tokens += num_tokens

    def num_accepted(self) -> int:
        """Accepted drafts of the next verification."""
        return min(bisect_left(self._negated, -self._draw()), self.num_drafts)


class Drafting:
    """Makes the rows of a server. Each has a stream of its own, so that its tokens do not depend on other rows.

    A stream is that of the request and of the server life (``noise_seed``): two lives differ in the drafts that
    they accept, as two real servers do, and one life repeated does not.
    """

    def __init__(self, config: SimConfig) -> None:
        """Raises UsageError for an acceptance outside of 0 to 1."""
        num_drafts, acceptance = config.num_speculative_tokens, acceptance_by_position(config.acceptance)
        self._acceptance: Final = (acceptance * num_drafts if len(acceptance) == 1 else acceptance)[:num_drafts]
        self._spread: Final = config.acceptance_spread
        self._noise_seed: Final = config.noise_seed
        self._negated: Final = _negated(self._acceptance)

    def row_of(self, seq: Sequence) -> DraftingRow:
        """The row of a sequence that begins to decode."""
        request = seq.request
        name = f"drafts:{self._noise_seed}:{request.prompt.digest}:{seq.choice}"
        draw = named_stream(request.seed, name).random
        if not self._spread:
            return DraftingRow(self._negated, draw)
        shift = self._spread * (2 * draw() - 1)
        return DraftingRow(_negated(tuple(a + shift * min(a, 1 - a) for a in self._acceptance)), draw)


def _negated(acceptance: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(-probability for probability in survival(acceptance)[1:])


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
        """Raises UsageError for a draft model whose shape is unknown."""
        if config.draft_model is None:
            self._model, self._share = target, config.draft_cost or 0.0
        else:
            draft = dataclasses.replace(config, model=config.draft_model, num_speculative_tokens=0)
            self._model, self._share = cost_model_for(draft), 1.0
        self._is_own_model: Final = config.draft_model is not None
        self._backfill: Final = config.backfill

    def drafts_ns(self, batch: StepBatch, drafted: DraftedRows) -> float:
        """All passes over a batch whose rows have one new token each."""
        total_ns = self._pass_ns(batch)
        for number in range(2, len(drafted.rows)):
            rows, context = drafted.drafting(number)
            if rows:
                total_ns += self._pass_ns(_decodes(batch, rows, context + rows * (number - 1)))
        return total_ns

    def backfill_ns(self, batch: StepBatch, rows_behind: int, context: int) -> float:
        """The pass over the tokens that the draft model lacks, besides those of ``drafts_ns``."""
        if self._backfill == "none" or not rows_behind:
            return 0.0
        if self._backfill == "prefill":
            return self._pass_ns(_prefills(rows_behind, context))
        return self._pass_ns(_expanded(batch, rows_behind, context)) - self._pass_ns(batch)

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


class DraftingPricing(Pricing):
    """A pricing for rows that gain several tokens in a step."""

    def _decode_contexts(self) -> tuple[int, int]:
        lengths = [seq.num_tokens for seq in self._scheduler.decoding]
        return (min(lengths), max(lengths)) if lengths else (0, 0)


class SpeculativeEngine(SimulatedEngine):
    """One server life with speculation.

    A step drafts for the rows that decode at its start and verifies these drafts; a prompt that ends in it drafts
    from the next step on. Drafts that a rejection or the end of the answer makes void are computed all the same,
    and those after the end count as accepted, as vLLM counts them.
    """

    def __init__(
        self,
        config: SimConfig,
        cost_model: CostModel,
        noise: NoiseSource | None,
        walk: Walk,
        guided_rows: GuidedRows,
    ) -> None:
        super().__init__(config, cost_model, noise, walk, guided_rows)
        self._draft_costs: Final = DraftCosts(config, cost_model)
        self._has_backfill: Final = config.bonus_token and config.backfill != "none"

    def check_servable(self, request: Request) -> None:
        """Raises UsageError when a request and its last drafts could never fit the context or the memory."""
        super().check_servable(request)
        num_drafts, blocks = self.config.num_speculative_tokens, self.block_manager
        longest = request.prompt.num_tokens + request.max_tokens - 1 + num_drafts
        most = blocks.blocks_for(min(longest, self.config.max_model_len))
        if most > blocks.num_blocks:
            raise UsageError(
                f"prompt of {request.prompt.num_tokens} tokens and max_tokens {request.max_tokens} need {most} "
                f"blocks of key-value memory with {num_drafts} draft tokens, the server has {blocks.num_blocks}; "
                "shorten either or start it with a larger --num-kv-blocks"
            )

    def _make_scheduler(self, max_num_seqs: int, max_num_batched_tokens: int, guided: GuidedRows) -> Scheduler:
        self._rows = DraftingScheduler(
            self.config,
            max_num_seqs,
            max_num_batched_tokens,
            self.block_manager,
            self._clock,
            guided=guided,
        )
        return self._rows

    def _make_pricing(self, cost_model: CostModel) -> Pricing:
        return DraftingPricing(cost_model, self.scheduler, self._clock, self.log)

    def _can_walk(self) -> bool:
        """False: which rows gain how much is drawn in each step."""
        return False

    def _run_priced(self, prefills: Prefills, num_preempted: int) -> list[Sequence]:
        """Draft, verify, and give each row its tokens; returns the decoding rows that are over."""
        log, start_ns = self.log, self.now_ns
        batch = self._pricing.describe(prefills, UNGUIDED)
        drafted = self._rows.drafted_rows()
        verification = verified(batch, drafted)
        cost = self._pricing.cost_model.price(verification)
        draft_ns = self._draft_costs.drafts_ns(batch, drafted)
        backfill_ns = self._draft_costs.backfill_ns(batch, *self._rows.rows_behind())
        rest_id = log.rest_id(cost.without_forwards())
        if self._noise is not None:
            factor = self._noise()
            log.factors.append(factor)
            cost, draft_ns, backfill_ns = cost.scaled(factor), draft_ns * factor, backfill_ns * factor
        parts_ns = (round(draft_ns), round(backfill_ns))
        dur_ns = cost.total_ns() + sum(parts_ns)
        self.now_ns = start_ns + dur_ns
        log.dur_ns.append(dur_ns)
        log.kv_used.append(self.block_manager.num_used)
        outcome = self._rows.verify()
        is_greedy = -1 if batch.is_greedy is None else batch.is_greedy
        rows = (len(prefills), batch.num_decodes, batch.num_prefill_tokens, verification.context_tokens)
        num_output = outcome.num_output + batch.num_sampling - batch.num_decodes
        log.add_stretch(rest_id, (1, start_ns, self.is_warmup, *rows, num_output, is_greedy, num_preempted))
        log.add_drafted(
            DraftedStep(
                drafted.num_rows,
                drafted.num_tokens,
                parts_ns[0],
                parts_ns[1] if self._has_backfill else -1,
                outcome.accepted_by_position,
            )
        )
        return outcome.finished

    def _begin_decoding(self, seq: Sequence, finished: list[Sequence]) -> None:
        if seq.first_token_ns is None:
            seq.first_token_ns = self.now_ns
        self.scheduler.finish_prefill(seq)
        if seq.num_tokens == seq.end:
            finished.append(seq)
