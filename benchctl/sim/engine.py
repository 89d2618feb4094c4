"""The engine: schedule, price, advance. Pure and in virtual time: no clock, no network, no waiting."""

from typing import Final, NamedTuple

from benchctl.errors import UsageError
from benchctl.records.schema import StepRecord
from benchctl.sim.answers import PlannedAnswers
from benchctl.sim.config import SimConfig
from benchctl.sim.costs.cost_model import CostModel, DecodeCost, GuidedDecodeCost, NoiseSource, StepBatch
from benchctl.sim.guidance import UNGUIDED, GuidedStep
from benchctl.sim.guided_rows import GuidedRows
from benchctl.sim.requests import Request
from benchctl.sim.scheduler import RowEnds, Scheduler
from benchctl.sim.sequences import BlockManager, Prefills, Sequence, SequenceStatus, StepClock
from benchctl.sim.steps import StepLog
from benchctl.sim.walk import NEVER_NS, Course, Walk, noisy_walk


class DecodePrice(NamedTuple):
    """The price of decode steps, the number of its ``rest`` in the log, and the time of that."""

    cost: DecodeCost
    rest_id: int
    fixed_ns: int


class GuidedPrice(NamedTuple):
    """The same for decode steps of a batch with guided rows."""

    cost: GuidedDecodeCost
    rest_id: int
    fixed_ns: int


class Pricing:
    """Describes batches to the cost model, and keeps the prices of decode steps that hold for many of them."""

    def __init__(self, cost_model: CostModel, scheduler: Scheduler, clock: StepClock, log: StepLog) -> None:
        self.cost_model: Final = cost_model
        self._scheduler: Final = scheduler
        self._clock: Final = clock
        self._log: Final = log
        self._is_value_model_loaded = False
        self._guided_prices: dict[tuple[int, int], GuidedPrice] = {}
        self._decode_prices: dict[tuple[int, int], DecodePrice] = {}

    def decode_price(self, position: int) -> DecodePrice:
        """The price of the decoding rows alone, from ``position`` on; see ``DecodeCost``."""
        scheduler = self._scheduler
        key = (len(scheduler.decoding), scheduler.num_sampled_decodes and 1)
        price = self._decode_prices.get(key)
        if price is None or self.cost_model.reads_contexts or not price.cost.holds_at(position):
            if self.cost_model.decode is None:
                raise TypeError("this cost model describes no decode steps")
            cost = self.cost_model.decode(self.describe((), UNGUIDED))
            price = DecodePrice(cost, self._log.rest_id(cost.rest), cost.rest.total_ns())
            self._decode_prices[key] = price
        return price

    @property
    def leaps_guided(self) -> bool:
        """True if decode steps of guided rows have a price that holds for many; the first scored step has not."""
        return self.cost_model.guided_decode is not None and self._is_value_model_loaded

    def guided_price(self, wanted_rows: int) -> GuidedPrice:
        """The price of the decoding rows alone, of which ``wanted_rows`` ask for guidance."""
        key = (len(self._scheduler.decoding), wanted_rows)
        price = self._guided_prices.get(key)
        if price is None:
            if self.cost_model.guided_decode is None:
                raise TypeError("this cost model describes no guided decode steps")
            cost = self.cost_model.guided_decode(self.describe((), GuidedStep(wanted_rows=wanted_rows)))
            price = GuidedPrice(cost, self._log.rest_id(cost.scored_rest), cost.decode.rest.total_ns())
            self._guided_prices[key] = price
        return price

    def describe(self, prefills: Prefills, guided: GuidedStep) -> StepBatch:
        """The batch of the decoding rows and these prompts."""
        scheduler, num_prefill_tokens = self._scheduler, 0
        num_decodes = num_sampling = len(scheduler.decoding)
        context = attended = scheduler.decode_context
        num_sampled = scheduler.num_sampled_decodes
        for seq, num_tokens in prefills:
            computed = seq.num_computed + num_tokens
            num_prefill_tokens += num_tokens
            context += computed
            attended += num_tokens * seq.num_computed + num_tokens * (num_tokens + 1) // 2
            if computed == seq.num_tokens:
                num_sampling += 1
                num_sampled += not seq.is_greedy
        loads = guided.scored_rows > 0 and not self._is_value_model_loaded
        self._is_value_model_loaded |= loads
        pads = self.cost_model.pads_batches
        shortest, longest = self._decode_contexts() if self.cost_model.reads_contexts else (0, 0)
        return StepBatch(
            num_seqs=num_decodes + len(prefills),
            num_prefill_tokens=num_prefill_tokens,
            num_decode_tokens=num_decodes,
            num_sampling=num_sampling,
            context_tokens=context,
            attended_positions=attended,
            is_greedy=num_sampled == 0 if num_sampling else None,
            guided=guided,
            loads_value_model=loads,
            longest_context=self._longest_context(prefills) if pads else 0,
            most_new_tokens=max([min(num_decodes, 1), *(num for _, num in prefills)]) if pads else 0,
            decode_context=scheduler.decode_context,
            shortest_decode=shortest,
            longest_decode=longest,
        )

    def _decode_contexts(self) -> tuple[int, int]:
        """Tokens of the shortest and the longest decoding row, 0 without any."""
        leads = [seq.lead for seq in self._scheduler.decoding]
        return (self._clock.step + min(leads), self._clock.step + max(leads)) if leads else (0, 0)

    def longest_decode(self) -> int:
        """Tokens of the longest decoding row; there must be one."""
        return self._clock.step + max([seq.lead for seq in self._scheduler.decoding])

    def _longest_context(self, prefills: Prefills) -> int:
        lengths = [seq.num_computed + num_tokens for seq, num_tokens in prefills]
        return max([*lengths, self.longest_decode()] if self._scheduler.decoding else lengths)


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


