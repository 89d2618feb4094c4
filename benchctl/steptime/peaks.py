"""Times of a step's parts at the data sheet's peaks: compute, memory, experts, all-reduces, guided work.

Tensor parallelism divides heads, blocks and experts among devices, once. Not divided are the projections down of a
latent attention and its cache, routers, and key-value heads beyond one for each device. A latent attention is
computed expanded for prompts and absorbed for decoding tokens (``LatentShape``); the context of a prompt that is
computed in parts, or has a cached prefix, is expanded again.

A small all-reduce costs a synchronisation of all devices, which no bandwidth explains: bandwidth alone is 40 times
too little for a megabyte among four H100. Engines choose among three kernels by the size m of the message, as vLLM
does:

one-shot   each of n devices reads the message of every other:   f + p (n - 1) + e (n - 1) m / link
two-shot   each reduces its part and reads the others':          f + p (n - 1) + e 2 (n - 1) / n m / link
ring       NCCL beyond 8 MiB, the same bytes with a larger floor

f, p and e of H100 and A100 are fitted to measured times of vLLM 0.14 in CUDA graphs (``benchmarks/steptime``),
which they meet within 6 %; other devices have the H100's, with their own links.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from benchctl.costs.hardware import Hardware
from benchctl.costs.model_shape import ModelShape
from benchctl.errors import UsageError
from benchctl.steptime.work import Deployment, ExpertsRead, StepWork
from benchctl.units import MIB, US_PER_S

if TYPE_CHECKING:
    from benchctl.steptime.work import Quantity

_ELEMENT_BYTES: Final = 2
"""Of activations, embedding and head, which are not quantised."""
_RING_FROM: Final = 8 * MIB
_TWO_SHOT_FROM: Final = ((2, _RING_FROM), (4, MIB // 2), (8, MIB // 4))
"""Message from which two-shot is used, by the number of devices at most."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakTimes:
    """Microseconds at peak, on one device, for each count of a step.

    Compute of a token, of a position, of a token of a prompt's context and of a row with logits; time to move the
    rest.
    """

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
    static_params = _static_params(shape, tp)
    chosen = shape.moe.experts_per_token * shape.expert_params() if shape.moe is not None else 0
    expansion = shape.layers * shape.latent.expansion_flops(shape.q_heads) if shape.latent is not None else 0
    return PeakTimes(
        token_us=2 * (static_params + chosen / tp) * flop_us,
        prefill_position_us=shape.attention_flops_per_position() * attention_us,
        decode_position_us=shape.decode_attention_flops_per_position() * attention_us,
        prefill_context_us=expansion / tp * flop_us,
        head_us=shape.head_flops() * attention_us,
        kv_token_us=kv_elements(shape, tp) * deployment.kv_bytes_per_element * byte_us,
        static_weights_us=static_params * deployment.param_bytes * byte_us,
        expert_weights_us=shape.expert_params() / tp * deployment.param_bytes * byte_us,
        head_weights_us=shape.head_flops() / 2 / tp * _ELEMENT_BYTES * byte_us,
    )


def _static_params(shape: ModelShape, tp: int) -> float:
    """Weights without routed experts that one of ``tp`` devices holds: some whole, and its share of the others.

    A device has at least one key-value head.
    """
    replicated = shape.moe.layers * shape.hidden * shape.moe.experts if shape.moe is not None else 0
    if shape.latent is not None:
        replicated += shape.layers * shape.latent.replicated_params(shape.hidden)
    divided = (shape.static_params() - replicated) / tp
    if shape.latent is None:
        one_head = 2 * shape.hidden * shape.head_dim * shape.layers
        divided += one_head * (max(1.0, shape.kv_heads / tp) - shape.kv_heads / tp)
    return replicated + divided


def kv_elements(shape: ModelShape, tp: int) -> float:
    """Elements of the cache that a device holds for one token, over all layers."""
    if shape.latent is not None:
        return shape.layers * shape.latent.cache_elements()
    return shape.layers * 2 * max(1.0, shape.kv_heads / tp) * shape.head_dim


class Kernel(NamedTuple):
    """``floor_us`` and ``peer_us`` for each other device; the link's time for the bytes times ``link_factor``."""

    floor_us: float
    peer_us: float
    link_factor: float


