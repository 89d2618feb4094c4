"""Step time of llm-mock (dongmingli-Ben/llm-mock, commit f07dd39).

t = b max(len_i) max(c_i) / 468,000 + 0.06 s, with b rows, len_i tokens of row i so far and c_i new ones: a mixed
batch is padded to the longest row and the largest chunk. Its scheduler runs at most ten requests unless
``max_num_seqs`` is set, has no limit on tokens or memory, and gives each request a last step that yields no token.
"""

from typing import Final

from benchctl.sim.config import SimConfig
from benchctl.sim.costs.cost_model import CostModel, DecodeCost, ServerRules, StepBatch, StepCost
from benchctl.units import NS_PER_S

_PRODUCT_PER_S: Final = 468_000
_FIXED_S: Final = 120 / 2000


def cost_model(config: SimConfig) -> CostModel:
    """The cost model, of which a configuration changes only the size of the batch (``BATCH_SIZE``)."""
    is_set = config.max_num_seqs != SimConfig.model_fields["max_num_seqs"].default
    return CostModel(
        step=lambda batch: StepCost(  # all forward: llm-mock has no sampler of its own
            model_forward=mock_step_ns(batch.num_seqs, batch.longest_context, batch.most_new_tokens)
        ),
        decode=_decode,
        rules=ServerRules(
            max_num_seqs=config.max_num_seqs if is_set else 10,
            is_unlimited=True,
            pads_batches=True,
            has_closing_step=True,
            answer_length=mock_length,
        ),
    )


def _decode(batch: StepBatch) -> DecodeCost:
    """One line in the longest context: decoding rows have one new token each."""
    slope_ns = batch.num_seqs / _PRODUCT_PER_S * NS_PER_S
    return DecodeCost(rest=StepCost(model_forward=0), lines=((_FIXED_S * NS_PER_S, slope_ns),))


def mock_length(prompt_tokens: int) -> int:
    """Tokens of an answer: 50 + floor(min(p, 500) 100 / 500), whatever the request asks for."""
    return 50 + min(prompt_tokens, 500) * 100 // 500


def mock_step_ns(num_seqs: int, longest_context: int, most_new_tokens: int) -> int:
    """b max(len) max(c) / 468,000 + 0.06, in nanoseconds."""
    return round((num_seqs * longest_context * most_new_tokens / _PRODUCT_PER_S + _FIXED_S) * NS_PER_S)
