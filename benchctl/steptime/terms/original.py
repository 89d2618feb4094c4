"""The published step-time model with seven coefficients, in its corrected reading, for comparison.

    step time = b1 max(prefill compute, prefill kv) + b2 max(decode compute, decode kv) + b3 static weights
                + b4 expert weights + b5 all-reduce + b6 requests + b7

Its conventions, which ``features.py`` corrects: both phases of a latent attention are absorbed, with d^2 weights
for the query; heads, routers and norms are left out; weights add to compute instead of hiding behind it; an
all-reduce moves its bytes at the bandwidth of the memory; an empty step reads the weights of k experts. Three of
its errors are not kept: results are microseconds, tensor parallelism divides once, and experts are counted by
tokens.

Source: revision 7 of the latency model of inference-sim; the H100 has 989.5 TFLOP/s there.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from benchctl.costs.latent import LatentShape
from benchctl.costs.model_shape import ModelShape
from benchctl.steptime.terms.peak_times import US_PER_S
from benchctl.steptime.work import Deployment

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
