"""The engine: schedule, price, advance. Pure and in virtual time: no clock, no network, no waiting."""

from typing import Final, NamedTuple

from msgspec.structs import replace

from benchctl.errors import UsageError
from benchctl.records.schema import StepRecord
from benchctl.sim.answers import PlannedAnswers
from benchctl.sim.config import SimConfig
from benchctl.sim.costs.cost_model import (
    UNGUIDED,
    DecodeCost,
    GuidedStep,
    PlantedFaults,
    StepBatch,
    cost_model_for,
    published_noise,
)
from benchctl.sim.drafts import Drafts
from benchctl.sim.guidance import GuidedRows, sampling_rows
from benchctl.sim.requests import OUTSIDE, Entry, Request
from benchctl.sim.scheduler import Scheduler
from benchctl.sim.sequences import BlockManager, Prefills, Sequence
from benchctl.sim.steps import NEVER_NS, Course, StepLog, walk

_UNLIMITED: Final = 1 << 40


class StepOutput(NamedTuple):
    """The results of one step: its record, and the sequences and requests that it advanced or ended."""

    record: StepRecord
    emitted: list[Sequence]
    finished: list[Sequence]
    finished_requests: list[str]


class SimulatedEngine:
    """One server life.

    ``step`` runs one iteration and tells all about it; ``leap`` runs iterations until something changes the batch,
    and leaves their columns in ``log``. Both run the same code and give the same steps.

    Invariants: ``now_ns`` never falls; the tokens of all steps are the tokens of all answers; every sequence
    added is finished or aborted once.
    """

    def __init__(self, config: SimConfig) -> None:
        """Raises UsageError when the configuration names an unknown model or device."""
        cost_model = cost_model_for(config)
        rules = cost_model.rules
        self.config: Final = config
        self._rules: Final = rules
        self._has_value_model: Final = config.value_model is not None
        self._noise: Final = (
            published_noise(config.noise_seed, has_value_model=self._has_value_model)
            if config.noise == "published"
            else None
        )
        self._faults: Final = PlantedFaults(config) if config.faults else None
        self.block_manager: Final = BlockManager(
            _UNLIMITED if rules.is_unlimited else config.num_kv_blocks,
            config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        speculates = config.num_speculative_tokens > 0
        self._drafts: Final = Drafts(config, self.block_manager, cost_model) if speculates else None
        guided, draws_together = GuidedRows(config), self._has_value_model and config.guided_rows == "aggregate"
        if draws_together:
            from benchctl.sim.aggregate import AggregateRows  # noqa: PLC0415 - numpy, for few servers

            guided = AggregateRows(config)
        self.scheduler: Final = Scheduler(
            min(config.max_num_seqs, rules.max_num_seqs or config.max_num_seqs),
            _UNLIMITED if rules.is_unlimited else config.max_num_batched_tokens,
            self.block_manager,
            guided=guided,
            drafts=self._drafts,
            has_closing_step=rules.has_closing_step,
        )
        is_disturbed = (self._noise or self._faults) is not None
        self.log: Final = StepLog(
            has_noise=is_disturbed,
            has_guidance=self._has_value_model,
            num_drafts=config.num_speculative_tokens,
        )
        self.cost_model: Final = cost_model
        self.is_value_model_loaded = False
        """Whether a step has scored rows, the first of which loads the value model."""
        self._prices: dict[tuple[int, int, int], tuple[DecodeCost, int, int]] = {}
        self._walks: Final = cost_model.decode is not None and self._drafts is None and self._faults is None
        self._walks_guided: Final = draws_together and cost_model.decodes_guided and not is_disturbed
        self.now_ns = 0
        self.is_warmup = False
        """Whether steps are marked as warm-up."""
        self.progress = 0.0
        """Share of the load that is over, on which a planted drift depends."""
        self._num_seqs = 0
        self._plans_ahead: Final = config.async_scheduling
        self._is_planned = False
        """Whether the next step was planned while the last one ran."""
        self._joining: list[Sequence] = []
        """Sequences that came too late for the next step."""
        self._open: dict[str, list[Sequence]] = {}
        """The unfinished sequences of each request."""

    @property
    def has_work(self) -> bool:
        return bool(self._open)

    @property
    def counts_rows(self) -> bool:
        """True if rows of one choice, sampled and guided in one way, differ in their lengths alone."""
        knows_more = (self._noise, self._faults, self._drafts, self.config.enable_prefix_caching, self._plans_ahead)
        return not any(knows_more) and (self._walks_guided or not self._has_value_model)

    def check_servable(self, request: Request) -> None:
        """Raises UsageError when a request could never fit the context or the key-value memory.

        The last drafts of a request need room as well, as far as the context goes.
        """
        prompt_tokens, num_drafts = request.prompt.num_tokens, self.config.num_speculative_tokens
        total, max_model_len = prompt_tokens + request.max_tokens, self.config.max_model_len
        sizes = f"prompt of {prompt_tokens} tokens and max_tokens {request.max_tokens}"
        if total > max_model_len:
            raise UsageError(f"{sizes} exceed the context of {max_model_len} tokens; shorten either")
        longest = max(total, min(total - 1 + num_drafts, max_model_len))
        num_blocks = self.block_manager.blocks_for(longest)
        if num_blocks > self.block_manager.num_blocks:
            drafts = f" with {num_drafts} draft tokens" if num_drafts else ""
            raise UsageError(
                f"{sizes} need {num_blocks} blocks of key-value memory{drafts}, the server has "
                f"{self.block_manager.num_blocks}; shorten either or start it with a larger num_kv_blocks"
            )

    def add_request(self, request: Request, entry: Entry = OUTSIDE) -> None:
        """Queue the choices of a request at the present virtual time; ``entry`` is its place in a phase of load.

        With asynchronous scheduling they wait beside the queue while a step runs that was planned without them.
        """
        answers = PlannedAnswers(request, self._rules.answer_length)
        seqs = [
            Sequence(self._num_seqs + choice + 1, request, choice, answers, self.now_ns, entry)
            for choice in range(request.n)
        ]
        self._num_seqs += request.n
        self._open[request.request_id] = seqs
        for seq in seqs:
            if request.guidance is not None and self._has_value_model:
                seq.guided = self.scheduler.guided.row_of(seq)
            if self._is_planned:
                self._joining.append(seq)
            else:
                self.scheduler.add(seq)

    def abort(self, request_id: str) -> None:
        """Drop the unfinished sequences of a request; one that is unknown or finished is left alone."""
        for seq in self._open.pop(request_id, ()):
            if seq in self._joining:
                self._joining.remove(seq)
                self.scheduler.add(seq)
            self.scheduler.finish(seq)

    def step(self) -> StepOutput:
        """Run one iteration over the batch and move virtual time to its end; the log is empty afterwards."""
        emitted: list[Sequence] = []
        finished, finished_requests = self._advance(1, NEVER_NS, emitted)
        record = next(self.log.records())
        self.log.clear()
        return StepOutput(record, emitted, finished, finished_requests)

    def leap(self, until_ns: int = NEVER_NS) -> tuple[list[Sequence], list[str]]:
        """Run iterations until a row begins or ends, or until time ``until_ns``.

        Returns the sequences and the requests that ended with the last of them.
        """
        return self._advance(1 << 40, until_ns, None)

    def _advance(
        self, max_steps: int, until_ns: int, emitted: list[Sequence] | None
    ) -> tuple[list[Sequence], list[str]]:
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
        if emitted is not None and self._rules.has_closing_step:
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
        return finished, finished_requests

    def _can_walk(self) -> bool:
        """True if a price of the present decoding rows holds for many steps."""
        if not self._has_value_model or not self.scheduler.guided:
            return self._walks
        return self._walks_guided and self.is_value_model_loaded

    def _decode_price(self, position: int, num_guided: int) -> tuple[DecodeCost, int, int]:
        """The price of the decoding rows alone, from ``position`` on, of which ``num_guided`` ask for guidance.

        With it the number of its sections in the log, and the time of ``rest``. One price holds for many steps.
        """
        scheduler, cost_model = self.scheduler, self.cost_model
        key = (len(scheduler.decoding), scheduler.num_sampled_decodes and 1, num_guided)
        price = self._prices.get(key)
        if price is None or cost_model.reads_contexts or not price[0].holds_at(position):
            if cost_model.decode is None:
                raise TypeError("this cost model describes no decode steps")
            guided = GuidedStep(wanted_rows=num_guided) if num_guided else UNGUIDED
            cost = cost_model.decode(self._describe((), guided))
            price = (cost, self.log.rest_id(cost.scored_rest or cost.rest), cost.rest.total_ns())
            self._prices[key] = price
        return price

    def _describe(self, prefills: Prefills, guided: GuidedStep) -> StepBatch:
        """The batch of the decoding rows and these prompts."""
        scheduler, num_prefill_tokens = self.scheduler, 0
        num_decodes = num_sampling = len(scheduler.decoding)
        context = attended = scheduler.decode_context
        num_sampled = scheduler.num_sampled_decodes
        longest_context = most_new_tokens = 0
        for seq, num_tokens in prefills:
            computed = seq.num_computed + num_tokens
            num_prefill_tokens += num_tokens
            context += computed
            attended += num_tokens * seq.num_computed + num_tokens * (num_tokens + 1) // 2
            longest_context = max(longest_context, computed)
            most_new_tokens = max(most_new_tokens, num_tokens)
            if computed == seq.num_tokens:
                num_sampling += 1
                num_sampled += not seq.is_greedy
        loads = guided.scored_rows > 0 and not self.is_value_model_loaded
        self.is_value_model_loaded |= loads
        pads, reads = self._rules.pads_batches, self.cost_model.reads_contexts
        shortest, longest = scheduler.decode_lengths() if pads or reads else (0, 0)
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
            longest_context=max(longest, longest_context),
            most_new_tokens=max(most_new_tokens, min(num_decodes, 1)),
            decode_context=scheduler.decode_context,
            shortest_decode=shortest,
            longest_decode=longest,
        )

    def _join(self) -> None:
        for seq in self._joining:
            self.scheduler.add(seq)
        self._joining.clear()

    def _run_decodes(self, num_preempted: int, max_steps: int, until_ns: int) -> list[Sequence]:
        """Run decode steps until one of the rows is over; returns the rows that are."""
        scheduler, blocks, start_ns = self.scheduler, self.block_manager, self.now_ns
        step, has_closing_step = scheduler.clock.step, self._rules.has_closing_step
        num_rows = slope = len(scheduler.decoding)
        context = position = scheduler.decode_context
        if self._rules.pads_batches:
            position, slope = scheduler.decode_lengths()[1], 1
        num_guided = len(scheduler.guided) if self._has_value_model else 0
        cost, rest_id, fixed_ns = self._decode_price(position, num_guided)
        num_steps = min(max_steps, scheduler.next_end() - step)
        if cost.until is not None:
            num_steps = min(num_steps, -((position - cost.until) // slope))
        if has_closing_step and num_steps > 1:
            num_steps -= 1  # the last step of a row yields no token and stands alone
        kv_used, needs, num_blocks = blocks.num_used, scheduler.block_needs, blocks.num_blocks
        course = Course(
            cost, fixed_ns, position, slope, start_ns, until_ns, num_steps, step, kv_used, needs, num_blocks
        )
        if num_guided:
            num_run, self.now_ns, kv_used_last = scheduler.guided.walk(course, self.log)
        else:
            num_run, self.now_ns, kv_used_last = walk(course, self.log, self._noise)
            if self._has_value_model:
                self.log.add_guided(UNGUIDED, None, num_run)
        if kv_used_last > kv_used:
            blocks.take(kv_used_last - kv_used)
        is_greedy = not scheduler.num_sampled_decodes
        over = scheduler.advance(num_run)
        num_output = num_rows - len(over) if has_closing_step else num_rows
        self.log.add_stretch(
            rest_id,
            (num_run, start_ns, self.is_warmup, 0, num_rows, 0, context, num_output, is_greedy, num_preempted),
        )
        return over

    def _run_priced(self, prefills: Prefills, num_preempted: int) -> list[Sequence]:
        """Run one step at the cost model's price; returns the decoding rows that are over."""
        log, drafts, scheduler = self.log, self._drafts, self.scheduler
        guided = (
            scheduler.guided.score(sampling_rows(prefills), scheduler.clock.step)
            if self._has_value_model
            else UNGUIDED
        )
        batch = self._describe(prefills, guided)
        num_decodes, num_sampling = batch.num_decode_tokens, batch.num_sampling
        passes_ns: tuple[float, ...] = ()
        if drafts is not None:
            batch, passes_ns = drafts.describe(batch)
        cost, factor, pause_ns = self.cost_model.price(batch), 1.0, 0
        lvm_forward = None if cost.lvm_forward is None else 0  # both forwards have columns of their own
        rest_id = log.rest_id(replace(cost, model_forward=0, lvm_forward=lvm_forward))
        if self._faults is not None:
            factor, pause_ns = self._faults.next_step(batch.num_seqs, self.progress)
        if log.has_noise:
            factor *= 1.0 if self._noise is None else self._noise()
            log.factors.append(factor)
            cost = cost.scaled(factor)
        drafting_ns = [round(pass_ns * factor) for pass_ns in passes_ns]
        start_ns, dur_ns = self.now_ns, cost.total_ns() + sum(drafting_ns) + pause_ns
        self.now_ns = start_ns + dur_ns
        log.dur_ns.append(dur_ns)
        log.kv_used.append(self.block_manager.num_used)
        if drafts is None:
            over = scheduler.advance(1)
            num_output = num_sampling - (len(over) if self._rules.has_closing_step else 0)
        else:
            num_drafts, accepted, num_gained, over = drafts.verify()
            scheduler.decode_context += num_gained
            num_output = num_gained + num_sampling - num_decodes
            log.add_drafted(num_drafts, batch.draft_tokens, accepted, *drafting_ns)
        is_greedy = -1 if batch.is_greedy is None else batch.is_greedy
        rows = (len(prefills), num_decodes, batch.num_prefill_tokens, batch.context_tokens)
        log.add_stretch(rest_id, (1, start_ns, self.is_warmup, *rows, num_output, is_greedy, num_preempted))
        if self._has_value_model:
            log.add_guided(guided, cost.lvm_forward)
        return over

    def _begin_decoding(self, seq: Sequence, finished: list[Sequence]) -> None:
        """Let a row whose prompt is computed decode from the next step on, unless its first token is its last."""
        if seq.first_token_ns is None:
            seq.first_token_ns = self.now_ns
        self.scheduler.finish_prefill(seq)
        if seq.num_tokens == seq.end and not self._rules.has_closing_step:
            finished.append(seq)

    def _close(self, finished: list[Sequence]) -> list[str]:
        """Remove finished sequences; returns the requests that have none left."""
        closed = []
        for seq in finished:
            seq.last_token_ns = self.now_ns
            self.block_manager.publish_answer(seq)
            self.scheduler.finish(seq)
            request_id = seq.request.request_id
            self._open[request_id].remove(seq)
            if not self._open[request_id]:
                del self._open[request_id]
                closed.append(request_id)
        return closed
