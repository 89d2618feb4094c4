"""Step time as the sum of measured layers, see ``benchctl/steptime/layers.py`` for the formula.

The tables are those that the option ``layer_profile`` names; their columns are in
``benchctl/interop/layer_profile.py``. The server replays captured graphs of vLLM's default sizes, so that a
batch is padded to the next one. Nothing is fitted to a run.
"""

import math
from typing import Final

from benchctl.costs.shapes import shape_for
from benchctl.errors import UsageError
from benchctl.interop.layer_profile import read_layer_tables
from benchctl.sim.config import SimConfig
from benchctl.sim.costs.cost_model import CostModel, DecodeCost, StepBatch, StepCost
from benchctl.steptime.layers import Chunks, DecodingRows, LayerProfile, captured_sizes
from benchctl.units import NS_PER_US
from benchctl.workload.datasets.base import in_data_directory

_NOTHING: Final = StepCost(model_forward=0)


def cost_model(config: SimConfig) -> CostModel:
    """The cost model of the configured tables. Raises UsageError when they or the model cannot be read."""
    tables = read_layer_tables(in_data_directory(config.layer_profile or ""))
    if tables.tensor_parallel != config.tensor_parallel_size:
        raise UsageError(
            f"{config.layer_profile}: layers at tensor parallelism {tables.tensor_parallel}, and "
            f"tensor_parallel_size is {config.tensor_parallel_size}; name the tables of the same degree"
        )
    if config.num_speculative_tokens and tables.verification is None and not tables.attention.has_prompts:
        raise UsageError(
            f"{config.layer_profile}: attention.csv has neither decoding rows of several query tokens "
            "(decode_q_len) nor prompts, and either says how long the attention of a verification takes; measure "
            "one of the two, or leave num_speculative_tokens out"
        )
    profile = LayerProfile(tables, shape_for(config.model), captured_sizes(config.max_num_seqs))

    def step(batch: StepBatch) -> StepCost:
        time_us = profile.step_us(chunks_of(batch), decodes_of(batch), batch.draft_tokens)
        return StepCost(model_forward=round(time_us * NS_PER_US))

    def decode(batch: StepBatch) -> DecodeCost:
        return decode_cost(profile, decodes_of(batch))

    return CostModel(step=step, decode=decode, reads_contexts=tables.skew is not None)


def chunks_of(batch: StepBatch) -> Chunks:
    """The prompts of a step. With half a token for the last position, c (c + 1) / 2 becomes c c / 2."""
    tokens = batch.num_prefill_tokens
    positions = batch.attended_positions - batch.decode_positions - tokens / 2
    return Chunks(number=batch.num_seqs - batch.num_decodes, tokens=tokens, positions=positions)


def decodes_of(batch: StepBatch) -> DecodingRows:
    """The decoding rows of a step."""
    return DecodingRows(
        number=batch.num_decodes,
        context=batch.decode_context,
        shortest=batch.shortest_decode,
        longest=batch.longest_decode,
    )


def decode_cost(profile: LayerProfile, decodes: DecodingRows) -> DecodeCost:
    """The price of steps of decoding rows alone: every context grows by one token a step.

    With x the sum of n contexts, the mean is x / n and the longest (x + d) / n, of which d never changes.
    """
    rows, layers = decodes.number, profile.shape.layers
    share = profile.share_of_longest(0, decodes)
    lines = [(1 - share, 0, profile.tables.attention.decode_line(rows, decodes.mean))]
    if share:
        ahead = decodes.longest * rows - decodes.context
        lines.append((share, ahead, profile.tables.attention.decode_line(rows, decodes.longest)))
    fixed_us = profile.of_tokens_us(rows) + profile.of_rows_us(rows)
    fixed_us += layers * sum(part * (line.intercept_us + line.slope_us * d / rows) for part, d, line in lines)
    slope_us = layers * sum(part * line.slope_us for part, _, line in lines) / rows
    ends = [math.ceil(line.until * rows) - d for _, d, line in lines if line.until is not None]
    return DecodeCost(
        rest=_NOTHING,
        lines=((fixed_us * NS_PER_US, slope_us * NS_PER_US),),
        since=max(0, *(math.ceil(line.since * rows) - d for _, d, line in lines)),
        until=min(ends, default=None),
    )
