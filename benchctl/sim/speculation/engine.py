"""An engine that drafts and verifies: every step is priced by itself, and its rows gain several tokens."""

from typing import Final

from benchctl.errors import UsageError
from benchctl.sim.config import SimConfig
from benchctl.sim.costs.cost_model import CostModel
from benchctl.sim.costs.noise import NoiseSource
from benchctl.sim.engine import SimulatedEngine
from benchctl.sim.guided.guidance import UNGUIDED
from benchctl.sim.guided.rows import GuidedRows
from benchctl.sim.pricing import Pricing
from benchctl.sim.requests.request import Request
from benchctl.sim.scheduling.scheduler import Scheduler
from benchctl.sim.scheduling.sequence import Prefills, Sequence
from benchctl.sim.speculation.costs import DraftCosts, verified
from benchctl.sim.speculation.pricing import DraftingPricing
from benchctl.sim.speculation.scheduler import DraftingScheduler
from benchctl.sim.steps.log import DraftedStep
from benchctl.sim.steps.walk import Walk


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
