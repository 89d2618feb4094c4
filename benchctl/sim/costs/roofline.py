"""Step time of an ideal engine: the larger of compute and memory traffic at the data sheet's peaks.

model_forward = max(F / peak, M / bandwidth), with
F = linear T + attention P + head R   (T new tokens, P positions they see, R rows that sample)
M = weights + kv (context + T)        (read weights and every context, write the new tokens; bfloat16)

The value model's forward is the same with its own shape: T its prefill, extend and candidate tokens, R the
candidates; two of them where a step extends first and then scores. Sampling reads and writes the rows' 32-bit
probabilities a few times. Nothing else takes time (no host, no launches) but loading the value model once. Real
servers are slower; their distance to this bound is the point of the comparison.
"""

from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import Final

from benchctl.costs.hardware import Hardware
from benchctl.costs.roofline import forward_bytes, forward_flops, roofline_ns
from benchctl.costs.shapes import ModelShape
from benchctl.sim.config import SimConfig
from benchctl.sim.costs.cost_model import (
    CostModel,
    DecodeCost,
    StepBatch,
    StepCost,
    served_models,
    value_model_load_ns,
)
from benchctl.units import NS_PER_S

_PRE_PASSES: Final = 2
_SAMPLE_PASSES: Final = 4


def cost_model(config: SimConfig) -> CostModel:
    """The cost model for the configured models and device."""
    shape, value_shape, hardware = served_models(config)
    row_bytes = shape.vocab * 4  # probabilities in float32
    forward_ns, forward_with_prompts_ns = _forwards(shape, hardware)

    def step(batch: StepBatch) -> StepCost:
        return with_sampler(batch, forward_ns(batch))

    def decode(batch: StepBatch) -> DecodeCost:
        return DecodeCost(rest=with_sampler(batch, 0), lines=_decode_lines(batch, shape, hardware))

    @cache  # one for each number of rows
    def passes_ns(num_rows: int) -> tuple[int, int]:
        pre, sample = (passes * row_bytes * num_rows for passes in (_PRE_PASSES, _SAMPLE_PASSES))
        return roofline_ns(0, pre, hardware), roofline_ns(0, sample, hardware)

    def with_sampler(batch: StepBatch, forward: int) -> StepCost:
        if batch.is_greedy is None:
            return StepCost(model_forward=forward)
        pre, sample = passes_ns(batch.num_sampling)
        if batch.is_greedy:
            return StepCost(model_forward=forward, sampler_rest=pre // _PRE_PASSES)
        scored = value_shape if batch.guided.scored_rows else None
        return StepCost(
            model_forward=forward,
            sampler_rest=0,
            pre_lvm=pre,
            sample=sample,
            lvm_rest=0,
            lvm_build_pending=pre if batch.guided.wanted_rows else None,
            lvm_forward=_value_forward_ns(batch, scored, hardware) if scored else None,
            lvm_apply_guidance=pre if scored else None,
            value_model_load=value_model_load_ns(scored) if scored and batch.loads_value_model else None,
        )

    return CostModel(step=step, decode=decode, forward_ns=forward_with_prompts_ns)


def _forwards(
    shape: ModelShape, hardware: Hardware
) -> tuple[Callable[[StepBatch], int], Callable[[int, int, int, int], int]]:
    """model_forward of a batch, and that of counts (``CostModel``); what depends on neither is computed once."""
    token, position, head, decode_position = (
        forward_flops(shape, *counts, decode_positions=decodes)
        for *counts, decodes in ((1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1))
    )
    kv_bytes = shape.kv_bytes_per_token()
    weight_bytes = lru_cache(maxsize=1 << 14)(partial(forward_bytes, shape, 0))

    def with_prompts_ns(
        tokens: int, positions: int, num_sampling: int, context: int, of_position: float = position
    ) -> int:
        flops = tokens * token + positions * of_position + num_sampling * head
        num_bytes = (context + tokens) * kv_bytes + weight_bytes(tokens)
        return roofline_ns(flops, num_bytes, hardware, shape.precision)

    def forward_ns(batch: StepBatch) -> int:
        tokens = batch.num_prefill_tokens + batch.num_decode_tokens
        # The batch has one count of positions: those of a step with a prompt are taken as the prompt's.
        of_position = position if batch.num_prefill_tokens else decode_position
        counts = (tokens, batch.attended_positions, batch.num_sampling, batch.context_tokens)
        return with_prompts_ns(*counts, of_position)

    return forward_ns, with_prompts_ns


def _decode_lines(batch: StepBatch, shape: ModelShape, hardware: Hardware) -> tuple[tuple[float, float], ...]:
    """Bound by memory, and by compute: a decoding row attends to its whole context."""
    rows = batch.num_decode_tokens
    byte_ns, flop_ns = NS_PER_S / hardware.bandwidth_bytes_per_s, NS_PER_S / hardware.peak_of(shape.precision)
    return (
        (forward_bytes(shape, rows, rows) * byte_ns, shape.kv_bytes_per_token() * byte_ns),
        (
            forward_flops(shape, rows, 0, rows, decode_positions=0) * flop_ns,
            shape.decode_attention_flops_per_position() * flop_ns,
        ),
    )


def _value_forward_ns(batch: StepBatch, shape: ModelShape, hardware: Hardware) -> int:
    """Prefixes are taken as long as the mean row of the batch; a step that does not fuse needs two passes."""
    guided = batch.guided
    missing = (guided.value_prefill_tokens, guided.value_extend_tokens)
    if guided.fused is False and any(missing):
        passes = [(*missing, 0), (0, 0, guided.candidates)]
    else:
        passes = [(*missing, guided.candidates)]
    return sum(_value_pass_ns(batch, shape, hardware, *each) for each in passes)


def _value_pass_ns(
    batch: StepBatch, shape: ModelShape, hardware: Hardware, prefill: int, extend: int, candidates: int
) -> int:
    tokens, context = prefill + extend + candidates, batch.context_tokens / batch.num_seqs
    flops = forward_flops(
        shape, tokens, prefill / 2 * context, candidates, decode_positions=(extend + candidates) * context
    )
    num_bytes = forward_bytes(shape, batch.guided.scored_rows * context + tokens, tokens)
    return roofline_ns(flops, num_bytes, hardware, shape.precision)
