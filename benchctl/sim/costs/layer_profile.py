"""Step time as the sum of measured layers, see ``benchctl/steptime/layers/profile.py`` for the formula.

The tables are those that the option ``layer_profile`` names; their columns are in
``benchctl/interop/readers/layer_profile.py``. The server replays captured graphs of vLLM's default sizes, so that a
batch is padded to the next one. Nothing is fitted to a run.
"""

import math
from typing import Final

from benchctl.costs.shapes import shape_for
from benchctl.errors import UsageError
from benchctl.interop.readers.layer_profile import read_layer_tables
from benchctl.sim.config import SimConfig
from benchctl.sim.costs.cost_model import CostModel, DecodeCost, StepBatch, StepCost
from benchctl.steptime.layers.profile import Chunks, LayerProfile, captured_sizes
from benchctl.units import NS_PER_US
from benchctl.workload.datasets.files import in_data_directory

_NOTHING: Final = StepCost(model_forward=0)


def cost_model(config: SimConfig) -> CostModel:
    """The cost model of the configured tables. Raises UsageError when they or the model cannot be read."""
    tables = read_layer_tables(in_data_directory(config.layer_profile or ""))
    if tables.tensor_parallel != config.tensor_parallel_size:
        raise UsageError(
            f"{config.layer_profile}: layers at tensor parallelism {tables.tensor_parallel}, and "
            f"tensor_parallel_size is {config.tensor_parallel_size}; name the tables of the same degree"
        )
    profile = LayerProfile(tables, shape_for(config.model), captured_sizes(config.max_num_seqs))

    def price(batch: StepBatch) -> StepCost:
        if batch.is_plain_decode:
            return decode(batch).cost_at(batch.context_tokens)
        time_us = profile.step_us(chunks_of(batch), batch.num_decode_tokens, batch.decode_context)
        return StepCost(model_forward=round(time_us * NS_PER_US))

    def decode(batch: StepBatch) -> DecodeCost:
        return decode_cost(profile, batch.num_decode_tokens, batch.context_tokens)

    return CostModel(price=price, decode=decode)


def chunks_of(batch: StepBatch) -> Chunks:
    """The prompts of a step. With half a token for the last position, c (c + 1) / 2 becomes c c / 2."""
    tokens = batch.num_prefill_tokens
    positions = batch.attended_positions - batch.decode_context - tokens / 2
    return Chunks(number=batch.num_seqs - batch.num_decode_tokens, tokens=tokens, positions=positions)


def decode_cost(profile: LayerProfile, rows: int, context: int) -> DecodeCost:
    """The price of steps of decoding rows alone, around a sum of their contexts."""
    line = profile.tables.attention.decode_line(rows, context / rows)
    layers = profile.shape.layers
    fixed_us = profile.of_tokens_us(rows) + profile.of_rows_us(rows) + layers * line.intercept_us
    return DecodeCost(
        rest=_NOTHING,
        lines=((fixed_us * NS_PER_US, layers * line.slope_us / rows * NS_PER_US),),
        since=math.ceil(line.since * rows),
        until=None if line.until is None else math.ceil(line.until * rows),
    )
