"""Features of steps: the columns that a step-time model weighs with coefficients, in a fixed order.

Times at the data sheet's peaks are in microseconds; counts (``layers``, ``requests``, ``steps``, ``guided_steps``,
``guided_rows``, ``candidates``) have coefficients in microseconds each. With C the FLOPs of a step at peak, K its
key-value bytes and W its weights at peak bandwidth, C and W with the head:

overlap    compute C or memory K + W, whichever is larger, the other 0; all_reduce, layers, requests, steps
roofline   roofline max(C, K + W), whose coefficient is 1
original   the seven published ones (``_original``)

A step without tokens has none of these but ``steps``; the published form reads weights even then. A deployment
with a value model adds that model's forward pass at its roofline, 1 for a guided step, its rows and candidates.

Two columns for one maximum let compute and memory have efficiencies of their own while the model stays linear.
Every step of a model has the same layers and steps, so that their coefficients differ only over models.

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

f, p and e of H100 and A100 are fitted to measured times of vLLM 0.14 in CUDA graphs,
which they meet within 6 %; other devices have the H100's, with their own links.
"""

from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np

from benchctl.costs.hardware import Hardware
from benchctl.costs.model_shape import LatentShape, ModelShape
from benchctl.errors import UsageError
from benchctl.steptime.work import Deployment, ExpertsRead, Quantity, StepWork, Structure
from benchctl.units import MIB, US_PER_S

