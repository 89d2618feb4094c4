"""The engine: schedule, price, advance. Pure and in virtual time: no clock, no network, no waiting."""

import heapq
from typing import Final, NamedTuple

import msgspec

from benchctl.errors import UsageError
from benchctl.records.step import StepRecord
from benchctl.sim.answer import PlannedAnswers
from benchctl.sim.block_manager import BlockManager
from benchctl.sim.config import SimConfig
from benchctl.sim.costs.cost_model import CostModel, DecodeCost, StepBatch
from benchctl.sim.costs.noise import NoiseSource
from benchctl.sim.guidance import REPEATS_FROM_TOKENS, UNGUIDED, GuidedRow, GuidedStep, score_rows
from benchctl.sim.request import Request
from benchctl.sim.scheduler import ScheduledBatch, Scheduler
from benchctl.sim.sequence import Sequence, SequenceStatus, StepClock
from benchctl.sim.step_log import StepLog
from benchctl.sim.walk import NEVER_NS, Course, Walk, noisy_walk, walk_steps
from benchctl.workload.seeded import named_stream

_UNLIMITED: Final = 1 << 40


class StepOutput(NamedTuple):
    """The results of one step: its record, and the sequences and requests that it advanced or ended."""

    record: StepRecord
    emitted: list[Sequence]
    finished: list[Sequence]
    finished_requests: list[str]


class LeapOutput(NamedTuple):
    """The sequences and requests that ended with the last of some steps."""

    finished: list[Sequence]
    finished_requests: list[str]


class _DecodePrice(NamedTuple):
    cost: DecodeCost
    rest_id: int
    fixed_ns: int


