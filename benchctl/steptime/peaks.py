"""Times of a step's parts at the data sheet's peaks: compute, memory, experts, all-reduces, guided work."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from benchctl.costs.hardware import Hardware
from benchctl.costs.model_shape import ModelShape
from benchctl.errors import UsageError
from benchctl.steptime.work import Deployment, ExpertsRead, StepWork
from benchctl.units import MIB

if TYPE_CHECKING:
    from benchctl.steptime.work import Quantity


def greater(a: "Quantity", b: "Quantity") -> "Quantity":
    """The larger of two quantities."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.maximum(a, b)
    return max(a, b)


def is_above(a: "Quantity", b: "Quantity") -> "Quantity":
    """1 where the first quantity is larger than the second, else 0."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.greater(a, b).astype(np.float64)
    return 1.0 if a > b else 0.0


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


if TYPE_CHECKING:
    from collections.abc import Callable

    from benchctl.steptime.work import Quantity

    PricedTokens: TypeAlias = Callable[[Quantity], Quantity]

_ACTIVATION_BYTES: Final = 2
_RING_FROM: Final = 8 * MIB
_TWO_SHOT_FROM: Final = ((2, _RING_FROM), (4, MIB // 2), (8, MIB // 4))
"""Message from which two-shot is used, by the number of devices at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """``floor_us`` and ``peer_us`` for each other device; the link's time for the bytes times ``link_factor``."""

    floor_us: float
    peer_us: float
    link_factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduceKernels:
    """The three kernels of one kind of device."""

    one_shot: Kernel
    two_shot: Kernel
    ring: Kernel


_H100: Final = AllReduceKernels(
    one_shot=Kernel(floor_us=4.3, peer_us=0.05, link_factor=1.65),
    two_shot=Kernel(floor_us=6.2, peer_us=0.85, link_factor=1.35),
    ring=Kernel(floor_us=27.5, peer_us=0.7, link_factor=1.32),
)
_A100: Final = AllReduceKernels(
    one_shot=Kernel(floor_us=4.9, peer_us=0.15, link_factor=1.57),
    two_shot=Kernel(floor_us=9.9, peer_us=0.65, link_factor=1.28),
    ring=Kernel(floor_us=50.0, peer_us=2.5, link_factor=1.41),
)
KERNELS: Final = {"h100-sxm": _H100, "h200-sxm": _H100, "a100-sxm": _A100, "a100-sxm-40gb": _A100}


def all_reduce_us(num_bytes: "Quantity", hardware: Hardware, devices: int) -> "Quantity":
    """One all-reduce of a message of so many bytes, in microseconds; 0 for a single device."""
    if devices == 1:
        return 0.0 * num_bytes
    kernels = KERNELS.get(hardware.device, _H100)
    if isinstance(num_bytes, float | int):
        return _kernel_us(num_bytes, kernels, kernel_name(num_bytes, devices), hardware, devices)
    one_shot, two_shot, ring = (
        _kernel_us(num_bytes, kernels, name, hardware, devices) for name in ("one_shot", "two_shot", "ring")
    )
    is_large, is_ring = is_above(num_bytes, _two_shot_from(devices) - 1), is_above(num_bytes, _RING_FROM - 1)
    return (1.0 - is_ring) * ((1.0 - is_large) * one_shot + is_large * two_shot) + is_ring * ring


def kernel_name(num_bytes: float, devices: int) -> str:
    """The kernel that an engine chooses: ``one_shot``, ``two_shot`` or ``ring``."""
    if num_bytes >= _RING_FROM:
        return "ring"
    return "one_shot" if num_bytes < _two_shot_from(devices) else "two_shot"


def moved_bytes(num_bytes: "Quantity", kernel: str, devices: int) -> "Quantity":
    """Bytes that a device reads from its peers."""
    peers = devices - 1
    return num_bytes * (peers if kernel == "one_shot" else 2 * peers / devices)


def _two_shot_from(devices: int) -> int:
    return next((size for most, size in _TWO_SHOT_FROM if devices <= most), 0)


def _kernel_us(
    num_bytes: "Quantity", kernels: AllReduceKernels, name: str, hardware: Hardware, devices: int
) -> "Quantity":
    kernel: Kernel = getattr(kernels, name)
    link_us = moved_bytes(num_bytes, name, devices) * (US_PER_S / hardware.link_bytes_per_s)
    return kernel.floor_us + kernel.peer_us * (devices - 1) + kernel.link_factor * link_us


def step_all_reduces(deployment: Deployment) -> "PricedTokens | None":
    """Time of a step's all-reduces from its tokens, two for each layer; None on one device."""
    shape, hardware, devices = deployment.shape, deployment.hardware, deployment.tensor_parallel
    if devices == 1:
        return None
    token_bytes, num_all_reduces = shape.hidden * _ACTIVATION_BYTES, 2 * shape.layers
    return lambda tokens: num_all_reduces * all_reduce_us(tokens * token_bytes, hardware, devices)


if TYPE_CHECKING:
    from collections.abc import Callable

    NumExperts: TypeAlias = Callable[[Any], Any]


def experts_read_by(deployment: Deployment, rule: ExpertsRead) -> "NumExperts | None":
    """Distinct experts of one layer that so many tokens read; None for a dense model.

    Raises UsageError for ``measured`` without a table.
    """
    moe = deployment.shape.moe
    if moe is None:
        return None
    rules: dict[str, NumExperts] = {"linear": moe.linear_experts, "uniform": moe.uniform_experts}
    if rule in rules:
        return rules[rule]
    if not deployment.measured_experts:
        raise UsageError(
            f"{deployment.shape.name}: experts that a step reads are to be measured ones, but there is no table of "
            "them; state measured_experts, or take the rule 'uniform'"
        )
    tokens_of, experts_of = (
        np.array(column) for column in zip((0.0, 0.0), *deployment.measured_experts, strict=True)
    )
    return lambda tokens: np.interp(tokens, tokens_of, experts_of)


if TYPE_CHECKING:
    from collections.abc import Callable

    from benchctl.steptime.work import Quantity

    PricedWork: TypeAlias = Callable[[StepWork], Quantity]


def value_model_us(deployment: Deployment) -> "PricedWork | None":
    """max(FLOPs at peak, bytes at peak) of the value model's pass in microseconds; None without a value model."""
    if deployment.value_shape is None:
        return None
    value_model = deployment.value_shape.as_value_model()
    times = peak_times(replace(deployment, shape=value_model, tensor_parallel=1, weight_bytes_per_param=None))

    def price(work: StepWork) -> "Quantity":
        tokens = work.value_prefill_tokens + work.value_extend_tokens + work.candidates
        rows = work.num_prefills + work.num_decodes
        mean_context = (work.prefill_context + work.decode_context) / greater(rows, 1.0)
        compute = (
            tokens * times.token_us
            + work.value_prefill_tokens * mean_context / 2 * times.prefill_position_us
            + (work.value_extend_tokens + work.candidates) * mean_context * times.decode_position_us
            + work.candidates * times.head_us
        )
        memory = (work.guided_rows * mean_context + tokens) * times.kv_token_us
        memory = memory + is_above(tokens, 0.0) * (times.static_weights_us + times.head_weights_us)
        return greater(compute, memory)

    return price