class SimulatedEngine:
    """One server life.

    ``step`` runs one iteration and tells all about it; ``leap`` runs iterations until something changes the batch,
    and leaves their columns in ``log``. Both run the same code and give the same steps.

    Invariants: ``now_ns`` never falls; the tokens of all steps are the tokens of all answers; every sequence
    added is finished or aborted once.
    """

    def __init__(
        self,
        config: SimConfig,
        cost_model: CostModel,
        noise: NoiseSource | None,
        walk: Walk,
        guided_rows: GuidedRows,
    ) -> None:
        self.config: Final = config
        self._answer_length: Final = cost_model.answer_length
        self._leaps: Final = cost_model.decode is not None
        self._pads_batches: Final = cost_model.pads_batches
        self._has_closing_step: Final = cost_model.has_closing_step
        self._noise: Final = noise
        self._walk: Final = walk if noise is None else noisy_walk(noise)
        self._has_value_model: Final = config.value_model is not None
        self._clock: Final = StepClock()
        self.block_manager: Final = BlockManager(
            _UNLIMITED if cost_model.is_unlimited else config.num_kv_blocks,
            config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        self.scheduler: Final = self._make_scheduler(
            min(config.max_num_seqs, cost_model.max_num_seqs or config.max_num_seqs),
            _UNLIMITED if cost_model.is_unlimited else config.max_num_batched_tokens,
            guided_rows,
        )
        self.log: Final = StepLog(
            has_noise=noise is not None,
            has_guidance=self._has_value_model,
            num_drafts=config.num_speculative_tokens,
        )
        self._pricing: Final = self._make_pricing(cost_model)
        self.now_ns = 0
        self.is_warmup = False
        """Whether steps are marked as warm-up."""
        self._num_seqs = 0
        self._plans_ahead: Final = config.async_scheduling
        self._is_planned = False
        """Whether the next step was planned while the last one ran."""
        self._joining: list[Sequence] = []
        """Sequences that came too late for the next step."""
        self._open: dict[str, list[Sequence]] = {}
        self._num_unfinished: dict[str, int] = {}
        self._ends: Final = RowEnds()

    def _make_scheduler(self, max_num_seqs: int, max_num_batched_tokens: int, guided: GuidedRows) -> Scheduler:
        return Scheduler(
            max_num_seqs,
            max_num_batched_tokens,
            self.block_manager,
            self._clock,
            by_priority=self.config.scheduling == "priority",
            guided=guided,
        )

    def _make_pricing(self, cost_model: CostModel) -> Pricing:
        return Pricing(cost_model, self.scheduler, self._clock, self.log)

    @property
    def has_work(self) -> bool:
        return bool(self._num_unfinished)

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
        """Queue the choices of a request at the present virtual time.

        With asynchronous scheduling they wait beside the queue while a step runs that was planned without them.
        """
        answers = PlannedAnswers(request, self._answer_length)
        seqs = [
            Sequence(self._num_seqs + choice + 1, request, choice, answers, self.now_ns)
            for choice in range(request.n)
        ]
        self._num_seqs += request.n
        self._open[request.request_id] = seqs
        self._num_unfinished[request.request_id] = request.n
        for seq in seqs:
            if request.guidance is not None and self._has_value_model:
                seq.guided = self.scheduler.guided.row_of(seq)
            if self._is_planned:
                self._joining.append(seq)
            else:
                self.scheduler.add(seq)
        return seqs

    def abort(self, request_id: str) -> None:
        """Drop the unfinished sequences of a request; one that is unknown or finished is left alone."""
        self._num_unfinished.pop(request_id, None)
        for seq in self._open.pop(request_id, ()):
            if seq in self._joining:
                self._joining.remove(seq)
                self.scheduler.add(seq)
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
        scheduler = self.scheduler
        if self._joining and not scheduler.has_work:
            self._join()
        prefills, num_preempted = scheduler.schedule()
        if self._joining:
            self._join()
            max_steps = 1
        if emitted is not None:
            emitted += scheduler.decoding
        if prefills or not self._can_walk():
            finished = self._run_priced(prefills, num_preempted)
        else:
            finished = self._run_decodes(num_preempted, max_steps, until_ns)
        if emitted is not None and self._has_closing_step:
            for seq in finished:
                emitted.remove(seq)
        for seq, num_tokens in prefills:
            seq.num_computed += num_tokens
            if seq.num_computed == seq.num_tokens:
                self._begin_decoding(seq, finished)
                if emitted is not None:
                    emitted.append(seq)
        finished_requests = self._close(finished) if finished else []
        self._is_planned = self._plans_ahead and scheduler.has_work
        return LeapOutput(finished, finished_requests)

    def _can_walk(self) -> bool:
        """True if a price of the present decoding rows holds for many steps."""
        if not self._has_value_model or not self.scheduler.guided:
            return self._leaps
        is_aggregate = self.config.guided_rows == "aggregate" and self._noise is None
        return is_aggregate and self._pricing.leaps_guided

    def _join(self) -> None:
        for seq in self._joining:
            self.scheduler.add(seq)
        self._joining.clear()

    def _run_decodes(self, num_preempted: int, max_steps: int, until_ns: int) -> list[Sequence]:
        """Run decode steps until one of the rows is over; returns the rows that are."""
        scheduler, blocks, step, start_ns = self.scheduler, self.block_manager, self._clock.step, self.now_ns
        num_rows = slope = len(scheduler.decoding)
        context = position = scheduler.decode_context
        if self._pads_batches:
            position, slope = self._pricing.longest_decode(), 1
        num_guided = len(scheduler.guided) if self._has_value_model else 0
        guided_price = self._pricing.guided_price(num_guided) if num_guided else None
        if guided_price is None:
            cost, rest_id, fixed_ns = self._pricing.decode_price(position)
        else:
            cost, rest_id, fixed_ns = guided_price.cost.decode, guided_price.rest_id, guided_price.fixed_ns
        num_steps = min(max_steps, self._ends.next_step() - step)
        if cost.until is not None:
            num_steps = min(num_steps, -((position - cost.until) // slope))
        if self._has_closing_step and num_steps > 1:
            num_steps -= 1  # the last step of a row yields no token and stands alone
        kv_used, needs, num_blocks = blocks.num_used, scheduler.block_needs, blocks.num_blocks
        course = Course(
            cost, fixed_ns, position, slope, start_ns, until_ns, num_steps, step, kv_used, needs, num_blocks
        )
        if guided_price is None:
            num_run, self.now_ns, kv_used_last = self._walk(course, self.log)
        else:
            num_run, self.now_ns, kv_used_last = scheduler.guided.walk(course, guided_price.cost, self.log)
        if kv_used_last > kv_used:
            blocks.take(kv_used_last - kv_used)
        is_greedy = not scheduler.num_sampled_decodes
        scheduler.advance(num_run)
        due = self._ends.pop_until(self._clock.step)
        num_output = num_rows - len(due) if self._has_closing_step else num_rows
        self.log.add_stretch(
            rest_id,
            (num_run, start_ns, self.is_warmup, 0, num_rows, 0, context, num_output, is_greedy, num_preempted),
        )
        if self._has_value_model and guided_price is None:
            self.log.add_unguided(num_run)
        return due

    def _run_priced(self, prefills: Prefills, num_preempted: int) -> list[Sequence]:
        """Run one step at the cost model's price; returns the decoding rows that are over."""
        log, guided = self.log, self.scheduler.guided.score(prefills) if self._has_value_model else UNGUIDED
        batch = self._pricing.describe(prefills, guided)
        cost = self._pricing.cost_model.price(batch)
        rest_id = log.rest_id(cost.without_forwards())
        if self._noise is not None:
            factor = self._noise()
            log.factors.append(factor)
            cost = cost.scaled(factor)
        dur_ns, start_ns = cost.total_ns(), self.now_ns
        self.now_ns = start_ns + dur_ns
        log.dur_ns.append(dur_ns)
        log.kv_used.append(self.block_manager.num_used)
        self.scheduler.advance(1)
        due = self._ends.pop_until(self._clock.step)
        num_output = batch.num_sampling - (len(due) if self._has_closing_step else 0)
        is_greedy = -1 if batch.is_greedy is None else batch.is_greedy
        rows = (len(prefills), batch.num_decode_tokens, batch.num_prefill_tokens, batch.context_tokens)
        log.add_stretch(rest_id, (1, start_ns, self.is_warmup, *rows, num_output, is_greedy, num_preempted))
        if self._has_value_model:
            log.add_guided(guided, cost.lvm_forward)
        return due

    def _begin_decoding(self, seq: Sequence, finished: list[Sequence]) -> None:
        """Let a row whose prompt is computed decode from the next step on, unless its first token is its last."""
        if seq.first_token_ns is None:
            seq.first_token_ns = self.now_ns
        self.scheduler.finish_prefill(seq)
        if seq.num_tokens == seq.end and not self._has_closing_step:
            finished.append(seq)
            return
        self._ends.add(seq, seq.end + self._has_closing_step - seq.lead)

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
