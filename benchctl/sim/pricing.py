"""The price of the next step of a scheduler: what its batch consists of, and what the cost model takes for it."""

from typing import Final, NamedTuple

from benchctl.sim.costs.cost_model import CostModel, DecodeCost, GuidedDecodeCost, StepBatch
from benchctl.sim.guided.guidance import UNGUIDED, GuidedStep
from benchctl.sim.scheduling.scheduler import Scheduler
from benchctl.sim.scheduling.sequence import Prefills, StepClock
from benchctl.sim.steps.log import StepLog


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
