"""Descriptions of batches whose decoding rows have clocks of their own."""

from benchctl.sim.pricing import Pricing


class DraftingPricing(Pricing):
    """A pricing for rows that gain several tokens in a step."""

    def _decode_contexts(self) -> tuple[int, int]:
        lengths = [seq.num_tokens for seq in self._scheduler.decoding]
        return (min(lengths), max(lengths)) if lengths else (0, 0)