_H100: Final = {
    "one_shot": Kernel(4.3, 0.05, 1.65),
    "two_shot": Kernel(6.2, 0.85, 1.35),
    "ring": Kernel(27.5, 0.7, 1.32),
}
_A100: Final = {
    "one_shot": Kernel(4.9, 0.15, 1.57),
    "two_shot": Kernel(9.9, 0.65, 1.28),
    "ring": Kernel(50.0, 2.5, 1.41),
}
KERNELS: Final = {"h100-sxm": _H100, "h200-sxm": _H100, "a100-sxm": _A100, "a100-sxm-40gb": _A100}


def all_reduce_us(num_bytes: "Quantity", hardware: Hardware, devices: int) -> "Quantity":
    """One all-reduce of a message of so many bytes, in microseconds; 0 for a single device."""
    if devices == 1:
        return 0.0 * num_bytes

    def kernel_us(name: str) -> "Quantity":
        kernel = KERNELS.get(hardware.device, _H100)[name]
        link_us = moved_bytes(num_bytes, name, devices) * (US_PER_S / hardware.link_bytes_per_s)
        return kernel.floor_us + kernel.peer_us * (devices - 1) + kernel.link_factor * link_us

    if isinstance(num_bytes, float | int):
        return kernel_us(kernel_name(num_bytes, devices))
    is_large, is_ring = is_above(num_bytes, _two_shot_from(devices) - 1), is_above(num_bytes, _RING_FROM - 1)
    small_us = (1.0 - is_large) * kernel_us("one_shot") + is_large * kernel_us("two_shot")
    return (1.0 - is_ring) * small_us + is_ring * kernel_us("ring")


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


def step_all_reduces_us(tokens: "Quantity", deployment: Deployment) -> "Quantity":
    """Time of a step's all-reduces, two for each layer; 0 on one device."""
    num_bytes = tokens * (deployment.shape.hidden * _ELEMENT_BYTES)
    return 2 * deployment.shape.layers * all_reduce_us(num_bytes, deployment.hardware, deployment.tensor_parallel)


def experts_read_by(tokens: Any, deployment: Deployment, rule: ExpertsRead) -> Any:
    """Distinct experts of one layer that these quantities of tokens read, by the rule of a model; 0 if dense.

    ``linear`` and ``uniform`` are those of ``MoeShape``; ``measured`` interpolates in a table of the user's, for
    models whose routing prefers some experts. Limiting a token to some groups of experts, as DeepSeek does, leaves
    the uniform rule as it is: a token still reads each expert with probability k / N. Raises UsageError for
    ``measured`` without a table.
    """
    moe = deployment.shape.moe
    if moe is None:
        return 0.0 * tokens
    if rule != "measured":
        return moe.linear_experts(tokens) if rule == "linear" else moe.uniform_experts(tokens)
    if not deployment.measured_experts:
        raise UsageError(
            f"{deployment.shape.name}: experts that a step reads are to be measured ones, but there is no table of "
            "them; state measured_experts, or take the rule 'uniform'"
        )
    return np.interp(tokens, *np.array([(0.0, 0.0), *deployment.measured_experts]).T)


def value_model_us(work: StepWork, deployment: Deployment) -> "Quantity":
    """Roofline of the value model's pass in a guided step, in microseconds; 0 without a value model.

    Its tokens are the prompts that it prefills, the tokens that it extends its prefixes by, and the candidates,
    each with a value head. It reads its weights once and the cache of the guided rows, whose contexts are taken as
    long as the mean row's. It runs on one device.
    """
    if deployment.value_shape is None:
        return 0.0
    value_model = deployment.value_shape.as_value_model()
    times = peak_times(replace(deployment, shape=value_model, tensor_parallel=1, weight_bytes_per_param=None))
    decoded = work.value_extend_tokens + work.candidates
    tokens = work.value_prefill_tokens + decoded
    mean_context = work.context / greater(work.num_seqs, 1.0)
    compute = (
        tokens * times.token_us
        + work.value_prefill_tokens * mean_context / 2 * times.prefill_position_us
        + decoded * mean_context * times.decode_position_us
        + work.candidates * times.head_us
    )
    memory = (work.guided_rows * mean_context + tokens) * times.kv_token_us
    memory = memory + is_above(tokens, 0.0) * (times.static_weights_us + times.head_weights_us)
    return greater(compute, memory)
