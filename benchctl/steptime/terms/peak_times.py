"""Times at the data sheet's peaks, in microseconds for each count of a step, on one device of a deployment.

Tensor parallelism divides heads, blocks and experts among devices, once. Not divided are the projections down of a
latent attention and its cache, routers, and key-value heads beyond one for each device. A latent attention is
computed expanded for prompts and absorbed for decoding tokens (``costs/latent.py``); the context of a prompt that
is computed in parts, or has a cached prefix, is expanded again.
"""

from dataclasses import dataclass

from benchctl.costs.model_shape import ModelShape
from benchctl.steptime.work import Deployment

US_PER_S = 1e6
_HEAD_BYTES = 2
"""Embedding and head are not quantised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakTimes:
    """Compute time of a token, position, token of a prompt's context and row with logits; time to move the rest."""

    token_us: float
    prefill_position_us: float
    decode_position_us: float
    prefill_context_us: float
    head_us: float
    kv_token_us: float
    static_weights_us: float
    expert_weights_us: float
    """For one expert in every layer that has experts."""
    head_weights_us: float


def peak_times(deployment: Deployment) -> PeakTimes:
    """The times of a deployment: FLOPs over the peak of its arithmetic, bytes over the bandwidth.

    The products of attention are in bfloat16 whatever the format of the weights.
    """
    shape, hardware, tp = deployment.shape, deployment.hardware, deployment.tensor_parallel
    flop_us = US_PER_S / hardware.peak_of(shape.precision)
    attention_us = US_PER_S / hardware.peak_flops_per_s / tp
    byte_us = US_PER_S / hardware.bandwidth_bytes_per_s
    replicated, divided = replicated_params(shape), divided_params(shape, tp)
    chosen = shape.moe.experts_per_token * shape.expert_params() if shape.moe is not None else 0
    expansion = shape.layers * shape.latent.expansion_flops(shape.q_heads) if shape.latent is not None else 0
    return PeakTimes(
        token_us=2 * (replicated + divided + chosen / tp) * flop_us,
        prefill_position_us=shape.attention_flops_per_position() * attention_us,
        decode_position_us=shape.decode_attention_flops_per_position() * attention_us,
        prefill_context_us=expansion / tp * flop_us,
        head_us=shape.head_flops() * attention_us,
        kv_token_us=kv_elements(shape, tp) * deployment.kv_bytes_per_element * byte_us,
        static_weights_us=(replicated + divided) * deployment.param_bytes * byte_us,
        expert_weights_us=shape.expert_params() / tp * deployment.param_bytes * byte_us,
        head_weights_us=shape.head_flops() / 2 / tp * _HEAD_BYTES * byte_us,
    )


def replicated_params(shape: ModelShape) -> float:
    """Weights of projections that each device holds whole."""
    latent = shape.layers * shape.latent.replicated_params(shape.hidden) if shape.latent is not None else 0
    routers = shape.moe.layers * shape.hidden * shape.moe.experts if shape.moe is not None else 0
    return latent + routers


def divided_params(shape: ModelShape, tp: int) -> float:
    """The share of one of ``tp`` devices of all other weights without routed experts.

    A device has at least one key-value head.
    """
    divided = (shape.static_params() - replicated_params(shape)) / tp
    if shape.latent is not None:
        return divided
    one_head = 2 * shape.hidden * shape.head_dim * shape.layers
    return divided + one_head * (_kv_heads(shape, tp) - shape.kv_heads / tp)


def kv_elements(shape: ModelShape, tp: int) -> float:
    """Elements of the cache that a device holds for one token, over all layers."""
    if shape.latent is not None:
        return shape.layers * shape.latent.cache_elements()
    return shape.layers * 2 * _kv_heads(shape, tp) * shape.head_dim


def _kv_heads(shape: ModelShape, tp: int) -> float:
    return max(1.0, shape.kv_heads / tp)
