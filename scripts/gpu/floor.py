"""The least times of a guided step at the peaks of a data sheet: weights and prefixes read once."""

from dataclasses import dataclass

from benchctl.costs.hardware import Hardware
from benchctl.costs.model_shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class Floor:
    """Seconds at the peaks."""

    base_s: float
    value_s: float

    @property
    def ratio(self) -> float:
        return (self.base_s + self.value_s) / self.base_s


def guided_floor(
    base: ModelShape, value: ModelShape, hardware: Hardware, *, batch: int, candidates: int, context: float
) -> Floor:
    """Of a step with reuse: each row has a token for the base model, and its candidates for the value model."""
    return Floor(
        base_s=_shortest_s(hardware, base, batch, batch, context, base.lm_head_flops()),
        value_s=_shortest_s(hardware, value, batch, batch * candidates, context, value.value_head_flops()),
    )


def _shortest_s(
    hardware: Hardware, shape: ModelShape, rows: int, tokens: int, context: float, head_flops: int
) -> float:
    """The longer of moving weights and prefixes once, and computing; the embedding is hardly read."""
    linear = shape.linear_flops_per_token() + head_flops
    # A weight of bfloat16 has two bytes and takes part in two FLOPs of each token.
    num_bytes = linear + rows * context * shape.kv_bytes_per_token()
    flops = tokens * (linear + context * shape.attention_flops_per_position())
    return max(num_bytes / hardware.bandwidth_bytes_per_s, flops / hardware.peak_flops_per_s)
