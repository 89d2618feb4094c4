"""The engine: schedule, price, advance. Pure and in virtual time: no clock, no network, no waiting."""

from typing import Final, NamedTuple

from benchctl.errors import UsageError
from benchctl.records.step import StepPhase, StepRecord
from benchctl.sim.answer import Answer, plan_answers
from benchctl.sim.block_manager import BlockManager
from benchctl.sim.config import SimConfig
from benchctl.sim.costs.cost_model import CostModel, StepBatch
from benchctl.sim.costs.noise import NoiseSource
from benchctl.sim.guidance import REPEATS_FROM_TOKENS, UNGUIDED, GuidedRow, GuidedStep, score_rows
from benchctl.sim.request import Request
from benchctl.sim.scheduler import ScheduledBatch, Scheduler
from benchctl.sim.sequence import Sequence
from benchctl.workload.seeded import named_stream

_UNLIMITED: Final = 1 << 40


class StepOutput(NamedTuple):
    """The results of one step: its record, and the sequences and requests that it advanced or ended."""

    record: StepRecord
    emitted: list[Sequence]
    finished: list[Sequence]
    finished_requests: list[str]


class SimulatedEngine:
    """One server life.

    Invariants: ``now_ns`` never falls; the tokens of all steps are the tokens of all answers; every sequence
    added is finished or aborted once.
    """

    def __init__(self, config: SimConfig, cost_model: CostModel, noise: NoiseSource | None = None) -> None:
        self.config: Final = config
        self._cost_model: Final = cost_model
        self._noise: Final = noise
        self._has_value_model: Final = config.value_model is not None
        self.block_manager: Final = BlockManager(
            _UNLIMITED if cost_model.is_unlimited else config.num_kv_blocks,
            config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        self.scheduler: Final = Scheduler(
            min(config.max_num_seqs, cost_model.max_num_seqs or config.max_num_seqs),
            _UNLIMITED if cost_model.is_unlimited else config.max_num_batched_tokens,
            self.block_manager,
        )
        self.now_ns = 0
        self.is_warmup = False
        """Whether steps are marked as warm-up."""
        self._num_steps = 0
        self._num_seqs = 0
        self._is_value_model_loaded = False
        self._open: dict[str, list[Sequence]] = {}

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
        answers = plan_answers(request, self._cost_model.answer_length)
        seqs = [self._sequence(request, choice, answer) for choice, answer in enumerate(answers)]
        self._open[request.request_id] = seqs.copy()
        for seq in seqs:
            self.scheduler.add(seq)
        return seqs

    def abort(self, request_id: str) -> None:
        """Drop the unfinished sequences of a request; one that is unknown or finished is left alone."""
        if seqs := self._open.pop(request_id, None):
            self.scheduler.finish(seqs)

    def step(self) -> StepOutput:
        """Run one iteration over the batch and move virtual time to its end."""
        scheduled = self.scheduler.schedule()
        batch = self._describe(scheduled)
        kv_used_blocks = self.block_manager.num_used
        cost = self._cost_model.price(batch)
        if self._noise is not None:
            cost = cost.scaled(self._noise())
        sections = cost.sections()
        start_ns = self.now_ns
        duration_ns = sections["schedule"] + sections["model_forward"] + sections.get("sampler_total", 0)
        self.now_ns = start_ns + duration_ns
        emitted, finished = self._advance(scheduled)
        self._num_steps += 1
        record = StepRecord(
            step=self._num_steps,
            start_ns=start_ns,
            dur_ns=duration_ns,
            clock="virtual",
            phase=_phase(batch),
            is_warmup=self.is_warmup,
            num_seqs=batch.num_seqs,
            num_prefill_tokens=batch.num_prefill_tokens,
            num_decode_tokens=batch.num_decode_tokens,
            context_tokens=batch.context_tokens,
            output_tokens=len(emitted),
            is_greedy=batch.is_greedy,
            guided_rows=batch.guided.scored_rows,
            candidates=batch.guided.candidates,
            fused=batch.guided.fused,
            preempted=scheduled.num_preempted,
            kv_used_blocks=kv_used_blocks,
            value_prefill_tokens=batch.guided.value_prefill_tokens,
            value_extend_tokens=batch.guided.value_extend_tokens,
            sections_ns=sections,
        )
        return StepOutput(record, emitted, finished, self._close(finished))

    def _sequence(self, request: Request, choice: int, answer: Answer) -> Sequence:
        guidance, guided = request.guidance, None
        skips = guidance is not None and guidance.is_neutral and self.config.revision == "V2"
        if guidance is not None and self._has_value_model and not skips and not request.sampling.is_greedy:
            prompt_tokens = request.prompt.num_tokens
            guided = GuidedRow(
                guidance,
                request.sampling,
                prompt_tokens=prompt_tokens,
                draw=named_stream(request.seed, f"candidates:{request.prompt.digest}:{choice}").random,
                revision=self.config.revision,
                repeats_from=None if request.ignore_eos else prompt_tokens + REPEATS_FROM_TOKENS,
            )
        self._num_seqs += 1
        seq = Sequence(self._num_seqs, request, choice, answer, guided)
        seq.arrival_ns = self.now_ns
        return seq

    def _describe(self, scheduled: ScheduledBatch) -> StepBatch:
        prefills, decodes = scheduled.prefills, scheduled.decodes
        num_decodes, num_prefill_tokens = len(decodes), 0
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
            longest_context=_longest_context(scheduled) if pads else 0,
            most_new_tokens=max([1, *(num_tokens for _, num_tokens in prefills)]) if pads else 0,
        )

    def _score(self, scheduled: ScheduledBatch) -> GuidedStep:
        rows = [(seq.guided, seq.num_tokens) for seq in scheduled.decodes if seq.guided is not None]
        for seq, num_tokens in scheduled.prefills:
            if seq.guided is not None and seq.num_computed + num_tokens == seq.num_tokens:
                rows.append((seq.guided, seq.num_tokens))
        return score_rows(rows, self.config.revision) if rows else UNGUIDED

    def _advance(self, scheduled: ScheduledBatch) -> tuple[list[Sequence], list[Sequence]]:
        """Add a token to every row that samples; returns those rows and the ones that ended."""
        emitted, due = list(scheduled.decodes), []
        for seq in emitted:
            num_tokens = seq.num_tokens + 1
            seq.num_tokens = num_tokens
            if num_tokens >= seq.next_event:
                due.append(seq)
        self.scheduler.decode_context += len(emitted)
        finished: list[Sequence] = []
        for seq in due:
            self._handle_event(seq, emitted, finished)
        for seq, num_tokens in scheduled.prefills:
            seq.num_computed += num_tokens
            if seq.num_computed == seq.num_tokens:
                seq.num_tokens += 1
                emitted.append(seq)
                if seq.first_token_ns is None:
                    seq.first_token_ns = self.now_ns
                self.scheduler.finish_prefill(seq)
                if seq.num_tokens == seq.end and not self._cost_model.has_closing_step:
                    finished.append(seq)
        if finished:
            self.scheduler.finish(finished)
        return emitted, finished

    def _handle_event(self, seq: Sequence, emitted: list[Sequence], finished: list[Sequence]) -> None:
        if seq.num_tokens < seq.end:
            self.scheduler.expect_event(seq)
        elif seq.num_tokens == seq.end:
            if not self._cost_model.has_closing_step:
                finished.append(seq)
        else:
            seq.num_tokens -= 1
            self.scheduler.decode_context -= 1
            emitted.remove(seq)
            finished.append(seq)

    def _close(self, finished: list[Sequence]) -> list[str]:
        """Forget finished sequences; returns the requests that have none left."""
        closed = []
        for seq in finished:
            seq.last_token_ns = self.now_ns
            open_seqs = self._open[seq.request.request_id]
            open_seqs.remove(seq)
            if not open_seqs:
                del self._open[seq.request.request_id]
                closed.append(seq.request.request_id)
        return closed


def _phase(batch: StepBatch) -> StepPhase:
    if not batch.num_prefill_tokens:
        return "decode"
    return "mixed" if batch.num_decode_tokens else "prefill"


def _longest_context(scheduled: ScheduledBatch) -> int:
    lengths = [seq.num_tokens for seq in scheduled.decodes]
    lengths += [seq.num_computed + num_tokens for seq, num_tokens in scheduled.prefills]
    return max(lengths)
