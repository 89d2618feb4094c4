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
"""

from typing import TYPE_CHECKING, Final

from benchctl.costs.model_shape import LatentShape, ModelShape
from benchctl.steptime.peaks import (
    experts_read_by,
    greater,
    is_above,
    peak_times,
    step_all_reduces_us,
    value_model_us,
)
from benchctl.steptime.work import Deployment, ExpertsRead, StepWork, Structure
from benchctl.units import US_PER_S

if TYPE_CHECKING:
    from benchctl.steptime.work import Quantity

_NAMES: Final[dict[Structure, tuple[str, ...]]] = {
    "original": (
        *("prefill", "decode", "static_weights", "expert_weights"),
        *("all_reduce", "requests", "steps"),
    ),
    "overlap": ("compute", "memory", "all_reduce", "layers", "requests", "steps"),
    "roofline": ("roofline",),
}
GUIDED_NAMES: Final = ("value_model", "guided_steps", "guided_rows", "candidates")
COUNTS: Final = frozenset({"layers", "requests", "steps", "guided_steps", "guided_rows", "candidates"})
"""Features that count; the others are times at peak, in microseconds."""
_PUBLISHED_PEAKS: Final = {"h100-sxm": 989.5e12}


def feature_names(structure: Structure, *, is_guided: bool = False) -> tuple[str, ...]:
    """Names of the columns in order; ``is_guided`` adds those of a value model."""
    return _NAMES[structure] + (GUIDED_NAMES if is_guided else ())


def features(
    work: StepWork, deployment: Deployment, structure: Structure, experts_read: ExpertsRead = "uniform"
) -> "dict[str, Quantity]":
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
) -> "tuple[Quantity, ...]":
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
    is_compute_bound = is_above(compute, memory)
    return (
        is_compute_bound * compute,
        (1.0 - is_compute_bound) * memory,
        has_tokens * step_all_reduces_us(tokens, deployment),
        has_tokens * float(deployment.shape.layers),
        work.num_seqs,
        has_tokens * 0.0 + 1.0,
    )


def _original(work: StepWork, deployment: Deployment, experts_read: ExpertsRead) -> "tuple[Quantity, ...]":
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

    def phase_us(tokens: "Quantity", positions: "Quantity", context: "Quantity") -> "Quantity":
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