_NAMES: Final[dict[Structure, tuple[str, ...]]] = {
    "original": (
        *("prefill", "decode", "static_weights", "expert_weights"),
        *("all_reduce", "requests", "steps"),
    ),
    "overlap": ("compute", "memory", "all_reduce", "layers", "requests", "steps"),
    "roofline": ("roofline",),
}
COUNTS: Final = frozenset({"layers", "requests", "steps", "guided_steps", "guided_rows", "candidates"})
"""Features that count; the others are times at peak, in microseconds."""
_PUBLISHED_PEAKS: Final = {"h100-sxm": 989.5e12}
_ELEMENT_BYTES: Final = 2
"""Of activations, embedding and head, which are not quantised."""
_RING_FROM: Final = 8 * MIB
_TWO_SHOT_FROM: Final = ((2, _RING_FROM), (4, MIB // 2), (8, MIB // 4))
"""Message from which two-shot is used, by the number of devices at most."""


def feature_names(structure: Structure, *, is_guided: bool = False) -> tuple[str, ...]:
    """Names of the columns in order; ``is_guided`` adds those of a value model."""
    return _NAMES[structure] + (("value_model", "guided_steps", "guided_rows", "candidates") if is_guided else ())


def features(
    work: StepWork, deployment: Deployment, structure: Structure, experts_read: ExpertsRead = "uniform"
) -> dict[str, Quantity]:
    """The features of a step, or of many, by name in the order of ``feature_names``.

    Raises UsageError for measured experts without a table.
    """
    is_guided = deployment.value_shape is not None
    columns = (
        _original(work, deployment, experts_read)
        if structure == "original"
        else _corrected(work, deployment, structure, experts_read)
    )
    if is_guided:
        guidance = (is_above(work.guided_rows, 0.0), work.guided_rows, work.candidates)
        columns = (*columns, value_model_us(work, deployment), *guidance)
    return dict(zip(feature_names(structure, is_guided=is_guided), columns, strict=True))


def _corrected(
    work: StepWork, deployment: Deployment, structure: Structure, experts_read: ExpertsRead
) -> tuple[Quantity, ...]:
    """Columns of all structures but the published one."""
    times, tokens = peak_times(deployment), work.tokens
    has_tokens = is_above(tokens, 0.0)
    compute = (
        tokens * times.token_us
        + work.prefill_positions * times.prefill_position_us
        + work.decode_positions * times.decode_position_us
        + work.prefill_context * times.prefill_context_us
        + work.num_sampled * times.head_us
    )
    kv = (work.context + tokens) * times.kv_token_us
    weights: Quantity = has_tokens * times.static_weights_us
    if deployment.shape.moe is not None:
        weights = weights + experts_read_by(tokens, deployment, experts_read) * times.expert_weights_us
    # One row with logits reads the whole head.
    memory = kv + (weights + is_above(work.num_sampled, 0.0) * times.head_weights_us)
    if structure == "roofline":
        return (greater(compute, memory),)
    is_compute_bound, shape = is_above(compute, memory), deployment.shape
    num_bytes = tokens * (shape.hidden * _ELEMENT_BYTES)
    all_reduce = all_reduce_us(num_bytes, deployment.hardware, deployment.tensor_parallel)
    return (
        is_compute_bound * compute,
        (1.0 - is_compute_bound) * memory,
        has_tokens * (2 * shape.layers * all_reduce),  # two for each layer
        has_tokens * float(shape.layers),
        work.num_seqs,
        has_tokens * 0.0 + 1.0,
    )


def _original(work: StepWork, deployment: Deployment, experts_read: ExpertsRead) -> tuple[Quantity, ...]:
    """Columns of the published structure, for comparison.

        step time = b1 max(prefill compute, prefill kv) + b2 max(decode compute, decode kv) + b3 static weights
                    + b4 expert weights + b5 all-reduce + b6 requests + b7

    Its conventions, which the other structures correct: products are in bfloat16; both phases of a latent attention
    are absorbed, with d^2 weights for the query; heads, routers and norms are left out; weights add to compute
    instead of hiding behind it; an all-reduce moves its bytes at the bandwidth of the memory; an empty step reads
    the weights of k experts. Three of its errors are not kept: results are microseconds, tensor parallelism divides
    once, and experts are counted by tokens.

    Source: revision 7 of the latency model of inference-sim; the H100 has 989.5 TFLOP/s there.
    """
    shape, hardware, tp = deployment.shape, deployment.hardware, deployment.tensor_parallel
    moe, param_bytes = shape.moe, deployment.param_bytes
    flop_us = US_PER_S / _PUBLISHED_PEAKS.get(hardware.name, hardware.peak_flops_per_s)
    byte_us = US_PER_S / hardware.bandwidth_bytes_per_s
    kv_width = shape.kv_heads * shape.head_dim
    if shape.latent is None:
        token = 2 * shape.hidden * (2 * shape.q_heads * shape.head_dim + 2 * kv_width) / tp
        position, kv_elements = 4 * shape.q_heads / tp * shape.head_dim, 2 * kv_width / tp
    else:
        of_token, of_position = latent_flops(shape, shape.latent, tp)
        token, position = sum(of_token.values()), sum(of_position.values())
        kv_elements = shape.latent.cache_elements()
    static_params = shape.layers * token / 2 + shape.dense_layers * 3 * shape.hidden * shape.ffn / tp
    chosen_params = 0.0
    if moe is not None:
        static_params += moe.layers * 3 * shape.hidden * moe.shared_ffn / tp
        chosen_params = moe.experts_per_token * shape.expert_params() / tp
    token_us, position_us = 2 * (static_params + chosen_params) * flop_us, shape.layers * position * flop_us
    kv_token_us = shape.layers * kv_elements * deployment.kv_bytes_per_element * byte_us

    def phase_us(tokens: Quantity, positions: Quantity, context: Quantity) -> Quantity:
        """The larger of the FLOPs at peak and the bytes of key-value cache, read and written."""
        return greater(tokens * token_us + positions * position_us, (context + tokens) * kv_token_us)

    nothing: Quantity = 0.0 * work.tokens
    # With no tokens the published form counts the experts of one.
    fewest_experts = float(moe.experts_per_token) if moe is not None and experts_read == "linear" else 0.0
    experts = greater(experts_read_by(work.tokens, deployment, experts_read), nothing + fewest_experts)
    return (
        phase_us(work.prefill_tokens, work.prefill_positions, work.prefill_context),
        phase_us(work.decode_tokens, work.decode_positions, work.decode_context),
        nothing + static_params * param_bytes * byte_us,
        experts * (shape.expert_params() / tp * param_bytes * byte_us),
        work.tokens * (shape.layers * 2 * shape.hidden * 2 * byte_us if tp > 1 else 0.0),
        work.num_seqs,
        nothing + 1.0,
    )


def latent_flops(shape: ModelShape, latent: LatentShape, tp: int) -> tuple[dict[str, float], dict[str, float]]:
    """The published terms of an absorbed latent attention in one layer, on one device.

    Five projections for each token, of which the one down is not divided, and two scores for each position. With
    tokens T and no context, the positions of a prompt are T / 2 each.
    """
    d, heads = shape.hidden, shape.q_heads
    of_token = {
        "down": 2 * d * (latent.kv_rank + latent.rope_dim),
        "query": 2 * d * d / tp,
        "query_absorbed": 2 * heads * latent.nope_dim * latent.kv_rank / tp,
        "value_absorbed": 2 * heads * latent.kv_rank * latent.value_dim / tp,
        "output": 2 * heads * latent.value_dim * d / tp,
    }
    return of_token, {"nope": 4 * heads / tp * latent.kv_rank, "rope": 2 * heads / tp * latent.rope_dim}


def greater(a: Quantity, b: Quantity) -> Quantity:
    """The larger of two quantities."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.maximum(a, b)
    return max(a, b)


def is_above(a: Quantity, b: Quantity) -> Quantity:
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


def all_reduce_us(num_bytes: Quantity, hardware: Hardware, devices: int) -> Quantity:
    """One all-reduce of a message of so many bytes, in microseconds; 0 for a single device."""
    if devices == 1:
        return 0.0 * num_bytes

    def kernel_us(name: str) -> Quantity:
        kernel, peers = KERNELS.get(hardware.device, _H100)[name], devices - 1
        read_bytes = num_bytes * (peers if name == "one_shot" else 2 * peers / devices)
        link_us = read_bytes * (US_PER_S / hardware.link_bytes_per_s)
        return kernel.floor_us + kernel.peer_us * peers + kernel.link_factor * link_us

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


def _two_shot_from(devices: int) -> int:
    return next((size for most, size in _TWO_SHOT_FROM if devices <= most), 0)


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


def value_model_us(work: StepWork, deployment: Deployment) -> Quantity:
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
    kv = (work.guided_rows * mean_context + tokens) * times.kv_token_us
    return greater(compute, kv + is_above(tokens, 0.0) * (times.static_weights_us + times.head_weights_us))
