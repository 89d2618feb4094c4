"""Step times of the published LenVM experiment: Qwen2.5-7B on one H100 SXM under the guided SGLang fork.

Calibrated on the timing analysis of the fork (GSM8K, 50 questions with 16 samples, all released at once): 19.22 s
without guidance, 87.44 s with a 1.5B value model, top_k 5 and scale 0 on revision V1 without overlap scheduling.

model_forward = layers 0.212 ms + (max(weights / BW, F / peak) + kv context / BW) / 0.7
schedule      = 0.2 ms with overlap, 1.2 ms without, an assumption within the noise of the published k = 1 run,
                which had no overlap and took as long as the baselines. On guided steps it has 2.6 ms and 17 us a
                row more: what the published guided run takes beyond forward and sampler, put where the host
                works.
sampler       = the published means. They are host times of asynchronous calls, hence flat in the batch.
lvm_forward   = 36.6 ms (W / W_1.5B)^0.514 with the value model's weights W, a part of it for its prefill. The
                exponent follows from the one published claim about size: a 0.5B value model takes 20 % off the
                wall time. Flat in rows and candidates, as in the published sweep over top_k.

Revision V2 has 8.35 ms for build_pending (11.50 to 8.35 in the fork's own notes) and 33.3 ms for a value forward of
two passes, from its 80.02 s; where both passes fuse, the share of scoring in the published profile, 8.84 of
18.07 ms, is left. V4 has no published times and is priced like V2.
"""

from dataclasses import dataclass
from typing import Final

import msgspec

from benchctl.costs.hardware import Hardware
from benchctl.costs.shapes import ModelShape, shape_for
from benchctl.sim.config import SimConfig
from benchctl.sim.costs.cost_model import (
    CostModel,
    DecodeCost,
    StepBatch,
    StepCost,
    served_models,
    value_model_load_ns,
)
from benchctl.units import NS_PER_S, NS_PER_US

_LAYER_NS: Final = 212 * NS_PER_US
_EFFICIENCY: Final = 0.7
_SCHEDULE_NS: Final = 200 * NS_PER_US
_SCHEDULE_NOT_OVERLAPPED_NS: Final = 1_000 * NS_PER_US
_GUIDED_SCHEDULE_NS: Final = 2_600 * NS_PER_US
_GUIDED_SCHEDULE_PER_ROW_NS: Final = 17 * NS_PER_US

_PRE_NS: Final = 70 * NS_PER_US
_SAMPLE_NS: Final = 119 * NS_PER_US
_APPLY_CHECK_NS: Final = 1 * NS_PER_US
_GUIDED_PRE_NS: Final = 140 * NS_PER_US
_GUIDED_SAMPLE_NS: Final = 170 * NS_PER_US
_GREEDY_SAMPLER_NS: Final = 60 * NS_PER_US
_APPLY_GUIDANCE_NS: Final = 5_290 * NS_PER_US

_VALUE_SIZE_EXPONENT: Final = 0.514
_VALUE_PREFILL_EFFICIENCY: Final = 0.5


_V1: Final = (12_250 * NS_PER_US, 36_190 * NS_PER_US, 36_190 * NS_PER_US)
"""Times of a generation of the fork with the 1.5B value model: build_pending, and a value forward of two passes and
of fused ones."""
_V2: Final = (8_350 * NS_PER_US, 33_300 * NS_PER_US, round(33_300 * NS_PER_US * 8.84 / 18.07))