class SimulatedEngine:
    """One server life.

    ``step`` runs one iteration and tells all about it; ``leap`` runs iterations until something changes the batch,
    and leaves their columns in ``log``. Both run the same code and give the same steps.

    Invariants: ``now_ns`` never falls; the tokens of all steps are the tokens of all answers; every sequence
    added is finished or aborted once.
    """

    def __init__(
        self, config: SimConfig, cost_model: CostModel, noise: NoiseSource | None = None, walk: Walk = walk_steps
    ) -> None:
        self.config: Final = config
        self._cost_model: Final = cost_model
        self._noise: Final = noise
        self._walk: Final = walk if noise is None else noisy_walk(noise)
        self._has_value_model: Final = config.value_model is not None
        self._clock: Final = StepClock()
        self.block_manager: Final = BlockManager(
            _UNLIMITED if cost_model.is_unlimited else config.num_kv_blocks,
            config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        self.scheduler: Final = Scheduler(
            min(config.max_num_seqs, cost_model.max_num_seqs or config.max_num_seqs),
            _UNLIMITED if cost_model.is_unlimited else config.max_num_batched_tokens,
            self.block_manager,
            self._clock,
            by_priority=config.scheduling == "priority",
        )
        self.log: Final = StepLog(has_noise=noise is not None, has_guidance=self._has_value_model)
        self.now_ns = 0
        self.is_warmup = False
        """Whether steps are marked as warm-up."""
        self._num_seqs = 0
        self._num_joins = 0
        self._is_value_model_loaded = False
        self._open: dict[str, list[Sequence]] = {}
        self._num_unfinished: dict[str, int] = {}
        self._ends: list[tuple[int, int, Sequence]] = []
        """Heap of the steps after which decoding rows are over; those that lost their memory stay in it."""
        self._decode_prices: dict[tuple[int, bool], _DecodePrice] = {}

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def check_servable(self, request: Request) -> None:
        """Raises UsageError when a request could never fit the context or the key-value memory."""
        prompt_tokens = request.prompt.num_tokens
        total = prompt_tokens + request.max_tokens
        if total > self.config.max_model_len:
            raise UsageError(
                f"prompt of {prompt_tokens} tokens and max_tokens {request.max_tokens} exceed the context of "
                f"{self.config.max_model_len} tokens; shorten either"
            )
        if (blocks := self.block_manager.blocks_for(total)) > self.block_manager.num_blocks:
            raise UsageError(
                f"prompt of {prompt_tokens} tokens and max_tokens {request.max_tokens} need {blocks} blocks of "
                f"key-value memory, the server has {self.block_manager.num_blocks}; shorten either or start it "
                "with a larger --num-kv-blocks"
            )

    def add_request(self, request: Request) -> list[Sequence]:
        """Queue the choices of a request at the present virtual time."""
        answers = PlannedAnswers(request, self._cost_model.answer_length)
        seqs = [
            Sequence(self._num_seqs + choice + 1, request, choice, answers, self.now_ns)
            for choice in range(request.n)
        ]
        self._num_seqs += request.n
        self._open[request.request_id] = seqs
        self._num_unfinished[request.request_id] = request.n
        for seq in seqs:
            if request.guidance is not None and self._has_value_model:
                seq.guided = self._guided_row(seq)
            self.scheduler.add(seq)
        return seqs

    def abort(self, request_id: str) -> None:
        """Drop the unfinished sequences of a request; one that is unknown or finished is left alone."""
        self._num_unfinished.pop(request_id, None)
        for seq in self._open.pop(request_id, ()):
            if seq.status is not SequenceStatus.FINISHED:
                self.scheduler.finish(seq)

    def step(self) -> StepOutput:
        """Run one iteration over the batch and move virtual time to its end; the log is empty afterwards."""
        emitted: list[Sequence] = []
        finished, finished_requests = self._advance(1, NEVER_NS, emitted)
        record = next(self.log.records())
        self.log.clear()
        return StepOutput(record, emitted, finished, finished_requests)

    def leap(self, until_ns: int = NEVER_NS) -> LeapOutput:
        """Run iterations until a row begins or ends, or until time ``until_ns``."""
        return self._advance(1 << 40, until_ns, None)

    def _advance(self, max_steps: int, until_ns: int, emitted: list[Sequence] | None) -> LeapOutput:
        scheduled = self.scheduler.schedule()
        if emitted is not None:
            emitted += scheduled.decodes
        if scheduled.prefills or self.scheduler.guided or self._cost_model.decode is None:
            due = self._run_priced(scheduled)
        else:
            due = self._run_decodes(scheduled.num_preempted, max_steps, until_ns)
        finished = list(due)
        for seq, num_tokens in scheduled.prefills:
            seq.num_computed += num_tokens
            if seq.num_computed == seq.num_tokens:
                self._begin_decoding(seq, finished)
                if emitted is not None:
                    emitted.append(seq)
        if emitted is not None and self._cost_model.has_closing_step:
            for seq in due:
                emitted.remove(seq)
        return LeapOutput(finished, self._close(finished))

    def _run_decodes(self, num_preempted: int, max_steps: int, until_ns: int) -> list[Sequence]:
        """Run decode steps until one of the rows is over; returns the rows that are."""
        scheduler, blocks, step = self.scheduler, self.block_manager, self._clock.step
        num_rows, context = len(scheduler.decoding), scheduler.decode_context
        price, position = self._decode_price(), context
        if self._cost_model.pads_batches:
            position = self._longest_decode()
        slope = 1 if self._cost_model.pads_batches else num_rows
        num_steps = min(max_steps, self._next_end() - step)
        if price.cost.until is not None:
            num_steps = min(num_steps, -((position - price.cost.until) // slope))
        if self._cost_model.has_closing_step and num_steps > 1:
            num_steps -= 1  # the last step of a row yields no token and stands alone
        course = Course(
            cost=price.cost,
            fixed_ns=price.fixed_ns,
            position=position,
            slope=slope,
            now_ns=self.now_ns,
            until_ns=until_ns,
            num_steps=num_steps,
            step=step,
            kv_used=blocks.num_used,
            needs=scheduler.block_needs,
            num_blocks=blocks.num_blocks,
        )
        num_run, end_ns, kv_used = self._walk(course, self.log)
        blocks.take(kv_used - blocks.num_used)
        start_ns, self.now_ns = self.now_ns, end_ns
        is_greedy = scheduler.num_sampled_decodes == 0
        scheduler.advance(num_run)
        due = self._due()
        num_output = num_rows - len(due) if self._cost_model.has_closing_step else num_rows
        self.log.stretches.extend(
            (num_run, start_ns, self.is_warmup, 0, num_rows, 0, context, num_output, is_greedy, num_preempted)
        )
        self.log.rest_ids.append(price.rest_id)
        if self._has_value_model:
            self.log.add_unguided(num_run)
        return due

    def _decode_price(self) -> _DecodePrice:
        """The price of the present batch of decoding rows."""
        scheduler = self.scheduler
        key = (len(scheduler.decoding), scheduler.num_sampled_decodes == 0)
        price = self._decode_prices.get(key)
        if price is not None and price.cost.until is None:
            return price
        batch = self._describe(ScheduledBatch([], scheduler.decoding, 0))
        position = batch.longest_context if self._cost_model.pads_batches else batch.context_tokens
        if price is None or not price.cost.since <= position < (price.cost.until or position):
            if self._cost_model.decode is None:
                raise TypeError("this cost model describes no decode stretches")
            cost = self._cost_model.decode(batch)
            price = _DecodePrice(cost, self.log.rest_id(cost.rest), cost.rest.total_ns())
            self._decode_prices[key] = price
        return price

    def _run_priced(self, scheduled: ScheduledBatch) -> list[Sequence]:
        """Run one step at the cost model's price; returns the decoding rows that are over."""
        batch = self._describe(scheduled)
        cost = self._cost_model.price(batch)
        if self._noise is not None:
            factor = self._noise()
            self.log.factors.append(factor)
            dur_ns = cost.scaled(factor).total_ns()
        else:
            factor, dur_ns = 1.0, cost.total_ns()
        lvm_forward_ns = cost.lvm_forward
        rest = msgspec.structs.replace(cost, model_forward=0, lvm_forward=None if lvm_forward_ns is None else 0)
        if self._has_value_model:
            self.log.add_guided(batch.guided, None if lvm_forward_ns is None else round(lvm_forward_ns * factor))
        kv_used = self.block_manager.num_used
        start_ns = self.now_ns
        self.now_ns = start_ns + dur_ns
        self.scheduler.advance(1)
        due = self._due()
        num_output = batch.num_sampling - (len(due) if self._cost_model.has_closing_step else 0)
        is_greedy = -1 if batch.is_greedy is None else batch.is_greedy
        prefills = (len(scheduled.prefills), batch.num_decode_tokens, batch.num_prefill_tokens)
        self.log.stretches.extend(
            (
                1,
                start_ns,
                self.is_warmup,
                *prefills,
                batch.context_tokens,
                num_output,
                is_greedy,
                scheduled.num_preempted,
            )
        )
        self.log.rest_ids.append(self.log.rest_id(rest))
        self.log.dur_ns.append(dur_ns)
        self.log.kv_used.append(kv_used)
        return due

    def _describe(self, scheduled: ScheduledBatch) -> StepBatch:
        prefills, num_decodes = scheduled.prefills, len(scheduled.decodes)
        num_prefill_tokens = 0
        context = attended = self.scheduler.decode_context
        num_sampling, num_sampled = num_decodes, self.scheduler.num_sampled_decodes
        for seq, num_tokens in prefills:
            num_prefill_tokens += num_tokens
            context += seq.num_computed + num_tokens
            attended += num_tokens * seq.num_computed + num_tokens * (num_tokens + 1) // 2
            if seq.num_computed + num_tokens == seq.num_tokens:
                num_sampling += 1
                num_sampled += not seq.is_greedy
        guided = self._score(scheduled) if self._has_value_model else UNGUIDED
        loads = guided.scored_rows > 0 and not self._is_value_model_loaded
        self._is_value_model_loaded |= loads
        pads = self._cost_model.pads_batches
        return StepBatch(
            num_seqs=num_decodes + len(prefills),
            num_prefill_tokens=num_prefill_tokens,
            num_decode_tokens=num_decodes,
            num_sampling=num_sampling,
            context_tokens=context,
            attended_positions=attended,
            decode_context=self.scheduler.decode_context,
            is_greedy=num_sampled == 0 if num_sampling else None,
            guided=guided,
            loads_value_model=loads,
            longest_context=self._longest_context(prefills) if pads else 0,
            most_new_tokens=max([1, *(num_tokens for _, num_tokens in prefills)]) if pads else 0,
        )

    def _longest_decode(self) -> int:
        return self._clock.step + max([seq.lead for seq in self.scheduler.decoding])

    def _longest_context(self, prefills: list[tuple[Sequence, int]]) -> int:
        lengths = [seq.num_computed + num_tokens for seq, num_tokens in prefills]
        return max([*lengths, self._longest_decode()] if self.scheduler.decoding else lengths)

    def _guided_row(self, seq: Sequence) -> GuidedRow | None:
        request, prompt_tokens = seq.request, seq.prompt_tokens
        guidance = request.guidance
        if guidance is None or seq.is_greedy or (guidance.is_neutral and self.config.revision == "V2"):
            return None
        return GuidedRow(
            guidance,
            request.sampling,
            prompt_tokens=prompt_tokens,
            draw=named_stream(request.seed, f"candidates:{request.prompt.digest}:{seq.choice}").random,
            revision=self.config.revision,
            repeats_from=None if request.ignore_eos else prompt_tokens + REPEATS_FROM_TOKENS,
        )

    def _score(self, scheduled: ScheduledBatch) -> GuidedStep:
        rows = [(seq.guided, seq.num_tokens) for seq in self.scheduler.guided if seq.guided is not None]
        for seq, num_tokens in scheduled.prefills:
            if seq.guided is not None and seq.num_computed + num_tokens == seq.num_tokens:
                rows.append((seq.guided, seq.num_tokens))
        return score_rows(rows, self.config.revision) if rows else UNGUIDED

    def _begin_decoding(self, seq: Sequence, finished: list[Sequence]) -> None:
        """Let a row whose prompt is computed decode from the next step on, unless its first token is its last."""
        if seq.first_token_ns is None:
            seq.first_token_ns = self.now_ns
        self.scheduler.finish_prefill(seq)
        has_closing_step = self._cost_model.has_closing_step
        if seq.num_tokens == seq.end and not has_closing_step:
            finished.append(seq)
            return
        self._num_joins += 1
        seq.join = self._num_joins
        heapq.heappush(self._ends, (seq.end + has_closing_step - seq.lead, seq.join, seq))

    def _next_end(self) -> int:
        """The step after which the next decoding row is over; there must be a decoding row."""
        while not self._is_current(self._ends[0]):
            heapq.heappop(self._ends)
        return self._ends[0][0]

    def _due(self) -> list[Sequence]:
        """The decoding rows that are over now, in the order in which they began to decode."""
        due = []
        while self._ends and self._ends[0][0] <= self._clock.step:
            end = heapq.heappop(self._ends)
            if self._is_current(end):
                due.append(end[2])
        return due

    def _is_current(self, end: tuple[int, int, Sequence]) -> bool:
        return end[2].is_decoding and end[2].join == end[1]

    def _close(self, finished: list[Sequence]) -> list[str]:
        """Remove finished sequences; returns the requests that have none left."""
        closed = []
        for seq in finished:
            seq.last_token_ns = self.now_ns
            self.scheduler.finish(seq)
            request_id = seq.request.request_id
            self._num_unfinished[request_id] -= 1
            if not self._num_unfinished[request_id]:
                del self._num_unfinished[request_id], self._open[request_id]
                closed.append(request_id)
        return closed
