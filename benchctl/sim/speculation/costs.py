"""The price of drafting and verifying: the batches of a step's passes, by the server's own cost model.

    draft    = pass over the decoding rows and the step's prompts, then K - 1 passes over the rows that draft on
    backfill = expansion: what the rows whose bonus token lacks its predecessor add to the first pass
               prefill:   a pass of its own over these tokens
    verify   = model_forward and sampler of the model, with 1 + K new tokens in each decoding row

A pass of a draft model is a step of it without its schedule. With ``draft_cost`` c it is c times a step of the
model itself, so that a step of decoding rows takes K c + 1 + backfill / step times one that verifies nothing, as
far as verifying takes no longer than decoding.
"""

import dataclasses
from typing import Final

import msgspec

from benchctl.sim.config import SimConfig
from benchctl.sim.costs.cost_model import CostModel, StepBatch, cost_model_for
from benchctl.sim.speculation.scheduler import DraftedRows


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