def cost_model(config: SimConfig) -> CostModel:
    """The cost model for the configured revision, schedule and models."""
    shape, value_shape, hardware = served_models(config)
    forward = _Forward.of(shape, hardware)
    guided = None if value_shape is None else _Guided.of(config, value_shape, hardware)
    schedule_ns = _SCHEDULE_NS + (0 if config.overlap_schedule else _SCHEDULE_NOT_OVERLAPPED_NS)

    def step(batch: StepBatch) -> StepCost:
        tokens = batch.num_prefill_tokens + batch.num_decode_tokens
        forward_ns = forward.time_ns(tokens, batch.attended_positions, batch.num_sampling, batch.context_tokens)
        if batch.guided.wanted_rows and guided is not None and batch.is_greedy is False:
            return guided.cost(batch, schedule_ns, forward_ns)
        return unguided_rest(batch.is_greedy, forward_ns)

    def decode(batch: StepBatch) -> DecodeCost:
        cost = DecodeCost(
            rest=unguided_rest(batch.is_greedy, 0), forward_ns=forward.launch_ns, lines=forward.decode_lines(batch)
        )
        if guided is None or not batch.guided.wanted_rows:
            return cost
        return msgspec.structs.replace(
            cost,
            rest=guided.rest(batch, schedule_ns, 0, is_scored=False),
            scored_rest=guided.rest(batch, schedule_ns, 0, is_scored=True),
            scored_ns=_APPLY_GUIDANCE_NS,
            value_forward_ns=guided.value_ns,
        )

    def unguided_rest(is_greedy: bool | None, forward_ns: int) -> StepCost:
        if is_greedy is None:
            return StepCost(schedule=schedule_ns, model_forward=forward_ns)
        if is_greedy:
            return StepCost(schedule=schedule_ns, model_forward=forward_ns, sampler_rest=_GREEDY_SAMPLER_NS)
        return StepCost(
            schedule=schedule_ns,
            model_forward=forward_ns,
            sampler_rest=0,
            pre_lvm=_PRE_NS,
            lvm_rest=_APPLY_CHECK_NS,
            sample=_SAMPLE_NS,
        )

    return CostModel(step=step, decode=decode, decodes_guided=guided is not None, forward_ns=forward.time_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Forward:
    """model_forward, see the module's formula: times in ns for each unit of work."""

    launch_ns: int
    token_ns: float
    position_ns: float
    head_ns: float
    weights_ns: float
    kv_ns: float

    @classmethod
    def of(cls, shape: ModelShape, hardware: Hardware) -> "_Forward":
        compute_ns = NS_PER_S / hardware.peak_flops_per_s / _EFFICIENCY
        memory_ns = NS_PER_S / hardware.bandwidth_bytes_per_s / _EFFICIENCY
        return cls(
            launch_ns=shape.layers * _LAYER_NS,
            token_ns=shape.linear_flops_per_token() * compute_ns,
            position_ns=shape.attention_flops_per_position() * compute_ns,
            head_ns=shape.lm_head_flops() * compute_ns,
            weights_ns=shape.weight_bytes() * memory_ns,
            kv_ns=shape.kv_bytes_per_token() * memory_ns,
        )

    def time_ns(self, tokens: int, positions: int, num_sampling: int, context: int) -> int:
        compute_ns = self.token_ns * tokens + self.position_ns * positions + self.head_ns * num_sampling
        return self.launch_ns + round(max(compute_ns, self.weights_ns) + self.kv_ns * context)

    def decode_lines(self, batch: StepBatch) -> tuple[tuple[float, float], ...]:
        """Bound by memory, and by compute: a decoding row attends to its whole context."""
        computed_ns = self.token_ns * batch.num_decode_tokens + self.head_ns * batch.num_sampling
        return (self.weights_ns, self.kv_ns), (computed_ns, self.position_ns + self.kv_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Guided:
    """The sections that guided rows add to a step; see the module's formula."""

    times: tuple[int, int, int]
    size: float
    """Time of a value forward over that of the 1.5B value model."""
    prefill_ns: float
    load_ns: int

    @classmethod
    def of(cls, config: SimConfig, value_shape: ModelShape, hardware: Hardware) -> "_Guided":
        reference_bytes = shape_for("qwen2.5-1.5b").as_value_model().weight_bytes()
        flops = value_shape.linear_flops_per_token()
        return cls(
            times=_V1 if config.revision == "V1" else _V2,
            size=(value_shape.weight_bytes() / reference_bytes) ** _VALUE_SIZE_EXPONENT,
            prefill_ns=flops / hardware.peak_flops_per_s / _VALUE_PREFILL_EFFICIENCY * NS_PER_S,
            load_ns=value_model_load_ns(value_shape),
        )

    def value_ns(self, fused: int, prefill_tokens: int) -> int:
        """lvm_forward of one step; ``fused`` is 1 for one pass."""
        _, forward_ns, fused_forward_ns = self.times
        launch_ns = fused_forward_ns if fused == 1 else forward_ns
        return round(launch_ns * self.size + self.prefill_ns * prefill_tokens)

    def rest(self, batch: StepBatch, schedule_ns: int, forward_ns: int, *, is_scored: bool) -> StepCost:
        """All but the value forward, which is 0 in a scored step."""
        return StepCost(
            schedule=schedule_ns + _GUIDED_SCHEDULE_NS + _GUIDED_SCHEDULE_PER_ROW_NS * batch.guided.wanted_rows,
            model_forward=forward_ns,
            sampler_rest=0,
            pre_lvm=_GUIDED_PRE_NS,
            lvm_rest=_APPLY_CHECK_NS,
            lvm_build_pending=self.times[0],
            lvm_forward=0 if is_scored else None,
            lvm_apply_guidance=_APPLY_GUIDANCE_NS if is_scored else None,
            value_model_load=self.load_ns if batch.loads_value_model else None,
            sample=_GUIDED_SAMPLE_NS,
        )

    def cost(self, batch: StepBatch, schedule_ns: int, forward_ns: int) -> StepCost:
        """A step with guided rows, given its schedule and forward."""
        is_scored = batch.guided.scored_rows > 0
        rest = self.rest(batch, schedule_ns, forward_ns, is_scored=is_scored)
        if not is_scored:
            return rest
        value_ns = self.value_ns(int(batch.guided.fused or 0), batch.guided.value_prefill_tokens)
        return msgspec.structs.replace(rest, lvm_forward=value_ns)
