"""Features of steps: the columns that a step-time model weighs with coefficients, in a fixed order."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from benchctl.costs.model_shape import LatentShape, ModelShape
from benchctl.steptime.peaks import (
    US_PER_S,
    experts_read_by,
    greater,
    is_above,
    peak_times,
    step_all_reduces,
    value_model_us,
)
from benchctl.steptime.work import Deployment, ExpertsRead, StepWork, Structure

if TYPE_CHECKING:
    from benchctl.steptime.work import Quantity

_PEAKS: Final = {"h100-sxm": 989.5e12}


@dataclass(frozen=True, slots=True, kw_only=True)
class OriginalTimes:
    """Times of the published features, in microseconds for each count of a step."""

    token_us: float
    position_us: float
    kv_token_us: float
    static_weights_us: float
    expert_weights_us: float
    all_reduce_token_us: float

    def compute_us(self, tokens: "Quantity", positions: "Quantity") -> "Quantity":
        """FLOPs of one phase at peak."""
        return tokens * self.token_us + positions * self.position_us

    def kv_us(self, context: "Quantity", tokens: "Quantity") -> "Quantity":
        """Bytes of key-value cache of one phase, read and written."""
        return (context + tokens) * self.kv_token_us


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentFlops:
    """FLOPs of an absorbed latent attention in one layer: six projections and scores for each token, two for each
    position. With tokens T and no context, the positions of a prompt are T / 2 each.
    """

    down: float
    query: float
    query_absorbed: float
    value_absorbed: float
    output: float
    nope_position: float
    rope_position: float

    @property
    def for_token(self) -> float:
        return self.down + self.query + self.query_absorbed + self.value_absorbed + self.output

    @property
    def for_position(self) -> float:
        return self.nope_position + self.rope_position


def latent_flops(shape: ModelShape, latent: LatentShape, tp: int) -> LatentFlops:
    """The seven published terms, on one device; the projection down is not divided."""
    d, heads = shape.hidden, shape.q_heads
    return LatentFlops(
        down=2 * d * (latent.kv_rank + latent.rope_dim),
        query=2 * d * d / tp,
        query_absorbed=2 * heads * latent.nope_dim * latent.kv_rank / tp,
        value_absorbed=2 * heads * latent.kv_rank * latent.value_dim / tp,
        output=2 * heads * latent.value_dim * d / tp,
        nope_position=4 * heads / tp * latent.kv_rank,
        rope_position=2 * heads / tp * latent.rope_dim,
    )


def original_times(deployment: Deployment) -> OriginalTimes:
    """The times of a deployment under the published conventions; products are in bfloat16."""
    shape, hardware, tp = deployment.shape, deployment.hardware, deployment.tensor_parallel
    flop_us = US_PER_S / _PEAKS.get(hardware.name, hardware.peak_flops_per_s)
    byte_us = US_PER_S / hardware.bandwidth_bytes_per_s
    kv_width = shape.kv_heads * shape.head_dim
    if shape.latent is None:
        token = 2 * shape.hidden * (2 * shape.q_heads * shape.head_dim + 2 * kv_width) / tp
        position, kv_elements = 4 * shape.q_heads / tp * shape.head_dim, 2 * kv_width / tp
    else:
        flops = latent_flops(shape, shape.latent, tp)
        token, position, kv_elements = flops.for_token, flops.for_position, shape.latent.cache_elements()
    dense = shape.dense_layers * 3 * shape.hidden * shape.ffn / tp
    shared = chosen = 0.0
    if shape.moe is not None:
        shared = shape.moe.layers * 3 * shape.hidden * shape.moe.shared_ffn / tp
        chosen = shape.moe.experts_per_token * shape.expert_params() / tp
    static_params = shape.layers * token / 2 + dense + shared
    return OriginalTimes(
        token_us=2 * (static_params + chosen) * flop_us,
        position_us=shape.layers * position * flop_us,
        kv_token_us=shape.layers * kv_elements * deployment.kv_bytes_per_element * byte_us,
        static_weights_us=static_params * deployment.param_bytes * byte_us,
        expert_weights_us=shape.expert_params() / tp * deployment.param_bytes * byte_us,
        all_reduce_token_us=shape.layers * 2 * shape.hidden * 2 * byte_us if tp > 1 else 0.0,
    )


if TYPE_CHECKING:
    from collections.abc import Callable

    from benchctl.steptime.work import Quantity

    FeaturesOf: TypeAlias = Callable[[StepWork], tuple[Quantity, ...]]

_OVERHEADS: Final = ("all_reduce", "layers", "requests", "steps")
_NAMES: Final[dict[Structure, tuple[str, ...]]] = {
    "original": (
        "prefill",
        "decode",
        "static_weights",
        "expert_weights",
        "all_reduce",
        "requests",
        "steps",
    ),
    "overlap": ("compute", "memory", *_OVERHEADS),
    "scaling-book": ("compute", "weights", "kv", *_OVERHEADS),
    "no-overlap": ("compute", "kv", "weights", *_OVERHEADS),
    "roofline": ("roofline",),
}
GUIDED_NAMES: Final = ("value_model", "guided_steps", "guided_rows", "candidates")
COUNTS: Final = frozenset({"layers", "requests", "steps", "guided_steps", "guided_rows", "candidates"})
"""Features that count; the others are times at peak, in microseconds."""


def feature_names(structure: Structure, *, is_guided: bool = False) -> tuple[str, ...]:
    """Names of the columns in order; ``is_guided`` adds those of a value model."""
    return _NAMES[structure] + (GUIDED_NAMES if is_guided else ())


def features(
    work: StepWork, deployment: Deployment, structure: Structure, experts_read: ExpertsRead = "uniform"
) -> "dict[str, Quantity]":
    """The features of a step, or of many, by name in the order of ``feature_names``."""
    names = feature_names(structure, is_guided=deployment.value_shape is not None)
    return dict(zip(names, step_features(deployment, structure, experts_read)(work), strict=True))


def step_features(
    deployment: Deployment, structure: Structure, experts_read: ExpertsRead = "uniform"
) -> "FeaturesOf":
    """The function from the work of a step, or of many, to its features, with all constants computed once.

    Raises UsageError for measured experts without a table.
    """
    price = (
        _original(deployment, experts_read)
        if structure == "original"
        else _corrected(deployment, structure, experts_read)
    )
    value_us = value_model_us(deployment)
    if value_us is None:
        return price
    return lambda work: (
        *price(work),
        value_us(work),
        is_above(work.guided_rows, 0.0),
        work.guided_rows,
        work.candidates,
    )


def _corrected(deployment: Deployment, structure: Structure, experts_read: ExpertsRead) -> "FeaturesOf":
    """Columns of all structures but the published one."""
    times, layers = peak_times(deployment), float(deployment.shape.layers)
    num_experts, all_reduces = experts_read_by(deployment, experts_read), step_all_reduces(deployment)
    columns = _COLUMNS[structure]

    def price(work: StepWork) -> "tuple[Quantity, ...]":
        tokens = work.prefill_tokens + work.decode_tokens
        has_tokens = is_above(tokens, 0.0)
        compute = (
            tokens * times.token_us
            + work.prefill_positions * times.prefill_position_us
            + work.decode_positions * times.decode_position_us
            + work.prefill_context * times.prefill_context_us
            + work.num_sampled * times.head_us
        )
        kv = (work.prefill_context + work.decode_context + tokens) * times.kv_token_us
        weights: Quantity = has_tokens * times.static_weights_us
        if num_experts is not None:
            weights = weights + num_experts(tokens) * times.expert_weights_us
        # One row with logits reads the whole head.
        weights = weights + is_above(work.num_sampled, 0.0) * times.head_weights_us
        if structure == "roofline":
            return (greater(compute, kv + weights),)
        all_reduce = has_tokens * (0.0 if all_reduces is None else all_reduces(tokens))
        requests = work.num_prefills + work.num_decodes
        return (*columns(compute, kv, weights), all_reduce, has_tokens * layers, requests, has_tokens * 0.0 + 1.0)

    return price


def _overlap(compute: "Quantity", kv: "Quantity", weights: "Quantity") -> "tuple[Quantity, ...]":
    is_compute_bound = is_above(compute, kv + weights)
    return is_compute_bound * compute, (1.0 - is_compute_bound) * (kv + weights)


def _scaling_book(compute: "Quantity", kv: "Quantity", weights: "Quantity") -> "tuple[Quantity, ...]":
    is_compute_bound = is_above(compute, weights)
    return is_compute_bound * compute, (1.0 - is_compute_bound) * weights, kv


def _no_overlap(compute: "Quantity", kv: "Quantity", weights: "Quantity") -> "tuple[Quantity, ...]":
    return compute, kv, weights


_COLUMNS: Final = {
    "overlap": _overlap,
    "scaling-book": _scaling_book,
    "no-overlap": _no_overlap,
    "roofline": _no_overlap,
}


def _original(deployment: Deployment, experts_read: ExpertsRead) -> "FeaturesOf":
    times, num_experts = original_times(deployment), experts_read_by(deployment, experts_read)
    moe = deployment.shape.moe
    # With no tokens the published form counts the experts of one.
    fewest_experts = float(moe.experts_per_token) if moe is not None and experts_read == "linear" else 0.0

    def price(work: StepWork) -> "tuple[Quantity, ...]":
        prefill = greater(
            times.compute_us(work.prefill_tokens, work.prefill_positions),
            times.kv_us(work.prefill_context, work.prefill_tokens),
        )
        decode = greater(
            times.compute_us(work.decode_tokens, work.decode_positions),
            times.kv_us(work.decode_context, work.decode_tokens),
        )
        tokens, requests = work.prefill_tokens + work.decode_tokens, work.num_prefills + work.num_decodes
        nothing = 0.0 * tokens
        experts = nothing if num_experts is None else greater(num_experts(tokens), nothing + fewest_experts)
        return (
            prefill,
            decode,
            nothing + times.static_weights_us,
            experts * times.expert_weights_us,
            tokens * times.all_reduce_token_us,
            requests,
            nothing + 1.0,
        )

    return price
