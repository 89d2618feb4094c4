"""The price of the next step of a scheduler: what its batch consists of, and what the cost model takes for it."""

from typing import Final, NamedTuple

from benchctl.sim.costs.cost_model import CostModel, DecodeCost, StepBatch
from benchctl.sim.guidance import UNGUIDED, GuidedStep, score_rows
from benchctl.sim.scheduler import Prefills, Scheduler
from benchctl.sim.sequence import StepClock
from benchctl.sim.step_log import StepLog


class DecodePrice(NamedTuple):
    """The price of decode steps, the number of its ``rest`` in the log, and the time of that."""

    cost: DecodeCost
    rest_id: int
    fixed_ns: int


class Pricing:
    """Describes batches to the cost model, and keeps the prices of decode steps that hold for many of them."""

    def __init__(
        self, cost_model: CostModel, scheduler: Scheduler, clock: StepClock, log: StepLog, revision: str
    ) -> None:
        self.cost_model: Final = cost_model
        self._scheduler: Final = scheduler
        self._clock: Final = clock
        self._log: Final = log
        self._revision: Final = revision
        self._is_value_model_loaded = False
        self._decode_prices: dict[tuple[int, int], DecodePrice] = {}

    def decode_price(self, position: int) -> DecodePrice:
        """The price of the decoding rows alone, from ``position`` on; see ``DecodeCost``."""
        scheduler = self._scheduler
        key = (len(scheduler.decoding), scheduler.num_sampled_decodes and 1)
        price = self._decode_prices.get(key)
        if price is None or not price.cost.holds_at(position):
            if self.cost_model.decode is None:
                raise TypeError("this cost model describes no decode steps")
            cost = self.cost_model.decode(self.describe((), UNGUIDED))
            price = DecodePrice(cost, self._log.rest_id(cost.rest), cost.rest.total_ns())
            self._decode_prices[key] = price
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
            most_new_tokens=max([1, *(num_tokens for _, num_tokens in prefills)]) if pads else 0,
            decode_context=scheduler.decode_context,
        )

    def longest_decode(self) -> int:
        """Tokens of the longest decoding row; there must be one."""
        return self._clock.step + max([seq.lead for seq in self._scheduler.decoding])

    def score(self, prefills: Prefills) -> GuidedStep:
        """Advance the guidance of the rows that sample in this step."""
        rows = [(seq.guided, seq.num_tokens) for seq in self._scheduler.guided if seq.guided is not None]
        for seq, num_tokens in prefills:
            if seq.guided is not None and seq.num_computed + num_tokens == seq.num_tokens:
                rows.append((seq.guided, seq.num_tokens))
        return score_rows(rows, self._revision) if rows else UNGUIDED

    def _longest_context(self, prefills: Prefills) -> int:
        lengths = [seq.num_computed + num_tokens for seq, num_tokens in prefills]
        return max([*lengths, self.longest_decode()] if self._scheduler.decoding else lengths)
